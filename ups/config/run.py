"""`RunConfig`: everything that decides a run, a section a model; those of the stores are the build's."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from ups.errors import ConfigError, needs
from ups.laws import Laws
from ups.trained.specs import AUTOENCODER_FILE
from ups_store.build import (
    BuildConfig,
    CacheConfig,
    DataConfig,
    EncodingConfig,
    ReadingConfig,
    long_dtype,
)
from ups_store.sources import LocalPath, TaskDeclaration

with needs("train"):
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

# strict: `yes` isn't 1 and 1.5 isn't a count
Count = Annotated[int, Field(strict=True, ge=1)]

CountOrZero = Annotated[int, Field(strict=True, ge=0)]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Limit = Literal["flops", "samples", "seconds"]

BUDGETS: tuple[Limit, ...] = ("flops", "samples", "seconds")

Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# Names of PyTorch's classes, as older configurations have them.
_SCHEDULER_NAMES = {
    "cosineannealinglr": "cosine",
    "steplr": "step",
    "reducelronplateau": "plateau",
    "constantlr": "constant",
    "none": "constant",
}


class OptimizerConfig(Section):
    """Optimiser of a stage."""

    name: Literal["adamw", "adam", "sgd", "muon_hybrid"] = Field("adamw", description="kind")
    lr: Positive | None = Field(
        None, description="peak learning rate; by default training.lr, of baselines one that was searched for"
    )
    weight_decay: NotNegative = Field(0.0, description="decay of matrices; vectors have none")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.99), description="Adam's moments")
    eps: Positive = Field(1e-8, description="Adam's epsilon")
    momentum: Fraction = Field(0.9, description="of SGD")
    implementation: Literal["auto", "fused", "foreach", "for_loop"] = Field(
        "auto", description="how PyTorch loops over parameters; auto: fused where that can be"
    )
    muon_momentum: Fraction = Field(0.95, description="of the matrices that muon_hybrid gives to Muon")
    muon_ns_steps: Annotated[Count, Field(lt=100)] = Field(
        5, description="Newton-Schulz iterations of Muon, fewer than 100"
    )
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Muon's learning rate by a matrix's shape; match_rms_adamw: steps as large as AdamW's",
    )
    muon_backend: str = Field("auto", description="of earlier configurations; Muon is always PyTorch's")

    @field_validator("name", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


class SchedulerConfig(Section):
    """Learning rate over optimiser steps, as a share of the peak."""

    name: Literal["constant", "cosine", "step", "plateau"] = Field("cosine", description="kind")
    warmup_steps: CountOrZero = Field(0, description="optimiser steps of linear warm-up")
    t_max: Count | None = Field(None, description="cosine: epochs until eta_min; by default the stage's")
    eta_min: NotNegative = Field(0.0, description="cosine: learning rate at the end")
    step_size: Count = Field(10, description="step: epochs from one reduction to the next")
    gamma: Positive = Field(0.5, description="step: factor of a reduction")
    factor: Positive = Field(0.5, description="plateau: factor of a reduction")
    patience: CountOrZero = Field(3, description="plateau: epochs without improvement that are tolerated")
    min_lr: NotNegative = Field(0.0, description="plateau: least learning rate")
    mode: Literal["min"] = Field("min", description="plateau: errors are minimised")

    @field_validator("name", mode="before")
    @classmethod
    def _own_name(cls, value: object) -> object:
        return _SCHEDULER_NAMES.get(value.lower(), value.lower()) if isinstance(value, str) else value


def _check_one_batch_size(section: StageConfig | TrainingConfig) -> None:
    if section.batch_size is not None and section.global_batch_size is not None:
        raise ValueError("batch_size (per rank) and global_batch_size (over all ranks): give one of them")


class BudgetConfig(Section):
    """How much a stage may be trained, by one measure; it becomes a number of steps before they begin."""

    flops: Positive | None = Field(None, description="counted floating-point operations of its steps")
    samples: Count | None = Field(None, description="frames or windows that it is trained on")
    seconds: Positive | None = Field(None, description="processor time of its steps")
    step_ratio: Positive | None = Field(
        None, description="of seconds, as `ups compare` measured it: a step's time over the operator's"
    )

    @model_validator(mode="after")
    def _is_one(self) -> BudgetConfig:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"budget: give one of {', '.join(BUDGETS)}, not {' and '.join(given) or 'none'}")
        return self

    @property
    def limit(self) -> Limit:
        """What it counts."""
        return next(name for name in BUDGETS if getattr(self, name) is not None)

    @property
    def allowed(self) -> float:
        """How much of it."""
        return float(getattr(self, self.limit))

    def __str__(self) -> str:
        return f"budget of {shown_amount(self.limit, self.allowed)}"


def shown_amount(limit: str, amount: float) -> str:
    """So much of what a budget counts, for people: "1.23e+12 FLOP", "60 s", "5,000 samples"."""
    if limit == "flops":
        return f"{amount:.3g} FLOP"
    return f"{amount:,.4g} s" if limit == "seconds" else f"{amount:,.0f} {limit}"


class StageConfig(Section):
    """One entry of `stages`."""

    epochs: CountOrZero = Field(10, description="passes over the training data; 0 leaves the stage out")
    steps_per_epoch: Count | None = Field(None, description="optimiser steps an epoch; by default all data")
    steps: Count | None = Field(
        None, description="optimiser steps in all, cut into epochs; by default epochs x steps_per_epoch"
    )
    budget: BudgetConfig | None = Field(
        None, description="says `steps`, by what they cost; ended by no patience"
    )
    batch_size: Count | None = Field(None, description="by default training.batch_size")
    global_batch_size: Count | None = Field(None, description="by default training.global_batch_size")
    grad_clip: Positive | None = Field(None, description="by default training.grad_clip")
    ema_decay: Fraction | None = Field(None, description="by default training.ema_decay")
    patience: Count | None = Field(None, description="by default training.patience")
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    @model_validator(mode="after")
    def _has_one_batch_size(self) -> StageConfig:
        _check_one_batch_size(self)
        return self

    @field_validator("optimizer", "scheduler", mode="before")
    @classmethod
    def _absent_is_default(cls, value: Any) -> Any:
        return {} if value is None else value


AmpDtype = Annotated[Literal["bfloat16", "float16"], BeforeValidator(long_dtype)]

LatentDtype = Annotated[Literal["float16", "bfloat16", "float32"], BeforeValidator(long_dtype)]


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
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "default", description="of torch.compile"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="what the backward pass computes once more, to need less memory: nothing; what isn't a "
        "product, an attention or an FFT; or whole blocks",
    )
    patience: Count | None = Field(None, description="epochs after the best one until training stops")
    log_path: LocalPath | None = Field(
        None, description="JSON lines; by default <checkpoint.dir>/<stage>.jsonl"
    )
    log_every: Count = Field(50, description="optimiser steps from one log line to the next")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; under torchrun each rank its own GPU")
    rank_timeout_s: Positive = Field(
        1800.0, description="seconds that a rank waits for the others, also while the first one validates"
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
    preload: Literal["auto", "off", "page-cache", "copy", "pinned", "device"] = Field(
        "auto", description="how a store is brought into memory before training"
    )
    stride: Count = Field(1, description="stored time steps from one step of the operator to the next")
    horizon: Count = Field(1, description="operator steps that a loss goes through")
    reconstruction_loss: Literal["mse", "l1", "relative_l2"] = Field(
        "mse", description="of fields, over a frame's power: square, absolute, or root mean square error"
    )
    rollout_loss: Literal["mse", "relative_l2"] = Field(
        "mse", description="of the operator: mean square error of states, or |p - y| / |y| of each"
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

    @model_validator(mode="after")
    def _has_one_batch_size(self) -> TrainingConfig:
        _check_one_batch_size(self)
        return self


_BATCH_SIZE = 32  # on each rank, unless the configuration says something about it

# Stages of earlier configurations that aren't there yet, and what they train.
LATER_STAGES = {
    "diff_residual": "the diffusion corrector",
    "consistency_distill": "distillation",
    "steady_prior": "the prior of steady tasks",
}

# Peak learning rates of baselines (docs/results/accuracy.md); `ups tune` searches for others.
BASELINE_LR = {"fno": 4e-3, "unet": 1e-3, "fno_neuraloperator": 4e-3}
BASELINES = tuple(BASELINE_LR)  # each a stage

STAGE_NAMES = ("autoencoder", "joint", "operator", *BASELINES, *LATER_STAGES)  # in the order of training


class RunLatentConfig(EncodingConfig):
    """Size of the latent state of one frame, `tokens` x `dim` numbers; and how the build encodes."""

    dim: Count = Field(4, description="channels D of a latent token")
    tokens: Count = Field(32, description="number of latent tokens L")
    checkpoint: LocalPath | None = Field(
        None, description="encoder's weights; by default <checkpoint.dir>/autoencoder.safetensors"
    )


class EncoderConfig(Section):
    """Architecture of the encoder."""

    patch_size: Count = Field(8, description="points of a patch, on each axis")
    width: Count = Field(64, description="channels of its layers")
    depth: Count = Field(3, description="residual blocks before, and as many after, the pooling")
    num_heads: Count = Field(4, description="heads of the attention pooling; divides width")
    basis: Literal["pca", "none"] = Field(
        "pca",
        description="linear part of encoder and decoder: principal components of the patches, measured on the"
        " training split",
    )
    residual: bool = Field(
        True, description="train networks, on top of the basis; false leaves encoder and decoder linear"
    )
    isometry: bool = Field(
        True, description="rescale the latents that were trained so that the decoder's singular values agree"
    )

    @model_validator(mode="after")
    def _encodes_something(self) -> EncoderConfig:
        if self.basis == "none" and not self.residual:
            raise ValueError(
                "encoder.basis = none and encoder.residual = false: nothing is left that encodes"
            )
        return self


class DecoderConfig(Section):
    """Architecture of the decoder."""

    width: Count = Field(64, description="channels of its layers")
    depth: Count = Field(3, description="residual blocks over the tokens")
    num_heads: Count = Field(4, description="heads of the cross-attention; divides width")
    radius: Count = Field(1, description="tokens to each side that a query attends to, on each axis")


Mixer = Literal["spectral", "convolution", "attention", "hybrid"]

# Naming one of these, and no mixer, means the PDE-Transformer that the operator once always was.
_ATTENTION_KEYS = ("num_heads", "window_size", "attention_type", "qk_norm")


class PdetConfig(Section):
    """Architecture of the operator; what is left open comes from `operator.size`."""

    input_dim: Count | None = Field(None, description="must be latent.dim")
    hidden_dim: Count | None = Field(None, description="channels of the finest level's layers")
    depths: tuple[Count, ...] | None = Field(None, min_length=1, description="blocks of each level")
    depth: Count | None = Field(None, description="blocks of a single level, instead of depths")
    num_heads: Count | None = Field(None, description="attention heads of the finest level")
    group_size: Count | None = Field(None, description="has no effect: there are no groups to normalise")
    window_size: Count | None = Field(None, description="tokens of an attention window along an axis")
    mlp_ratio: Positive | None = Field(
        None, description="hidden over outer channels of the MLP, which blocks with attention have"
    )
    qk_norm: bool = Field(True, description="queries and keys are always normalised")
    attention_type: Literal["standard"] = Field("standard", description="in shifted windows")
    drop_path: Fraction | None = Field(None, description="share of residual branches dropped")
    dropout: Fraction | None = Field(None, description="share of the MLPs' activations dropped")
    use_activation_checkpoint: bool = Field(
        False, description="true means training.activation_checkpointing=full"
    )

    @model_validator(mode="after")
    def _has_one_depth(self) -> PdetConfig:
        if self.depth is not None and self.depths is not None:
            raise ValueError("operator.pdet.depth and operator.pdet.depths: give one of them")
        return self


class SpectralConfig(Section):
    """Blocks that mix tokens by their Fourier modes."""

    modes: Count | None = Field(
        None,
        description="modes kept along each axis, of either sign; by default all, at most 64, 16 or 8 of them "
        "on 1, 2 or 3 axes",
    )
    padding: NotNegative = Field(
        0.125, description="zeros behind an axis that isn't periodic, over its length"
    )
    norm: Literal["none", "layer"] = Field(
        "none", description="of the tokens before they are mixed, by convolutions too"
    )


class OperatorConfig(Section):
    """The operator, and how it is trained."""

    mixer: Mixer | tuple[Mixer, ...] = Field(
        "spectral",
        min_length=1,
        description="what mixes the tokens: spectral, convolution, attention, or hybrid (attention beside "
        "spectral); a list has one for each level. attention where pdet.num_heads, window_size, "
        "attention_type or qk_norm is given, and no mixer",
    )
    spectral: SpectralConfig = SpectralConfig()
    architecture_type: Literal["pdet_unet", "pdet_stack"] = Field(
        "pdet_unet", description="U-shape, or pdet_stack: one level of pdet.depth blocks"
    )
    size: Literal["tiny", "small", "S", "B", "L"] = Field("small", description="what pdet leaves open")
    pdet: PdetConfig = PdetConfig()
    state: Literal["latent", "fields"] = Field(
        "latent", description="what it advances: latents, or patches of the fields themselves"
    )
    noise: NotNegative = Field(
        0.0, description="standard deviation of noise on the first state, in normalised units"
    )
    curriculum: Fraction = Field(
        0.0, description="share of the training in which rollouts grow from 1 step to horizon"
    )
    val_trajectories: Count = Field(32, description="trajectories per task that validation rolls out")

    @model_validator(mode="before")
    @classmethod
    def _attention_of_its_keys(cls, values: Any) -> Any:
        pdet = values.get("pdet") if isinstance(values, dict) else None
        if isinstance(pdet, dict) and values.get("mixer") is None:
            named = any(pdet.get(key) is not None for key in _ATTENTION_KEYS)
            return {**values, "mixer": "attention" if named else "spectral"}
        return values


class FnoConfig(Section):
    """Size of an FNO."""

    width: Count = Field(32, description="channels of its layers")
    modes: Count | None = Field(
        None, description="Fourier modes along each axis; by default 16 in 1D, 12 in 2D, or what the grid has"
    )
    depth: Count = Field(4, description="layers")


class UnetConfig(Section):
    """Size of the U-Net."""

    width: Count = Field(24, description="channels of the finest level; a multiple of 4")
    levels: Count | None = Field(
        None, description="resolutions; by default 4, or as often as the grid can be halved"
    )


class BaselinesConfig(Section):
    """What stands beside the operator; each is a stage that is trained as the operator is."""

    fno: FnoConfig = FnoConfig()
    unet: UnetConfig = UnetConfig()
    fno_neuraloperator: FnoConfig = FnoConfig()
    horizon: Count | None = Field(
        None, description="steps that a loss goes through; by default the operator's"
    )
    curriculum: Fraction | None = Field(None, description="by default operator.curriculum")
    noise: NotNegative = Field(
        0.0, description="standard deviation of noise on the first frame, in normalised units"
    )


class CheckpointConfig(Section):
    """Where checkpoints go."""

    dir: LocalPath = Field(Path("checkpoints"), description="folder")
    interval: Count | None = Field(None, description="optimiser steps between saves, besides every epoch's")
    keep_training_state: bool = Field(True, description="keep what resuming needs, also when finished")


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = Field(False, description="log there too")
    project: str | None = Field(None, description="project")
    entity: str | None = Field(None, description="user or team")
    run_name: str | None = Field(None, description="name of the run")
    group: str | None = Field(None, description="group of runs")
    tags: tuple[str, ...] = Field((), description="tags")
    notes: str | None = Field(None, description="text")


class LoggingConfig(Section):
    """Where progress is logged, besides the JSON lines."""

    wandb: WandbConfig = WandbConfig()


class EvaluationConfig(Section):
    """Evaluation after training."""

    enabled: bool = Field(False, description="evaluate after training")
    split: str = Field(
        "dev", description="dev, val or train; `ups evaluate --split test` alone takes the test split"
    )
    baseline_flops: Positive | None = Field(
        None, description="counted operations for which FNO and U-Net of each task are trained beside it"
    )
    baseline_samples: Count | None = Field(
        None, description="the same, with a budget of training windows; each gives rows of its own"
    )
    baseline_seconds: Positive | None = Field(
        None, description="the same, with a budget of processor time, which depends on the machine"
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


class RunConfig(Section):
    """Everything that decides a run; written into every checkpoint."""

    data: DataConfig
    tasks: dict[str, TaskDeclaration] = Field({}, description="tasks of your own, see docs/guides/layouts.md")
    cache: CacheConfig = CacheConfig()
    reading: ReadingConfig = ReadingConfig()
    latent: RunLatentConfig = RunLatentConfig()
    encoder: EncoderConfig = EncoderConfig()
    decoder: DecoderConfig = DecoderConfig()
    operator: OperatorConfig = OperatorConfig()
    baselines: BaselinesConfig = BaselinesConfig()
    training: TrainingConfig = TrainingConfig()
    stages: dict[str, StageConfig] = Field(default_factory=dict, description="by name of the stage")
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    ttc: TtcConfig = TtcConfig()
    laws: dict[str, LawsConfig] = Field(
        {}, description="by task: what holds for tasks of your own, or instead of what we know of ours"
    )
    seed: CountOrZero = Field(0, description="of weights, data order and augmentation")

    @model_validator(mode="before")
    @classmethod
    def _activation_checkpointing_of_earlier_key(cls, values: Any) -> Any:
        operator = values.get("operator") if isinstance(values, dict) else None
        pdet = operator.get("pdet") if isinstance(operator, dict) else None
        training = values.get("training", {}) if isinstance(values, dict) else None
        if not isinstance(pdet, dict) or not isinstance(training, dict):
            return values
        if pdet.get("use_activation_checkpoint") is not True:
            return values
        return {**values, "training": {"activation_checkpointing": "full", **training}}

    @field_validator("stages")
    @classmethod
    def _known_stages(cls, value: dict[str, StageConfig]) -> dict[str, StageConfig]:
        for name in value:
            if name not in STAGE_NAMES:
                near = difflib.get_close_matches(name, STAGE_NAMES, n=1)
                hint = f"did you mean {near[0]}" if near else f"known: {', '.join(STAGE_NAMES)}"
                raise ValueError(f"stages.{name} is no stage; {hint}")
            _check_there(name, value[name])
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        parts: dict[str, EncoderConfig | DecoderConfig] = {"encoder": self.encoder, "decoder": self.decoder}
        for name, part in parts.items():
            if part.width % part.num_heads:
                raise ValueError(
                    f"{name}.width = {part.width} isn't a multiple of num_heads = {part.num_heads}"
                )
        pdet_dim = self.operator.pdet.input_dim
        if pdet_dim not in (None, self.latent.dim):
            raise ValueError(f"operator.pdet.input_dim = {pdet_dim}, but latent.dim = {self.latent.dim}")
        how = self.training.activation_checkpointing
        if self.operator.pdet.use_activation_checkpoint and how != "full":
            raise ValueError(
                "operator.pdet.use_activation_checkpoint means training.activation_checkpointing = full, "
                f"not {how}"
            )
        return self

    @property
    def build(self) -> BuildConfig:
        """The sections that say which fields there are, as the build of their stores takes them."""
        return BuildConfig(data=self.data, tasks=self.tasks, cache=self.cache, reading=self.reading)

    @property
    def own_laws(self) -> dict[str, Laws]:
        """`laws`, as `ups.laws.laws_of` takes them."""
        return {task: Laws(**laws.model_dump()) for task, laws in self.laws.items()}

    @property
    def trains_jointly(self) -> bool:
        """Whether the run has a stage `joint`: named under `stages`, and not left out by 0 epochs."""
        return "joint" in self.stages and self.stages["joint"].epochs > 0

    @property
    def autoencoder_path(self) -> Path:
        """The autoencoder whose latents are used: `latent.checkpoint`, or what its stage writes."""
        return self.latent.checkpoint or self.checkpoint.dir / AUTOENCODER_FILE

    def stage(self, name: str) -> StageConfig:
        """A stage's configuration, with what it leaves open taken from `training`.

        Baselines take what they leave open from the operator's stage before, its learning rate aside.

        Raises:
            ConfigError: Kind "not_yet", for a stage that isn't there yet, unless it is switched off.
        """
        stage = self._as_operator(name) if name in BASELINES else self.stages.get(name, StageConfig())
        _check_there(name, stage)
        open_values: dict[str, Any] = {
            key: getattr(self.training, key)
            for key in ("grad_clip", "ema_decay", *(("patience",) if stage.budget is None else ()))
            if getattr(stage, key) is None
        }
        if stage.batch_size is None and stage.global_batch_size is None:
            over_all = self.training.global_batch_size
            each = self.training.batch_size or (_BATCH_SIZE if over_all is None else None)
            open_values |= {"batch_size": each, "global_batch_size": over_all}
        if stage.optimizer.lr is None:
            open_values["optimizer"] = stage.optimizer.model_copy(update={"lr": self.training.lr})
        return stage.model_copy(update=open_values)

    def _as_operator(self, name: str) -> StageConfig:
        """A baseline's stage, with what it leaves open taken from the operator's."""
        stage, operator = self.stages.get(name, StageConfig()), self.stages.get("operator", StageConfig())
        said, values = stage.model_fields_set, dict[str, Any]()
        if not said & {"epochs", "steps_per_epoch", "steps", "budget"}:
            values |= {key: getattr(operator, key) for key in ("epochs", "steps_per_epoch", "steps")}
        if stage.batch_size is None and stage.global_batch_size is None:
            values |= {key: getattr(operator, key) for key in ("batch_size", "global_batch_size")}
        shared = ("grad_clip", "ema_decay") if stage.budget else ("grad_clip", "ema_decay", "patience")
        values |= {key: getattr(operator, key) for key in shared if getattr(stage, key) is None}
        if stage.optimizer.lr is None:
            values["optimizer"] = stage.optimizer.model_copy(update={"lr": BASELINE_LR[name]})
        return stage.model_copy(update=values)


def _check_there(name: str, stage: StageConfig) -> None:
    """Refuse a stage of `LATER_STAGES` that is switched on, so that you don't believe it is trained."""
    if name in LATER_STAGES and stage.epochs:
        raise ConfigError(
            f"stages.{name}.epochs = {stage.epochs}: {LATER_STAGES[name]} isn't there yet",
            kind="not_yet",
            hint=f"say stages.{name}.epochs=0",
        )
