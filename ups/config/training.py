"""The section `training`, and physics: priors in a loss, laws of tasks, test-time conditioning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ups.config.architecture import TauConfig
from ups.config.stages import AmpDtype, CompileMode, LatentDtype, check_one_batch_size
from ups.errors import needs
from ups.section import Count, CountOrZero, Fraction, NotNegative, Positive, Section, key
from ups.stages import AUGMENTED, AUTOENCODER, FORECASTERS, GENERATIVE, NOTHING, ROLLED_OUT, STUDENT
from ups_store.sources import LocalPath

with needs("train"):
    from pydantic import BeforeValidator, Field, model_validator


class QueryCurriculumConfig(Section):
    """How the number of points grows, or shrinks, to `num_queries` during training."""

    enabled: bool = key(False, "change the number of points during training")
    start_queries: Count | None = key(None, "points at the start; by default the whole grid")
    share: Annotated[float, Field(gt=0, le=1)] = key(
        0.5, "share of the stage in which it goes to num_queries, step by step, linearly"
    )


class QuerySamplingConfig(Section):
    """At how many points of a field the decoder is asked during training."""

    num_queries: Count | None = key(None, "random points a batch; by default the whole grid")
    curriculum: QueryCurriculumConfig = QueryCurriculumConfig()


# As the earlier system called them, `lambda_...`.
_PRIORS = ("conservation", "divergence", "residual", "boundary")

# Weights of the earlier system that weigh no physics of ours: 0 is all that they may be.
_OTHER_PRIORS = ("lambda_positivity", "lambda_latent_norm", "lambda_latent_diversity")


class PhysicsPriorsConfig(Section):
    """Losses of decoded predictions that need no truth: what laws of the task say (`laws`); 0 is off."""

    enabled: bool = key(True, "off leaves all of them out")
    conservation: NotNegative = key(0.0, "weight of the drift of conserved means, relative")
    divergence: NotNegative = key(0.0, "weight of the divergence of incompressible flow")
    residual: NotNegative = key(0.0, "weight of the equation's residual over a step")
    boundary: NotNegative = key(0.0, "weight of errors at dirichlet and neumann boundaries")
    every: Count = key(1, "optimiser steps from one to the next")
    warmup_steps: CountOrZero = key(0, "optimiser steps in which the weights grow from 0")
    cell: Count = key(4, "points of a control volume along each axis, for the residual")

    @model_validator(mode="before")
    @classmethod
    def _earlier_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return {} if value is None else {"enabled": value} if isinstance(value, bool) else value
        if value.get("enabled") in (False, None) and "enabled" in value:
            return {"enabled": False}  # whatever it would be
        unknown = [name for name in _OTHER_PRIORS if value.get(name)]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: there is no such prior, say 0")
        left_out = (*_OTHER_PRIORS, "bc_value", "bc_type")  # boundary values are those of the data
        kept = {name: weight for name, weight in value.items() if name not in left_out}
        return {
            name.removeprefix("lambda_") if name.removeprefix("lambda_") in _PRIORS else name: weight
            for name, weight in kept.items()
        }

    @property
    def weights(self) -> dict[str, float]:
        """Those that aren't 0, by name."""
        found = {name: getattr(self, name) for name in _PRIORS} if self.enabled else {}
        return {name: weight for name, weight in found.items() if weight}


class LawsConfig(Section):
    """What holds for the solutions of a task, for physics priors and test-time conditioning."""

    conserved: tuple[str, ...] = key(
        (), 'channels, or products such as "density*Vx", whose mean over the domain stays'
    )
    is_closed: bool = key(False, "nothing crosses a boundary, though not all axes are periodic")
    divergence_free: tuple[str, ...] = key((), "channels of a velocity, in the order x, y, z")
    equation: Literal["advection1d", "burgers1d", "reacdiff1d", "darcy2d"] | None = key(
        None, "whose residual is taken; the task has its parameters, under the same names", affects=AUGMENTED
    )
    at_walls: tuple[str, ...] = key((), "channels that walls are about; by default all")
    is_forced: bool = key(
        False,
        "something has its place, such as a source: no augmentation by shifts, reflections",
        affects=AUGMENTED,
    )


class TtcConfig(Section):
    """Test-time conditioning: rollouts that are chosen and corrected by the laws of their task (`laws`)."""

    enabled: bool = key(False, "evaluate such a rollout beside the plain one, and predict by it")
    candidates: Count = key(
        1, "states that each step is tried from, all but the first with noise; the best is kept"
    )
    noise_std: NotNegative = key(0.01, "standard deviation of that noise, in normalised units")
    corrections: CountOrZero = key(
        2, "times that the equation's residual is subtracted from a step, where that makes it less"
    )
    project: bool = key(True, "put conserved means back to those of the given frame")


def _preload_of(mode: object) -> object:
    """Read `training.preload`: YAML reads `off` as False; one mode there was once."""
    if mode == "pinned":
        raise ValueError(
            "there is no mode 'pinned' any more: write 'device', or 'copy' for memory of the host"
        )
    return "off" if mode is False else mode


class TrainingConfig(Section):
    """Loop, precision, losses; a stage's own values win."""

    batch_size: Count | None = key(None, "frames or windows a batch on each rank; by default 32")
    global_batch_size: Count | None = key(None, "instead: a batch over all ranks")
    lr: Positive = key(1e-3, "peak learning rate")
    accum_steps: Count = key(1, "batches an optimiser step")
    grad_clip: Positive | None = key(1.0, "largest norm of the gradient")
    ema_decay: Fraction | None = key(None, "of the averaged weights that are validated and kept")
    amp: bool = key(False, "autocast to amp_dtype", used_by=("validation",))
    amp_dtype: AmpDtype = key("bfloat16", "dtype of autocast", needs="amp", used_by=("validation",))
    matmul_precision: Literal["highest", "high", "medium"] = key(
        "highest",
        "of float32 matrix products: highest is float32; high (TF32 on a GPU) and medium "
        "(bfloat16) are faster where the hardware has them",
    )
    compile: bool = key(False, "torch.compile the model", affects=NOTHING)
    compile_mode: CompileMode = key("default", "of torch.compile", affects=NOTHING, needs="compile")
    compile_regions: Literal["whole", "blocks"] = key(
        "whole",
        "what is compiled at once: the model's step, or each kind of block, once for all of its "
        "kind, and what is between them not",
        affects=NOTHING,
        needs="compile",
    )
    compile_cache: LocalPath | None = key(
        None,
        "folder that keeps what was compiled, for the next run; by default torch's own",
        affects=NOTHING,
        needs="compile",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = key(
        "none",
        "what the backward pass computes once more, to need less memory: nothing; all but linear "
        "layers, convolutions and attention kernels; or whole blocks",
        affects=NOTHING,
    )
    cpu_offload_optimizer: bool = key(
        False, "AdamW's states and step on the CPU, of a model on one GPU; without grad_clip"
    )
    patience: Count | None = key(None, "epochs after the best one until training stops")
    log_path: LocalPath | None = key(
        None, "JSON lines; by default <checkpoint.dir>/<stage>.jsonl", affects=NOTHING
    )
    log_every: Count = key(50, "optimiser steps from one log line to the next", affects=NOTHING)
    device: str = key(
        "auto", "auto, cpu, cuda or cuda:N; under torchrun each rank its own GPU", affects=NOTHING
    )
    parallel: Literal["ddp", "fsdp2", "hsdp"] = key(
        "ddp",
        "what each of several ranks has: all parameters; a shard of them, of gradients and of "
        "the optimiser's state; or a shard within its group, with as many copies as groups",
        affects=NOTHING,
    )
    shard_size: Count | None = key(
        None, "hsdp: ranks of a group; by default those of a machine", affects=NOTHING
    )
    async_checkpoint: bool = key(
        False,
        "write training states by a thread while training goes on; takes a copy of the state in "
        "the CPU's memory",
        affects=NOTHING,
    )
    num_gpus: Count | None = key(
        None,
        "ranks that torchrun is to start, on all machines or on each; another number is refused",
        affects=NOTHING,
    )
    rank_timeout_s: Positive = key(
        1800.0,
        "seconds that a rank waits for the others, also while the first one validates",
        affects=NOTHING,
    )
    stall_timeout_s: Positive | None = key(
        600.0,
        "seconds for one step, validation or saving, the first of each ten times as long; then "
        "stacks are written and the process ends with exit code 4; null: as long as it takes",
        affects=NOTHING,
    )

    field_source: Literal["auto", "store", "hdf5"] = key(
        "auto", "where fields are read from", used_by=("evaluation",)
    )
    augment: bool = key(True, "random shifts along periodic axes, reflections where allowed")
    query_sampling: QuerySamplingConfig = key(
        QuerySamplingConfig(), "points that the decoder is asked at", affects=(AUTOENCODER.name, *FORECASTERS)
    )
    physics_priors: PhysicsPriorsConfig = key(
        PhysicsPriorsConfig(), "losses by the laws of a task", affects=FORECASTERS
    )
    max_val_frames: Count = key(
        1024,
        "frames per task that validation looks at, spread evenly",
        used_by=("validation",),
        affects=(AUTOENCODER.name, *FORECASTERS),
    )

    num_workers: CountOrZero | Literal["auto"] = key("auto", "reader processes of a build", affects=NOTHING)
    use_parallel_encoding: bool = key(True, "read and encode at the same time in a build", affects=NOTHING)
    latent_cache_dir: LocalPath | None = key(None, "folder of the latent stores", affects=NOTHING)
    latent_cache_dtype: LatentDtype = key("float16", "of latents", affects=NOTHING, used_by=("evaluation",))
    cache_mode: Literal["auto", "store", "memory", "none"] = key(
        "auto",
        "latents: built where they are missing, of finished stores, built in memory, or made in each step",
        affects=FORECASTERS,
    )
    pin_memory: bool = key(True, "page-locked batches where there is a GPU", affects=NOTHING)
    prefetch_factor: CountOrZero = key(2, "batches that are prepared ahead, by a thread", affects=NOTHING)
    preload: Annotated[
        Literal["auto", "off", "page-cache", "copy", "device"],
        BeforeValidator(_preload_of),
    ] = key("auto", "how a store is brought into memory before training", affects=NOTHING)
    stride: Count = key(
        1,
        "stored time steps from one step of the operator to the next",
        affects=ROLLED_OUT,
        used_by=("validation",),
    )
    horizon: Count = key(1, "operator steps that a loss goes through", affects=FORECASTERS)
    reconstruction_loss: Literal["mse", "l1", "relative_l2"] = key(
        "mse",
        "of fields, over a frame's power: square, absolute, or root mean square error",
        affects=(AUTOENCODER.name, *FORECASTERS),
    )
    rollout_loss: Literal["relative_l2", "mse"] = key(
        "relative_l2",
        "of the operator: |p - y| / |y| of each state, or their mean square error",
        affects=(AUTOENCODER.name, *FORECASTERS),
    )
    pushforward: bool = key(
        False,
        "gradients through one step only, after as many as are drawn, up to horizon",
        affects=(AUTOENCODER.name, *FORECASTERS),
    )
    lambda_alignment: NotNegative = key(
        0.0,
        "weight of |A(z) - E(x')|^2 in stage joint, with gradients through both",
        affects=FORECASTERS,
        needs="use_inverse_losses",
    )
    lambda_spectral: NotNegative = key(
        0.0, "weight of the spectral loss of the operator", affects=FORECASTERS
    )
    lambda_relative: NotNegative = key(0.0, "weight of the relative loss", affects=FORECASTERS)
    losses: dict[str, NotNegative] = key(
        {},
        "weights of the operator's losses by name, instead of rollout_loss, lambda_relative and "
        "lambda_spectral: mse, relative_l2, relative, spectral, and one's own as module:function",
        affects=FORECASTERS,
    )
    use_inverse_losses: bool = key(
        False, "encoder and decoder as inverses, in stage joint", affects=FORECASTERS
    )
    allow_unknown_encoder: bool = key(
        False, "train on latents of which nothing says which weights made them", affects=FORECASTERS
    )
    inverse_loss_frequency: Count = key(
        1,
        "optimiser steps from one inverse loss to the next",
        affects=FORECASTERS,
        needs="use_inverse_losses",
    )
    lambda_inv_enc: NotNegative = key(
        1.0,
        "weight of |D(E(x)) - x|^2, which undoes the encoder",
        affects=FORECASTERS,
        needs="use_inverse_losses",
    )
    lambda_inv_dec: NotNegative = key(
        1.0,
        "weight of |E(D(z)) - z|^2, which undoes the decoder",
        affects=FORECASTERS,
        needs="use_inverse_losses",
    )
    inverse_loss_warmup_epochs: CountOrZero = key(
        0,
        "epochs without inverse losses; in as many more their weights grow linearly",
        affects=FORECASTERS,
        needs="use_inverse_losses",
    )
    inverse_loss_max_weight: NotNegative | None = key(
        None, "upper bound of both weights", affects=FORECASTERS, needs="use_inverse_losses"
    )
    tau_distribution: TauConfig = key(TauConfig(), "flow times of training", affects=GENERATIVE)
    distill_num_steps: Annotated[Count, Field(le=4)] = key(
        1, "evaluations of the student's network for one residual", affects=(STUDENT.name,)
    )
    distill_num_pairs: Count = key(
        16384, "reflow: noises of a task, each with what the teacher makes of it", affects=NOTHING
    )
    distill_num_taus: Count = key(
        1, "flow times that each pair of a batch is trained at", affects=(STUDENT.name,)
    )
    distill_own_times: Annotated[float, Field(ge=0, le=1)] = key(
        0.9,
        "reflow: share of the flow times that are those at which the student is asked",
        affects=(STUDENT.name,),
    )
    distill_num_intervals: Count = key(
        32, "consistency: steps that the teacher's path is cut into", affects=(STUDENT.name,)
    )
    distill_target_decay: Fraction = key(
        0.95, "consistency: of the averaged student that gives the target", affects=(STUDENT.name,)
    )
    distill_micro_batch: Count | None = key(
        None,
        "rows whose gradients are computed at once; by default all of a batch on a rank",
        affects=NOTHING,
    )
    distill_hidden_dim: Count | None = key(
        None,
        "channels of the student's finest level; by default its teacher's",
        affects=(STUDENT.name,),
    )
    distill_depths: tuple[Count, ...] | None = key(
        None,
        "blocks of each level of the student; by default its teacher's",
        min_length=1,
        affects=(STUDENT.name,),
    )
    distill_teacher: LocalPath | None = key(
        None, "what is distilled; by default <checkpoint.dir>/corrector.safetensors", affects=NOTHING
    )
    distill_compile_teacher: bool = key(False, "compile the teacher's step, too", affects=NOTHING)
    distill_pair_dir: LocalPath | None = key(
        None, "folder of the stores of its pairs; by default <checkpoint.dir>/pairs", affects=NOTHING
    )

    @model_validator(mode="after")
    def _has_one_list_of_losses(self) -> TrainingConfig:
        if self.losses and not any(self.losses.values()):
            raise ValueError("training.losses: expected a weight above 0")
        for name in ("relative", "spectral") if self.losses else ():
            if weight := getattr(self, f"lambda_{name}"):
                raise ValueError(
                    f"training.lambda_{name} beside training.losses: say it there, {name}: {weight:g}"
                )
        return self

    @model_validator(mode="after")
    def _has_one_batch_size(self) -> TrainingConfig:
        check_one_batch_size(self.batch_size, self.global_batch_size)
        return self
