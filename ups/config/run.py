"""`RunConfig`: everything that decides a run, a section a model; those of the stores are the build's."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

from ups.config.after_training import EvaluationConfig, PipelineConfig
from ups.config.architecture import (
    BaselinesConfig,
    DecoderConfig,
    DiffusionConfig,
    EncoderConfig,
    OperatorConfig,
    PriorConfig,
    RunLatentConfig,
)
from ups.config.stages import StageConfig, StageName
from ups.config.training import LawsConfig, TrainingConfig, TtcConfig
from ups.laws import Laws
from ups.section import Count, CountOrZero, Positive, Section, key
from ups.stages import (
    AUTOENCODER,
    BASELINES,
    CORRECTOR,
    CORRECTOR_MODEL,
    ENCODER_MODEL,
    JOINT,
    NETWORKS,
    NOTHING,
    OPERATOR,
    OPERATOR_MODEL,
    OPERATORS,
    PRIOR,
    STAGE_NAMES,
    STAGES,
    Model,
    StageFacts,
)
from ups_store.build import BuildConfig, CacheConfig, DataConfig, ReadingConfig
from ups_store.sources import LocalPath, TaskDeclaration


class CheckpointConfig(Section):
    """Where checkpoints go."""

    dir: LocalPath = key(Path("checkpoints"), "folder")
    interval: Count | None = key(None, "optimiser steps between saves, besides every epoch's")
    keep_training_state: bool = key(True, "keep what resuming needs, also when finished")


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = key(False, "log there too")
    project: str | None = key(None, "project; by default WANDB_PROJECT, else uncategorized")
    entity: str | None = key(None, "user or team")
    run_name: str | None = key(None, "name of the run")
    group: str | None = key(None, "group of runs")
    tags: tuple[str, ...] = key((), "tags")
    notes: str | None = key(None, "text")
    log_checkpoints: bool = key(True, "send checkpoints, and reports of evaluations, as artifacts")
    timeout_s: Positive = key(
        60.0, "longest wait for it at the end of a stage; what isn't sent then is left behind"
    )


class TensorboardConfig(Section):
    """TensorBoard."""

    enabled: bool = key(False, "write events for it, too")
    dir: LocalPath | None = key(
        None, "folder, with one for each stage; by default <checkpoint.dir>/tensorboard"
    )


class LoggingConfig(Section):
    """Where progress is logged, besides the JSON lines."""

    wandb: WandbConfig = WandbConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()


# What a stage takes from `training` where it says nothing itself, besides its patience and batch.
_OF_TRAINING = ("grad_clip", "ema_decay", "amp", "amp_dtype", "compile", "compile_mode")

_ENCODED = (AUTOENCODER.name, *OPERATORS, PRIOR.name)  # stages that make latents, or are trained on them
_BATCH_SIZE = 32  # on each rank, unless the configuration says something about it


class RunConfig(Section):
    """Everything that decides a run; written into every checkpoint."""

    data: DataConfig = key(
        ...,
        "which fields there are",
        used_by=("evaluation", "validation"),
        affects_within=dict.fromkeys(("root", "stage_dir", "follow_external"), NOTHING),
    )
    tasks: dict[str, TaskDeclaration] = key(
        {}, "tasks of your own, see docs/guides/layouts.md", used_by=("evaluation",)
    )
    cache: CacheConfig = key(
        CacheConfig(), "where stores are", affects=NOTHING, affects_within={"dtype": STAGE_NAMES}
    )
    reading: ReadingConfig = key(ReadingConfig(), "how sources are read", affects=NOTHING)
    latent: RunLatentConfig = key(
        RunLatentConfig(),
        "the latents",
        affects=_ENCODED,
        affects_within={
            **dict.fromkeys(("encoder", "device", "compute_dtype", "micro_batch", "compile"), OPERATORS),
            "pin_memory": NOTHING,
        },
    )
    encoder: EncoderConfig = key(EncoderConfig(), "the encoder", affects=_ENCODED)
    decoder: DecoderConfig = key(DecoderConfig(), "the decoder", affects=(AUTOENCODER.name, *OPERATORS))
    operator: OperatorConfig = key(OperatorConfig(), "the operator", affects=NETWORKS)
    baselines: BaselinesConfig = key(BaselinesConfig(), "what stands beside it", affects=BASELINES)
    training: TrainingConfig = key(TrainingConfig(), "loop, precision, losses")
    stages: dict[StageName, StageConfig] = key({}, "by name of the stage")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), "where checkpoints go", affects=NOTHING)
    logging: LoggingConfig = key(LoggingConfig(), "where progress is logged", affects=NOTHING)
    evaluation: EvaluationConfig = key(EvaluationConfig(), "what follows training", affects=NOTHING)
    pipeline: PipelineConfig = key(PipelineConfig(), "what `ups run` does", affects=NOTHING)
    ttc: TtcConfig = key(TtcConfig(), "test-time conditioning", affects=NOTHING, used_by=("evaluation",))
    diffusion: DiffusionConfig = key(DiffusionConfig(), "the corrector", affects=(CORRECTOR.name,))
    prior: PriorConfig = key(
        PriorConfig(), "the prior of steady solutions", affects=(PRIOR.name,), used_by=("validation",)
    )
    laws: dict[str, LawsConfig] = key(
        {},
        "by task: what holds for tasks of your own, or instead of what we know of ours",
        affects=OPERATORS,
        used_by=("evaluation",),
    )
    code: tuple[str, ...] = key(
        (), "modules of your own that are imported first, for what they register", affects=NOTHING
    )
    seed: CountOrZero = key(0, "of weights, data order and augmentation", used_by=("evaluation",))

    @property
    def build(self) -> BuildConfig:
        """The sections that say which fields there are, as the build of their stores takes them."""
        return BuildConfig(data=self.data, tasks=self.tasks, cache=self.cache, reading=self.reading)

    @property
    def own_laws(self) -> dict[str, Laws]:
        """`laws`, as `ups.laws.laws_of` takes them."""
        return {task: Laws(**laws.model_dump()) for task, laws in self.laws.items()}

    def trains(self, stage: StageFacts) -> bool:
        """Tell whether the run has a stage; baselines are trained for the evaluation alone."""
        if stage.is_baseline:
            return False
        if not stage.is_default:  # named under `stages`, and not left out by 0 epochs
            return stage.name in self.stages and self.stages[stage.name].epochs > 0
        if stage is AUTOENCODER and (
            not self.uses_encoder or self.is_given(ENCODER_MODEL) or self.trains(JOINT)
        ):
            return False
        return self.stage(stage.name).epochs > 0

    @property
    def trained_stages(self) -> tuple[str, ...]:
        """The stages that `ups train` goes through, in their order."""
        return tuple(name for name, stage in STAGES.items() if self.trains(stage))

    @property
    def uses_encoder(self) -> bool:
        """Whether the operator's states are latents."""
        return self.operator.state == "latent"

    @property
    def trains_encoder(self) -> bool:
        """Whether a stage of the run makes the encoder."""
        return self.trains(JOINT) or self.trains(AUTOENCODER)

    def path_of(self, model: Model) -> Path:
        """Where a model is: another one that a key names, or what its stage writes."""
        given = reduce(getattr, model.key.split("."), self) if model.key is not None else None
        return given if isinstance(given, Path) else self.checkpoint.dir / model.file

    def is_given(self, model: Model) -> bool:
        """Tell whether a key names another model than the one that the run's stage writes."""
        return self.path_of(model).absolute() != (self.checkpoint.dir / model.file).absolute()

    def trains_model(self, model: Model) -> bool:
        """Tell whether the run makes the model itself that `path_of` gives."""
        makers = (stage for stage in STAGES.values() if model in stage.makes)
        return not self.is_given(model) and any(map(self.trains, makers))

    def models_for(self, stage: StageFacts) -> tuple[Model, ...]:
        """The models that a stage is trained on: no encoder where states are fields."""
        return tuple(model for model in stage.needs if model != ENCODER_MODEL or self.uses_encoder)

    @property
    def autoencoder_path(self) -> Path:
        """The autoencoder whose latents are used: `latent.checkpoint`, or what its stage writes."""
        return self.path_of(ENCODER_MODEL)

    @property
    def corrected_operator_path(self) -> Path:
        """The operator that is corrected: `diffusion.operator`, or what its stage writes."""
        return self.path_of(OPERATOR_MODEL)

    @property
    def teacher_path(self) -> Path:
        """The corrector that is distilled: `training.distill_teacher`, or what its stage writes."""
        return self.path_of(CORRECTOR_MODEL)

    def stage(self, name: str) -> StageConfig:
        """A stage's configuration, with what it leaves open taken from `training`.

        Baselines take what they leave open from the operator's stage before, its learning rate aside.
        """
        stage = self._as_operator(name) if name in BASELINES else self.stages.get(name, StageConfig())
        open_values: dict[str, Any] = {
            key: getattr(self.training, key)
            for key in (*_OF_TRAINING, *(("patience",) if stage.budget is None else ()))
            if getattr(stage, key) is None
        }
        if stage.batch_size is None and stage.global_batch_size is None:
            over_all = self.training.global_batch_size
            each = self.training.batch_size or (_BATCH_SIZE if over_all is None else None)
            open_values |= {"batch_size": each, "global_batch_size": over_all}
        of_optimizer: dict[str, Any] = {}
        if stage.optimizer.lr is None:
            of_optimizer["lr"] = self.training.lr
        if stage.optimizer.cpu_offload is None:
            of_optimizer["cpu_offload"] = self.training.cpu_offload_optimizer
        open_values["optimizer"] = stage.optimizer.model_copy(update=of_optimizer)
        return stage.model_copy(update=open_values)

    def _as_operator(self, name: str) -> StageConfig:
        """A baseline's stage, with what it leaves open taken from the operator's."""
        stage, operator = (self.stages.get(each, StageConfig()) for each in (name, OPERATOR.name))
        said, values = stage.model_fields_set, dict[str, Any]()
        if not said & {"epochs", "steps_per_epoch", "steps", "budget"}:
            values |= {key: getattr(operator, key) for key in ("epochs", "steps_per_epoch", "steps")}
        if stage.batch_size is None and stage.global_batch_size is None:
            values |= {key: getattr(operator, key) for key in ("batch_size", "global_batch_size")}
        shared = _OF_TRAINING if stage.budget else (*_OF_TRAINING, "patience")
        values |= {key: getattr(operator, key) for key in shared if getattr(stage, key) is None}
        if stage.optimizer.lr is None:
            lr = STAGES[name].baseline_lr or operator.optimizer.lr
            values["optimizer"] = stage.optimizer.model_copy(update={"lr": lr})
        return stage.model_copy(update=values)
