"""`RunConfig`: everything that decides a run, a section a model; those of the stores are the build's."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from ups.errors import ConfigError, needs
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
    lr: Positive | None = Field(None, description="peak learning rate; by default training.lr")
    weight_decay: NotNegative = Field(0.0, description="decay of matrices; vectors have none")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.99), description="Adam's moments")
    eps: Positive = Field(1e-8, description="Adam's epsilon")
    momentum: Fraction = Field(0.9, description="of SGD")
    muon_momentum: Fraction = Field(0.95, description="of Muon's matrices")
    muon_ns_steps: Count = Field(5, description="Newton-Schulz iterations of Muon")
    muon_backend: str = Field("auto", description="implementation of Muon")

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


class StageConfig(Section):
    """One entry of `stages`."""

    epochs: CountOrZero = Field(10, description="passes over the training data; 0 leaves the stage out")
    steps_per_epoch: Count | None = Field(None, description="optimiser steps an epoch; by default all data")
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


class QuerySamplingConfig(Section):
    """At how many points of a field the decoder is asked during training."""

    num_queries: Count | None = Field(None, description="random points a batch; by default the whole grid")


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
    compile: bool = Field(False, description="torch.compile the model")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "default", description="of torch.compile"
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
    lambda_spectral: NotNegative = Field(0.0, description="weight of the spectral loss of the operator")
    lambda_relative: NotNegative = Field(0.0, description="weight of the relative loss")
    use_inverse_losses: bool = Field(False, description="encoder and decoder as inverses, in stage joint")
    allow_unknown_encoder: bool = Field(
        False, description="train on latents of which nothing says which weights made them"
    )
    inverse_loss_frequency: Count = Field(1, description="optimiser steps from one inverse loss to the next")

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

STAGE_NAMES = ("autoencoder", "joint", "operator", *LATER_STAGES)  # in the order of training


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


class DecoderConfig(Section):
    """Architecture of the decoder."""

    width: Count = Field(64, description="channels of its layers")
    depth: Count = Field(3, description="residual blocks over the tokens")
    num_heads: Count = Field(4, description="heads of the cross-attention; divides width")
    radius: Count = Field(1, description="tokens to each side that a query attends to, on each axis")


class PdetConfig(Section):
    """Architecture of the operator (PDE-Transformer); what is left open comes from `operator.size`."""

    input_dim: Count | None = Field(None, description="must be latent.dim")
    hidden_dim: Count | None = Field(None, description="channels of the finest level's layers")
    depths: tuple[Count, ...] | None = Field(None, min_length=1, description="blocks of each level")
    depth: Count | None = Field(None, description="blocks of a single level, instead of depths")
    num_heads: Count | None = Field(None, description="attention heads of the finest level")
    group_size: Count | None = Field(None, description="has no effect: there are no groups to normalise")
    window_size: Count | None = Field(None, description="tokens of an attention window along an axis")
    mlp_ratio: Positive | None = Field(None, description="hidden over outer channels of the MLP")
    qk_norm: bool = Field(True, description="queries and keys are always normalised")
    attention_type: Literal["standard"] = Field("standard", description="in shifted windows")
    drop_path: Fraction | None = Field(None, description="share of residual branches dropped")
    dropout: Fraction | None = Field(None, description="share of the MLPs' activations dropped")

    @model_validator(mode="after")
    def _has_one_depth(self) -> PdetConfig:
        if self.depth is not None and self.depths is not None:
            raise ValueError("operator.pdet.depth and operator.pdet.depths: give one of them")
        return self


class OperatorConfig(Section):
    """The operator, and how it is trained."""

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
    split: str = Field("test", description="split to evaluate on")
    baseline_seconds: Positive | None = Field(
        None, description="wall time for which FNO and U-Net of each task are trained beside it"
    )
    baseline_samples: Count | None = Field(
        None, description="the same, with a budget of training windows; both give rows of their own"
    )


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
    training: TrainingConfig = TrainingConfig()
    stages: dict[str, StageConfig] = Field(default_factory=dict, description="by name of the stage")
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    seed: CountOrZero = Field(0, description="of weights, data order and augmentation")

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
        return self

    @property
    def build(self) -> BuildConfig:
        """The sections that say which fields there are, as the build of their stores takes them."""
        return BuildConfig(data=self.data, tasks=self.tasks, cache=self.cache, reading=self.reading)

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

        Raises:
            ConfigError: Kind "not_yet", for a stage that isn't there yet, unless it is switched off.
        """
        stage = self.stages.get(name, StageConfig())
        _check_there(name, stage)
        open_values: dict[str, Any] = {
            key: getattr(self.training, key)
            for key in ("grad_clip", "ema_decay", "patience")
            if getattr(stage, key) is None
        }
        if stage.batch_size is None and stage.global_batch_size is None:
            over_all = self.training.global_batch_size
            each = self.training.batch_size or (_BATCH_SIZE if over_all is None else None)
            open_values |= {"batch_size": each, "global_batch_size": over_all}
        if stage.optimizer.lr is None:
            open_values["optimizer"] = stage.optimizer.model_copy(update={"lr": self.training.lr})
        return stage.model_copy(update=open_values)


def _check_there(name: str, stage: StageConfig) -> None:
    """Refuse a stage of `LATER_STAGES` that is switched on, so that you don't believe it is trained."""
    if name in LATER_STAGES and stage.epochs:
        raise ConfigError(
            f"stages.{name}.epochs = {stage.epochs}: {LATER_STAGES[name]} isn't there yet",
            kind="not_yet",
            hint=f"say stages.{name}.epochs=0",
        )
