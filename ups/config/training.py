"""The section `training`, and physics: priors in a loss, laws of tasks, test-time conditioning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ups.config.diffusion import TauConfig
from ups.config.section import Count, CountOrZero, Fraction, LatentDtype, NotNegative, Positive, Section
from ups.config.stages import AmpDtype, CompileMode, check_one_batch_size
from ups.errors import needs
from ups_store.sources import LocalPath

with needs("train"):
    from pydantic import BeforeValidator, Field, model_validator


class QueryCurriculumConfig(Section):
    """How the number of points grows, or shrinks, to `num_queries` during training."""

    enabled: bool = Field(False, description="change the number of points during training")
    start_queries: Count | None = Field(None, description="points at the start; by default the whole grid")
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="share of the stage in which it goes to num_queries, step by step, linearly"
    )


class QuerySamplingConfig(Section):
    """At how many points of a field the decoder is asked during training."""

    num_queries: Count | None = Field(None, description="random points a batch; by default the whole grid")
    curriculum: QueryCurriculumConfig = QueryCurriculumConfig()


# As the earlier system called them, `lambda_...`.
_PRIORS = ("conservation", "divergence", "residual", "boundary")

# Weights of the earlier system that weigh no physics of ours: 0 is all that they may be.
_OTHER_PRIORS = ("lambda_positivity", "lambda_latent_norm", "lambda_latent_diversity")


class PhysicsPriorsConfig(Section):
    """Losses of decoded predictions that need no truth: what laws of the task say (`laws`); 0 is off."""

    enabled: bool = Field(True, description="off leaves all of them out")
    conservation: NotNegative = Field(0.0, description="weight of the drift of conserved means, relative")
    divergence: NotNegative = Field(0.0, description="weight of the divergence of incompressible flow")
    residual: NotNegative = Field(0.0, description="weight of the equation's residual over a step")
    boundary: NotNegative = Field(0.0, description="weight of errors at dirichlet and neumann boundaries")
    every: Count = Field(1, description="optimiser steps from one to the next")
    warmup_steps: CountOrZero = Field(0, description="optimiser steps in which the weights grow from 0")
    cell: Count = Field(4, description="points of a control volume along each axis, for the residual")

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

    conserved: tuple[str, ...] = Field(
        (), description='channels, or products such as "density*Vx", whose mean over the domain stays'
    )
    is_closed: bool = Field(False, description="nothing crosses a boundary, though not all axes are periodic")
    divergence_free: tuple[str, ...] = Field((), description="channels of a velocity, in the order x, y, z")
    equation: Literal["advection1d", "burgers1d", "reacdiff1d", "darcy2d"] | None = Field(
        None, description="whose residual is taken; the task has its parameters, under the same names"
    )
    at_walls: tuple[str, ...] = Field((), description="channels that walls are about; by default all")
    is_forced: bool = Field(
        False, description="something has its place, such as a source: no augmentation by shifts, reflections"
    )


class TtcConfig(Section):
    """Test-time conditioning: rollouts that are chosen and corrected by the laws of their task (`laws`)."""

    enabled: bool = Field(
        False, description="evaluate such a rollout beside the plain one, and predict by it"
    )
    candidates: Count = Field(
        1, description="states that each step is tried from, all but the first with noise; the best is kept"
    )
    noise_std: NotNegative = Field(0.01, description="standard deviation of that noise, in normalised units")
    corrections: CountOrZero = Field(
        2,
        description="times that the equation's residual is subtracted from a step, where that makes it less",
    )
    project: bool = Field(True, description="put conserved means back to those of the given frame")


def _preload_of(mode: object) -> object:
    """Read `training.preload`: YAML reads `off` as False; one mode there was once."""
    if mode == "pinned":
        raise ValueError(
            "there is no mode 'pinned' any more: write 'device', or 'copy' for memory of the host"
        )
    return "off" if mode is False else mode


class TrainingConfig(Section):
    """Loop, precision, losses; a stage's own values win."""

    batch_size: Count | None = Field(
        None, description="frames or windows a batch on each rank; by default 32"
    )
    global_batch_size: Count | None = Field(None, description="instead: a batch over all ranks")
    lr: Positive = Field(1e-3, description="peak learning rate")
    accum_steps: Count = Field(1, description="batches an optimiser step")
    grad_clip: Positive | None = Field(1.0, description="largest norm of the gradient")
    ema_decay: Fraction | None = Field(
        None, description="of the averaged weights that are validated and kept"
    )
    amp: bool = Field(False, description="autocast to amp_dtype")
    amp_dtype: AmpDtype = Field("bfloat16", description="dtype of autocast")
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        "highest",
        description="of float32 matrix products: highest is float32; high (TF32 on a GPU) and medium "
        "(bfloat16) are faster where the hardware has them",
    )
    compile: bool = Field(False, description="torch.compile the model")
    compile_mode: CompileMode = Field("default", description="of torch.compile")
    compile_regions: Literal["whole", "blocks"] = Field(
        "whole",
        description="what is compiled at once: the model's step, or each kind of block, once for all of its "
        "kind, and what is between them not",
    )
    compile_cache: LocalPath | None = Field(
        None, description="folder that keeps what was compiled, for the next run; by default torch's own"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="what the backward pass computes once more, to need less memory: nothing; all but linear "
        "layers, convolutions and attention kernels; or whole blocks",
    )
    use_flex: bool = Field(False, description="true means operator.attention=flex")
    cpu_offload_optimizer: bool = Field(
        False, description="AdamW's states and step on the CPU, of a model on one GPU; without grad_clip"
    )
    patience: Count | None = Field(None, description="epochs after the best one until training stops")
    log_path: LocalPath | None = Field(
        None, description="JSON lines; by default <checkpoint.dir>/<stage>.jsonl"
    )
    log_every: Count = Field(50, description="optimiser steps from one log line to the next")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; under torchrun each rank its own GPU")
    parallel: Literal["ddp", "fsdp2", "hsdp"] = Field(
        "ddp",
        description="what each of several ranks has: all parameters; a shard of them, of gradients and of "
        "the optimiser's state; or a shard within its group, with as many copies as groups",
    )
    shard_size: Count | None = Field(
        None, description="hsdp: ranks of a group; by default those of a machine"
    )
    async_checkpoint: bool = Field(
        False,
        description="write training states by a thread while training goes on; takes a copy of the state in "
        "the CPU's memory",
    )
    num_gpus: Count | None = Field(
        None,
        description="ranks that torchrun is to start, on all machines or on each; another number is refused",
    )
    use_fsdp2: bool = Field(False, description="true means training.parallel=fsdp2")
    rank_timeout_s: Positive = Field(
        1800.0, description="seconds that a rank waits for the others, also while the first one validates"
    )
    stall_timeout_s: Positive | None = Field(
        600.0,
        description="seconds for one step, validation or saving, the first of each ten times as long; then "
        "stacks are written and the process ends with exit code 4; null: as long as it takes",
    )

    field_source: Literal["auto", "store", "hdf5"] = Field("auto", description="where fields are read from")
    augment: bool = Field(True, description="random shifts along periodic axes, reflections where allowed")
    query_sampling: QuerySamplingConfig = QuerySamplingConfig()
    physics_priors: PhysicsPriorsConfig = PhysicsPriorsConfig()
    max_val_frames: Count = Field(1024, description="frames per task that validation looks at, spread evenly")

    num_workers: CountOrZero | Literal["auto"] = Field("auto", description="reader processes of a build")
    use_parallel_encoding: bool = Field(True, description="read and encode at the same time in a build")
    latent_cache_dir: LocalPath | None = Field(None, description="folder of the latent stores")
    latent_cache_dtype: LatentDtype = Field("float16", description="of latents")
    cache_mode: Literal["auto", "store", "memory", "none"] = Field(
        "auto", description="latents from finished stores, made on demand, in memory, or in every pass"
    )
    pin_memory: bool = Field(True, description="page-locked batches where there is a GPU")
    prefetch_factor: CountOrZero = Field(2, description="batches that are prepared ahead, by a thread")
    preload: Annotated[
        Literal["auto", "off", "page-cache", "copy", "device"],
        BeforeValidator(_preload_of),
    ] = Field("auto", description="how a store is brought into memory before training")
    stride: Count = Field(1, description="stored time steps from one step of the operator to the next")
    horizon: Count = Field(1, description="operator steps that a loss goes through")
    reconstruction_loss: Literal["mse", "l1", "relative_l2"] = Field(
        "mse", description="of fields, over a frame's power: square, absolute, or root mean square error"
    )
    rollout_loss: Literal["relative_l2", "mse"] = Field(
        "relative_l2", description="of the operator: |p - y| / |y| of each state, or their mean square error"
    )
    pushforward: bool = Field(
        False, description="gradients through one step only, after as many as are drawn, up to horizon"
    )
    lambda_alignment: NotNegative = Field(
        0.0, description="weight of |A(z) - E(x')|^2 in stage joint, with gradients through both"
    )
    lambda_spectral: NotNegative = Field(0.0, description="weight of the spectral loss of the operator")
    lambda_relative: NotNegative = Field(0.0, description="weight of the relative loss")
    use_inverse_losses: bool = Field(False, description="encoder and decoder as inverses, in stage joint")
    allow_unknown_encoder: bool = Field(
        False, description="train on latents of which nothing says which weights made them"
    )
    inverse_loss_frequency: Count = Field(1, description="optimiser steps from one inverse loss to the next")
    lambda_inv_enc: NotNegative = Field(
        1.0, description="weight of |D(E(x)) - x|^2, which undoes the encoder"
    )
    lambda_inv_dec: NotNegative = Field(
        1.0, description="weight of |E(D(z)) - z|^2, which undoes the decoder"
    )
    inverse_loss_warmup_epochs: CountOrZero = Field(
        0, description="epochs without inverse losses; in as many more their weights grow linearly"
    )
    inverse_loss_max_weight: NotNegative | None = Field(None, description="upper bound of both weights")
    tau_distribution: TauConfig = TauConfig()
    distill_num_steps: Annotated[Count, Field(le=4)] = Field(
        1, description="evaluations of the student's network for one residual"
    )
    distill_num_pairs: Count = Field(
        16384, description="reflow: noises of a task, each with what the teacher makes of it"
    )
    distill_num_taus: Count = Field(1, description="flow times that each pair of a batch is trained at")
    distill_own_times: Annotated[float, Field(ge=0, le=1)] = Field(
        0.9, description="reflow: share of the flow times that are those at which the student is asked"
    )
    distill_num_intervals: Count = Field(
        32, description="consistency: steps that the teacher's path is cut into"
    )
    distill_target_decay: Fraction = Field(
        0.95, description="consistency: of the averaged student that gives the target"
    )
    distill_micro_batch: Count | None = Field(
        None, description="rows whose gradients are computed at once; by default all of a batch on a rank"
    )
    distill_hidden_dim: Count | None = Field(
        None, description="channels of the student's finest level; by default its teacher's"
    )
    distill_depths: tuple[Count, ...] | None = Field(
        None, min_length=1, description="blocks of each level of the student; by default its teacher's"
    )
    distill_teacher: LocalPath | None = Field(
        None, description="what is distilled; by default <checkpoint.dir>/corrector.safetensors"
    )
    distill_compile_teacher: bool = Field(False, description="compile the teacher's step, too")
    distill_pair_dir: LocalPath | None = Field(
        None, description="folder of the stores of its pairs; by default <checkpoint.dir>/pairs"
    )

    @model_validator(mode="before")
    @classmethod
    def _parallel_of_earlier_key(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "use_fsdp2" not in values:
            return values
        is_on = values["use_fsdp2"]
        return {**({"parallel": "fsdp2"} if is_on is True else {}), **values, "use_fsdp2": is_on or False}

    @model_validator(mode="after")
    def _has_one_parallel(self) -> TrainingConfig:
        if self.use_fsdp2 and self.parallel == "ddp":
            raise ValueError("training.use_fsdp2 means training.parallel = fsdp2, not ddp")
        return self

    @model_validator(mode="after")
    def _has_one_batch_size(self) -> TrainingConfig:
        check_one_batch_size(self.batch_size, self.global_batch_size)
        return self
