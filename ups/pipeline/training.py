"""Stage `all`: the nodes of a run that train, in this process and its ranks; then the evaluation.

Ranks that `torchrun` started stay joined from one stage to the next, and what trains is imported once; so
stages aren't processes of their own, as they are for `ups run`. Whatever is finished and still valid is kept:
a stage's training state says with which configuration and on which data it was trained, a store's identity
what it was made from. Stores are built by the same command that you would type.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ups.config import RunConfig, load_config
from ups.config.seeds import seed_overrides
from ups.data.stores import are_reused
from ups.eval.evaluate import evaluate_opened
from ups.eval.report import write_report
from ups.eval.runs import trained_run, with_companions
from ups.eval.split_uses import daily_split
from ups.locks import TRAINING_LOCK, locked
from ups.log import logger, once_each, quiet
from ups.pipeline.nodes import FIELD_STORES, LATENT_STORES, build_command, shown, training_nodes
from ups.pipeline.processes import run_process
from ups.train.checks import (
    check_encoder,
    check_nothing_refused_later,
    check_sizes,
    has_given_encoder,
    report_folder,
    unused_in_all_stages,
)
from ups.train.distributed import check_num_ranks, joined_ranks
from ups.train.launched import EARLIER_SECONDS, launched_at, of_stores, with_stores
from ups.train.run import train_unless_valid
from ups.train.saved_state import check_interrupted
from ups.train.stage import ALL
from ups.train.switches import check_switches
from ups.train.tracking import CONTEXT_FILE, context_path, handing_on, send_report
from ups.train.train_baselines import train_configured_baselines
from ups_store.launch import rank_of


@once_each()
def run_all(
    config: RunConfig,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    restart: bool = False,
    began: float | None = None,
    evaluates: bool = True,
) -> dict[str, Any]:
    """Train everything that an operator needs, the operator, and what comes after it.

    Args:
        config_path: The file that it was read from, for the build of stores.
        restart: Train every stage from scratch.
        began: When the process was started, seconds since 1970.
        evaluates: Whether the run ends evaluated where `evaluation.enabled` says so.

    Returns:
        {"stage": "all", "stages": reports by stage, "cache": metrics of the build, "evaluation": paths of the
        report's files}.

    Raises:
        ConfigError: If field stores and latent stores would lie in the same place, and those of the stages;
            before anything is built or trained, as far as the configuration alone shows.
        CheckpointError: If an interrupted stage can't go on with it; before anything is trained.
        OutputError: If the report could not be written.
        UpsError: Of the stages; of kind "build" with the exit code of a build that failed.
    """
    check_encoder(config)
    folder = report_folder(config_path)
    check_nothing_refused_later(config, report_folder=folder)
    train = partial(train_unless_valid, config=config, restart=restart)
    stages: dict[str, Any] = {}
    training, cache, startup = config.training, dict[str, float](), dict[str, float]()
    launched = began and launched_at(began)
    with (
        joined_ranks(training.device, timeout_s=training.rank_timeout_s) as (ranks, device),
        handing_on(context_path(config.checkpoint.dir)),
        ExitStack() as stack,
    ):
        check_num_ranks(training, ranks)
        for name in config.trained_stages:
            check_switches(config, name, device=device, num_ranks=ranks.world_size)
        for text in unused_in_all_stages(config) if ranks.is_first else ():
            logger.warning(text)
        said: dict[str, Any] = {"config_path": config_path, "overrides": overrides}
        said |= {"is_first": ranks.is_first}
        if has_given_encoder(config) and ranks.is_first:
            logger.info(f"no autoencoder is trained: latent.checkpoint = {config.latent.checkpoint}")
        check_sizes(config)
        if ranks.is_first:
            stack.enter_context(locked(config.checkpoint.dir / TRAINING_LOCK, is_nested=True))
        if not restart:
            check_interrupted(config, config.trained_stages)
        for node in training_nodes(config):
            if node.name == FIELD_STORES:
                startup = with_stores(startup, build_fields(config, **said))
            elif node.name == LATENT_STORES:
                cache = build_latents(config, **said)
                startup = with_stores(startup, cache)
            elif node.stage is not None:
                stages[node.stage] = train(node.stage, began=began, startup=startup)
                startup = {EARLIER_SECONDS: time.time() - launched} if launched else {}
        if config.evaluation.enabled:
            train_configured_baselines(config, restart=restart)
    evaluation = {}
    if config.evaluation.enabled and evaluates and ranks.is_first:
        seconds = {name: report["seconds"] for name, report in stages.items()}
        evaluation = _evaluate([config], config.checkpoint.dir, seconds, folder=folder)
    return {"stage": ALL, "stages": stages, "cache": cache, "evaluation": evaluation}


@once_each()
def run_all_seeds(
    config: RunConfig,
    seeds: Sequence[int],
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    restart: bool = False,
    began: float | None = None,
) -> dict[str, Any]:
    """Train everything with one seed after the other, each in its own folders, and evaluate all together.

    Args:
        config: Configuration of the run; its own seed isn't used. The others are those of `run_all`.

    Returns:
        {"stage": "all", "seeds": what `run_all` returns by seed, "evaluation": paths of the report's files}.

    Raises:
        UpsError: As `run_all`.
    """
    configs, reports = [], {}
    for seed in seeds:
        given = [*overrides, *seed_overrides(config, seed)]
        configs.append(own := load_config(config_path, overrides=given))
        logger.info(f"seed {seed}: {own.checkpoint.dir}")
        options: dict[str, Any] = {"restart": restart, "began": began, "evaluates": False}
        with handing_on(own.checkpoint.dir / CONTEXT_FILE):  # each seed is a run of its own
            reports[seed] = run_all(own, config_path=config_path, overrides=given, **options)
        began = None
    evaluation = {}
    if config.evaluation.enabled and rank_of() == 0:
        folder = report_folder(config_path)
        evaluation = _evaluate(configs, config.checkpoint.dir, {}, folder=folder)
    return {"stage": ALL, "seeds": reports, "evaluation": evaluation}


def _evaluate(
    configs: Sequence[RunConfig], checkpoints: Path, phases: dict[str, float], *, folder: Path
) -> dict[str, str]:
    """Write the report of `ups evaluate` to a folder."""
    first = configs[0].evaluation
    report = evaluate_opened(
        [
            with_companions(trained_run(config, folder=checkpoints), has_members=first.members is not None)
            for config in configs
        ],
        split=daily_split(None, first.split),
        phases=phases,
    )
    files = write_report(folder, report)
    send_report(report, files, name="evaluation")
    return {kind: str(path) for kind, path in files.items()}


def build_latents(
    config: RunConfig, *, config_path: Path | None, overrides: Sequence[str], is_first: bool
) -> dict[str, float]:
    """Build the stores of latents that the autoencoder in use makes; valid ones are kept.

    Args:
        config_path: The file that it was read from.
        is_first: Whether this is the first rank, which shows the command and writes the manifest.

    Returns:
        `startup/cache_sec`, the same as `startup/cache_precompute_time_min`, and `startup/cache_reused`, 1 if
        all stores were valid, else 0.

    Raises:
        UpsError: Kind "build", with the exit code of the build; its own message went to stderr.
        InterruptedTrainingError: On SIGTERM or SIGINT; what is committed stays.
    """
    command = build_command(config, config_path, *overrides, holds_latents=True)
    manifest = config.checkpoint.dir / "latents.manifest.json"
    return _timed_build(command, manifest, phase="cache", is_first=is_first)


def build_fields(
    config: RunConfig, *, config_path: Path | None, overrides: Sequence[str], is_first: bool
) -> dict[str, float]:
    """Build stores of the fields themselves; as `build_latents`, with `startup/field_cache_sec`."""
    command = build_command(config, config_path, *overrides, holds_latents=False)
    manifest = config.checkpoint.dir / "fields.manifest.json"
    return _timed_build(command, manifest, phase="field_cache", is_first=is_first)


def _timed_build(command: Sequence[str], manifest: Path, *, phase: str, is_first: bool) -> dict[str, float]:
    """Run a build of stores, and give the metrics of a start; of other ranks the manifest is the first's."""
    began = time.perf_counter()
    flags = ["--manifest", str(manifest)] if is_first else []
    with nullcontext() if is_first else quiet():
        _build([*command, *flags])
    seconds = time.perf_counter() - began
    is_reused = are_reused(manifest) if is_first else False
    return {f"startup/{phase}_sec": seconds, **of_stores(seconds, is_reused=is_reused)}


def _build(command: list[str]) -> None:
    """Run a build of stores as a process of its own."""
    logger.info(f"$ {shlex.join(shown(command))}")
    run_process(command, what="the build of stores", kind="build")
