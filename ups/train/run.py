"""Running a stage: ranks, device, stage, trainer, report; and warnings of settings that change nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ups.config import RunConfig
from ups.device import matmul_precision
from ups.errors import CheckpointError, ConfigError, needs
from ups.optim import check_optimizer
from ups.output import Note
from ups.train.budget import within_budget
from ups.train.distributed import joined_ranks
from ups.train.interrupt import before_steps
from ups.train.meter import StartupClock, measuring
from ups.train.sinks import import_wandb
from ups.train.stage import StageStart, make_stage
from ups.train.state import SavedState, state_path
from ups.train.trainer import Trainer
from ups.train.untrained import is_untrained, run_untrained

with needs("train"):
    from pydantic import BaseModel

# Which kinds of optimiser and schedule read a setting.
_READ_BY_OPTIMIZER = {
    "betas": ("adamw", "adam", "muon_hybrid"),
    "eps": ("adamw", "adam", "muon_hybrid"),
    "momentum": ("sgd",),
    "muon_momentum": ("muon_hybrid",),
    "muon_ns_steps": ("muon_hybrid",),
    "muon_adjust_lr": ("muon_hybrid",),
    "muon_backend": (),
}
_READ_BY_SCHEDULER = {
    "t_max": ("cosine",),
    "eta_min": ("cosine",),
    "step_size": ("step",),
    "gamma": ("step",),
    "factor": ("plateau",),
    "patience": ("plateau",),
    "min_lr": ("plateau",),
}
# Settings of `training` that another one switches on.
_SWITCHED_BY = {
    "amp_dtype": "amp",
    "compile_mode": "compile",
    "inverse_loss_frequency": "use_inverse_losses",
    "lambda_alignment": "use_inverse_losses",
    "inverse_loss_warmup_epochs": "use_inverse_losses",
    "inverse_loss_max_weight": "use_inverse_losses",
    "lambda_inv_enc": "use_inverse_losses",
    "lambda_inv_dec": "use_inverse_losses",
}
# How a latent operator is trained while encoder and decoder are frozen; joint training has its own losses.
_READ_BY_OPERATOR = {
    "operator": ("noise", "curriculum"),
    "training": ("lambda_relative", "lambda_spectral", "rollout_loss", "pushforward"),
}


def run_stage(
    name: str,
    config: RunConfig,
    *,
    note: Note,
    restart: bool = False,
    began: float | None = None,
    startup: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Train a stage from where it was left, or from the start; under `torchrun` together with other ranks.

    Args:
        name: Name of the stage.
        config: Configuration of the run.
        note: Told what people should know.
        restart: Begin from scratch although there is a state to continue from.
        began: When the process was started, for the time that imports took; seconds since 1970.
        startup: Metrics of what happened before, such as a build of stores, for the log.

    Returns:
        The stage's report, with `steps`, and how many of them were made before, `resumed_at`; `best_step`,
        after which the exported weights were, 0 if training didn't make them better, None if there was
        nothing to train; `start_score`, the validation error before the first step, None if that wasn't
        finite; `seconds` and `cpu_seconds` of this call, `data_wait_share` and the metrics `startup/...`.

    Raises:
        UpsError: Configuration, checkpoint, divergence, interruption, a rank that was lost.
        ups_store.StoreError: The data can't be read.
    """
    start, cpu_start = time.perf_counter(), time.process_time()
    settings = config.stage(name)
    if settings.epochs == 0:
        hint = f"say stages.{name}.epochs=..."
        raise ConfigError(f"stages.{name}.epochs = 0 leaves the stage out", kind="no_epochs", hint=hint)
    check_optimizer(settings.optimizer, stage=name)
    if config.logging.wandb.enabled:
        import_wandb()  # a mistake is found before minutes of opening data
    clock = StartupClock(began=began, before=startup)
    training = config.training
    with (
        joined_ranks(training.device, timeout_s=training.rank_timeout_s, note=note) as (ranks, device),
        matmul_precision(training.matmul_precision, note=note),
        measuring(clock),
        ExitStack() as stack,
    ):
        for text in unused_settings(config, name) if ranks.is_first else ():
            note(f"warning: {text}")
        saved = state_path(config, name)
        with clock.phase("budget"), before_steps(name, saved, restart=restart):
            config = within_budget(
                name, config, device=device, ranks=ranks, is_continued=not restart, note=note
            )
        expected = StageStart(note) if restart else _continuing(saved, config, name, note=note)
        with clock.phase("stage"), before_steps(name, saved, restart=restart):
            stage = make_stage(name, config, device=device, start=expected)
        stack.callback(stage.close)  # also if its state can't be continued from
        if is_untrained(stage):
            report = run_untrained(stage, config, ranks=ranks, note=note)
        else:
            with clock.phase("trainer"), before_steps(name, saved, restart=restart):
                trainer = Trainer(stage, config, device=device, restart=restart, ranks=ranks, startup=clock)
            report = _train(trainer)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        **report,
        "stage": name,
        "ranks": ranks.world_size,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def _train(trainer: Trainer) -> dict[str, Any]:
    """The stage's report, and how far training came."""
    resumed_at = trainer.step
    report = trainer.fit()
    start_score = trainer.best_weights.start
    return {
        **report,
        "steps": trainer.step,
        "resumed_at": resumed_at,
        "best_step": trainer.best_weights.step,
        "start_score": start_score if start_score is not None and math.isfinite(start_score) else None,
        "data_wait_share": trainer.stopwatch.data_wait_share,
        "startup": trainer.startup_metrics,
    }


def train_unless_valid(
    name: str, config: RunConfig, *, note: Note, restart: bool, **options: Any
) -> dict[str, Any]:
    """As `run_stage`; a state of another configuration, other data or an earlier version is left behind."""
    try:
        return run_stage(name, config, note=note, restart=restart, **options)
    except CheckpointError as error:
        if error.kind not in ("other_config", "other_data", "too_old"):
            raise
        note(f"stage {name} is trained again: {error.problem}")
    return run_stage(name, config, note=note, restart=True, **options)


def _continuing(path: Path, config: RunConfig, stage: str, *, note: Note) -> StageStart:
    """Refuse a state of another configuration now, and one of other data before a store is replaced."""
    if not path.exists():
        return StageStart(note)
    state = SavedState.read(path)
    state.check_config(config, stage=stage)
    return StageStart(note, state.check_data)


def unused_settings(config: RunConfig, stage: str) -> Iterator[str]:
    """One sentence for each setting of a stage that has another value than its default and no effect."""
    settings = config.stages.get(stage)
    if settings is not None:
        optimizer, scheduler = settings.optimizer, settings.scheduler
        where = f"stages.{stage}"
        yield from _not_read(optimizer, optimizer.name, _READ_BY_OPTIMIZER, f"{where}.optimizer")
        yield from _not_read(scheduler, scheduler.name, _READ_BY_SCHEDULER, f"{where}.scheduler")
    for name in _changed(config.training, _SWITCHED_BY):
        switch = _SWITCHED_BY[name]
        if not getattr(config.training, switch):
            yield f"training.{name} has no effect: training.{switch} is off"
    if stage == "autoencoder" and config.training.use_inverse_losses and not config.trains_jointly:
        yield "training.use_inverse_losses has no effect: stage joint trains with them"
    if stage == "joint":
        for section, names in _READ_BY_OPERATOR.items():
            for name in _changed(getattr(config, section), names):
                yield f"{section}.{name} has no effect in stage joint: stage operator reads it"
    if stage == "operator" and config.training.horizon == 1:
        if config.operator.curriculum:
            yield "operator.curriculum has no effect: training.horizon is 1"
        if config.training.pushforward:
            yield "training.pushforward has no effect: training.horizon is 1"
    if stage == "autoencoder" and not config.encoder.residual:
        for name in _changed(config.training, ("reconstruction_loss",)):
            yield f"training.{name} has no effect: encoder.residual is off, so nothing is trained"


def unused_in_one_stage(config: RunConfig) -> Iterator[str]:
    """As `unused_settings`, for what `--stage all` alone reads."""
    if config.evaluation.enabled:
        yield "evaluation.enabled has no effect: stage all evaluates, after training"


def unused_in_all_stages(config: RunConfig) -> Iterator[str]:
    """As `unused_settings`, for what the evaluation at the end of `--stage all` reads."""
    for name in ("baseline_flops", "baseline_samples", "baseline_seconds"):
        if getattr(config.evaluation, name) is not None and not config.evaluation.enabled:
            yield f"evaluation.{name} has no effect: evaluation.enabled is off"


def _not_read(
    section: BaseModel, kind: str, readers: Mapping[str, tuple[str, ...]], where: str
) -> Iterator[str]:
    for name in _changed(section, readers):
        if kind not in readers[name]:
            yield f"{where}.{name} has no effect: {kind} has no such setting"


def _changed(section: BaseModel, names: Iterable[str]) -> Iterator[str]:
    fields = type(section).model_fields
    return (name for name in names if getattr(section, name) != fields[name].default)
