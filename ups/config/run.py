"""`RunConfig`: everything that decides a run, a section a model; those of the stores are the build's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ups.config.after_training import EvaluationConfig, PipelineConfig
from ups.config.architecture import (
    BaselinesConfig,
    DecoderConfig,
    EncoderConfig,
    OperatorConfig,
    RunLatentConfig,
)
from ups.config.diffusion import DiffusionConfig, SteadyPriorConfig
from ups.config.stages import (
    BASELINE_LR,
    BASELINES,
    NETWORKS,
    NOTHING,
    OPERATORS,
    STAGE_NAMES,
    StageConfig,
    StageName,
)
from ups.config.training import LawsConfig, TrainingConfig, TtcConfig
from ups.errors import needs
from ups.laws import Laws
from ups.section import Count, CountOrZero, Positive, Section, key
from ups.trained.specs import AUTOENCODER_FILE, CORRECTOR_FILE, OPERATOR_FILE
from ups_store.build import BuildConfig, CacheConfig, DataConfig, ReadingConfig
from ups_store.sources import LocalPath, TaskDeclaration

with needs("train"):
    from pydantic import model_validator


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

_BATCH_SIZE = 32  # on each rank, unless the configuration says something about it


class RunConfig(Section):
    """Everything that decides a run; written into every checkpoint."""

    data: DataConfig = key(
        ...,
        "which fields there are",
        affects_within=dict.fromkeys(("root", "stage_dir", "follow_external"), NOTHING),
    )
    tasks: dict[str, TaskDeclaration] = key({}, "tasks of your own, see docs/guides/layouts.md")
    cache: CacheConfig = key(
        CacheConfig(), "where stores are", affects=NOTHING, affects_within={"dtype": STAGE_NAMES}
    )
    reading: ReadingConfig = key(ReadingConfig(), "how sources are read", affects=NOTHING)
    latent: RunLatentConfig = key(
        RunLatentConfig(),
        "the latents",
        affects=("autoencoder", *OPERATORS, "steady_prior"),
        affects_within={
            **dict.fromkeys(("encoder", "device", "compute_dtype", "micro_batch", "compile"), OPERATORS),
            "pin_memory": NOTHING,
        },
    )
    encoder: EncoderConfig = key(
        EncoderConfig(), "the encoder", affects=("autoencoder", *OPERATORS, "steady_prior")
    )
    decoder: DecoderConfig = key(DecoderConfig(), "the decoder", affects=("autoencoder", *OPERATORS))
    operator: OperatorConfig = key(OperatorConfig(), "the operator", affects=NETWORKS)
    baselines: BaselinesConfig = key(BaselinesConfig(), "what stands beside it", affects=BASELINES)
    training: TrainingConfig = key(TrainingConfig(), "loop, precision, losses")
    stages: dict[StageName, StageConfig] = key({}, "by name of the stage")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), "where checkpoints go", affects=NOTHING)
    logging: LoggingConfig = key(LoggingConfig(), "where progress is logged", affects=NOTHING)
    evaluation: EvaluationConfig = key(EvaluationConfig(), "what follows training", affects=NOTHING)
    pipeline: PipelineConfig = key(PipelineConfig(), "what `ups run` does", affects=NOTHING)
    ttc: TtcConfig = key(TtcConfig(), "test-time conditioning", affects=NOTHING)
    diffusion: DiffusionConfig = key(DiffusionConfig(), "the corrector", affects=("diff_residual",))
    steady_prior: SteadyPriorConfig = key(
        SteadyPriorConfig(), "the prior of steady solutions", affects=("steady_prior",)
    )
    laws: dict[str, LawsConfig] = key(
        {},
        "by task: what holds for tasks of your own, or instead of what we know of ours",
        affects=OPERATORS,
    )
    seed: CountOrZero = key(0, "of weights, data order and augmentation")

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

    @model_validator(mode="before")
    @classmethod
    def _attention_of_earlier_keys(cls, values: Any) -> Any:
        operator = values.get("operator", {}) if isinstance(values, dict) else None
        training = values.get("training", {}) if isinstance(values, dict) else None
        if not isinstance(operator, dict) or not isinstance(training, dict):
            return values
        pdet = operator.get("pdet")
        said = [training.get("use_flex"), pdet.get("use_flex") if isinstance(pdet, dict) else None]
        return {**values, "operator": {"attention": "flex", **operator}} if True in said else values

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
    def trains_corrector(self) -> bool:
        """Whether the run has a stage `diff_residual`: named under `stages`, and not left out by 0 epochs."""
        return "diff_residual" in self.stages and self.stages["diff_residual"].epochs > 0

    @property
    def trains_student(self) -> bool:
        """Whether the run has a stage `consistency_distill`, as `trains_corrector`."""
        return "consistency_distill" in self.stages and self.stages["consistency_distill"].epochs > 0

    @property
    def teacher_path(self) -> Path:
        """The corrector that is distilled: `training.distill_teacher`, or what its stage writes."""
        return self.training.distill_teacher or self.checkpoint.dir / CORRECTOR_FILE

    @property
    def trains_prior(self) -> bool:
        """Whether the run has a stage `steady_prior`: named under `stages`, and not left out by 0 epochs."""
        return "steady_prior" in self.stages and self.stages["steady_prior"].epochs > 0

    @property
    def corrected_operator_path(self) -> Path:
        """The operator that is corrected: `diffusion.operator`, or what its stage writes."""
        return self.diffusion.operator or self.checkpoint.dir / OPERATOR_FILE

    @property
    def autoencoder_path(self) -> Path:
        """The autoencoder whose latents are used: `latent.checkpoint`, or what its stage writes."""
        return self.latent.checkpoint or self.checkpoint.dir / AUTOENCODER_FILE

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
        stage, operator = self.stages.get(name, StageConfig()), self.stages.get("operator", StageConfig())
        said, values = stage.model_fields_set, dict[str, Any]()
        if not said & {"epochs", "steps_per_epoch", "steps", "budget"}:
            values |= {key: getattr(operator, key) for key in ("epochs", "steps_per_epoch", "steps")}
        if stage.batch_size is None and stage.global_batch_size is None:
            values |= {key: getattr(operator, key) for key in ("batch_size", "global_batch_size")}
        shared = _OF_TRAINING if stage.budget else (*_OF_TRAINING, "patience")
        values |= {key: getattr(operator, key) for key in shared if getattr(stage, key) is None}
        if stage.optimizer.lr is None:
            values["optimizer"] = stage.optimizer.model_copy(update={"lr": BASELINE_LR[name]})
        return stage.model_copy(update=values)
