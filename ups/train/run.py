"""Running a stage: ranks, device, stage, trainer, report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

from ups.config import RunConfig
from ups.config.checks import check_no_inverse_losses, check_optimizer
from ups.config.legacy import present_stage
from ups.data.latents import make_latents
from ups.data.splits import are_there
from ups.data.stores import Store
from ups.device import compile_cache, free_memory, matmul_precision
from ups.distributed.ranks import Ranks
from ups.errors import CheckpointError, ConfigError, check_installed
from ups.locks import TRAINING_LOCK, locked
from ups.log import logger, quiet
from ups.losses import check_losses
from ups.train.best import LOST_WEIGHTS, export
from ups.train.budget import within_budget
from ups.train.checks import HOW_TO_HAVE_ENCODER, builds_fields, builds_latents, unused_settings
from ups.train.distributed import check_num_ranks, joined_ranks, launched_ranks
from ups.train.interrupt import before_steps
from ups.train.launched import before_stage, launched_at, of_stores
from ups.train.meter import StartupClock, saying_what_takes_memory
from ups.train.saved_state import SavedState, state_path
from ups.train.stage import Stage, StageStart, facts_of, make_stage
from ups.train.state import remove_state
from ups.train.switches import check_switches
from ups.train.tracking import CACHE_MINUTES
from ups.train.trainer import Trainer
from ups.trained.checkpoint import hinting_where_missing


def run_stage(
    name: str,
    config: RunConfig,
    *,
    restart: bool = False,
    began: float | None = None,
    startup: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Train a stage from where it was left, or from the start; under `torchrun` together with other ranks.

    Args:
        restart: Begin from scratch although there is a state to continue from.
        began: When the process was started, for the time that imports took; seconds since 1970. The start is
            counted from the launch of the command that the process belongs to.
        startup: Metrics of what happened before, such as a build of stores, for the log.

    Returns:
        The stage's report, with `steps`, and how many of them were made before, `resumed_at`; `best_step`,
        after which the exported weights were, 0 if training didn't make them better, None if there was
        nothing to train; `start_score`, the validation error before the first step, None if that wasn't
        finite; `seconds` and `cpu_seconds` of this call, `data_wait_share` and the metrics `startup/...`.
    """
    start, cpu_start = time.perf_counter(), time.process_time()
    name = present_stage(name)
    settings = config.stage(name)
    if settings.epochs == 0:
        hint = f"say stages.{name}.epochs=..."
        raise ConfigError(f"stages.{name}.epochs = 0 leaves the stage out", kind="no_epochs", hint=hint)
    check_optimizer(settings.optimizer, stage=name)
    if config.logging.tensorboard.enabled:
        check_installed("tensorboard", extra="tensorboard")  # before minutes of opening data
    before = {**_of_cache(config, name), **(before_stage(began) if began else {}), **(startup or {})}
    clock = StartupClock(began=launched_at(began) if began else None, before=before)
    training, saved = config.training, state_path(config, name)
    is_continued = saved.exists() and not restart
    latents: dict[str, Store] | None = None
    if name == "operator" and config.operator.state == "latent":
        with (
            clock.phase("cache"),
            before_steps(name, saved, restart=restart),
            hinting_where_missing(HOW_TO_HAVE_ENCODER),
        ):
            latents = _make_latents(name, config, SavedState.read(saved) if is_continued else None)
        clock.take({CACHE_MINUTES: clock.metrics["startup/cache_sec"] / 60})
    with (
        joined_ranks(training.device, timeout_s=training.rank_timeout_s) as (ranks, device),
        matmul_precision(training.matmul_precision),
        compile_cache(training.compile_cache),
        saying_what_takes_memory(name, settings),
        ExitStack() as stack,
    ):
        check_num_ranks(training, ranks)
        check_switches(config, name, device=device, num_ranks=ranks.world_size)
        free_memory(device)  # that a stage before in this process held
        for text in unused_settings(config, name) if ranks.is_first else ():
            logger.warning(text)
        if ranks.is_first:
            stack.enter_context(locked(config.checkpoint.dir / TRAINING_LOCK, is_nested=True))
        with clock.phase("budget"), before_steps(name, saved, restart=restart):
            config = within_budget(
                name, config, device=device, ranks=ranks, is_continued=not restart, latents=latents
            )
        expected = StageStart(phase=clock.phase, latents=latents)
        if is_continued:
            state = SavedState.read(saved)
            state.check_config(config, stage=name)
            state.check_batch(config, stage=name, num_ranks=ranks.world_size)
            for text in state.changes(config, stage=name) if ranks.is_first else ():
                logger.info(text)
            expected = StageStart(state.check_data, clock.phase, latents)
        with clock.phase("stage"), before_steps(name, saved, restart=restart):
            stage = make_stage(name, config, device=device, start=expected)
        stack.callback(stage.close)  # also if its state can't be continued from
        if stage.is_untrained:
            report = _export_untrained(stage, config, ranks=ranks)
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


def _make_latents(name: str, config: RunConfig, state: SavedState | None) -> dict[str, Store]:
    """Build the latents that a stage reads, before ranks join: none waits in a collective for what encodes.

    What would be refused after these minutes is refused before.

    Args:
        state: What is continued.
    """
    check_no_inverse_losses(config)
    check_losses(config.training)
    if state is not None and config.stage(name).budget is None:  # which says the number of steps only later
        state.check_config(config, stage=name)
    device = config.training.device
    with quiet():  # said once more when ranks have joined
        ranks = launched_ranks()
        check_num_ranks(config.training, ranks)
        check_switches(config, name, device=ranks.device(device), num_ranks=ranks.world_size)
    if state is not None:
        state.check_batch(config, stage=name, num_ranks=ranks.world_size)
    with locked(config.checkpoint.dir / TRAINING_LOCK, is_nested=True) if ranks.is_first else nullcontext():
        return make_latents(
            config,
            autoencoder_path=config.autoencoder_path,
            device=device,
            check_data=None if state is None else state.check_data,
        )


def _of_cache(config: RunConfig, stage: str) -> dict[str, float]:
    """Of a stage whose command builds no stores: whether all that it would read are there already."""
    latents = facts_of(stage).reads_states and config.uses_encoder
    are_wanted = builds_latents(config) if latents else builds_fields(config)
    return of_stores(0.0, is_reused=are_wanted and are_there(config, latents=latents))


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


def _export_untrained(stage: Stage, config: RunConfig, *, ranks: Ranks) -> dict[str, Any]:
    """Export a model as it was measured on the data, and report on it as after training; a collective.

    There is no state to continue from: it costs a pass through the data to do it again. One of an earlier
    training is removed, since it isn't of what is exported now.
    """
    logger.info(f"stage {stage.name} has nothing to train: it is measured on the data, and exported")
    stage.ranks = ranks
    stage.model.eval()
    metrics = stage.validate()
    export(stage, metrics, ranks=ranks, earlier=config)
    if ranks.is_first:
        remove_state(state_path(config, stage.name))
    ranks.tell()  # the others read what was exported
    no_steps: dict[str, Any] = {
        "steps": 0,
        "resumed_at": 0,
        "best_step": None,
        "data_wait_share": 0.0,
        "startup": {},
    }
    return {**stage.finish(), "start_score": metrics["score"], **no_steps}


def train_unless_valid(name: str, config: RunConfig, *, restart: bool, **options: Any) -> dict[str, Any]:
    """As `run_stage`, and train again what was finished with another configuration, data or version.

    So is a stage whose best weights are lost. One that was interrupted is continued or refused.
    """
    training, name = config.training, present_stage(name)
    with joined_ranks(training.device, timeout_s=training.rank_timeout_s):  # for both
        try:
            return run_stage(name, config, restart=restart, **options)
        except CheckpointError as error:
            kinds = ("other_config", "other_data", "too_old", LOST_WEIGHTS)
            if error.kind not in kinds or not SavedState.read(state_path(config, name)).is_over:
                raise
            logger.info(f"stage {name} is trained again: {error.problem}")
        return run_stage(name, config, restart=True, **options)
