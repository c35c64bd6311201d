"""`ups train` without `--stage`: the nodes of a run that train, done by this process and its ranks.

Ranks that `torchrun` started stay joined from one stage to the next, and what trains is imported once.
Whatever is finished and still valid is kept: a stage's training state says with which configuration and on
which data it was trained, a store's identity what it was made from. Stores are built by the same command that
you would type.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from ups.config import RunConfig, load_config
from ups.config.seeds import seed_overrides
from ups.eval.evaluate import evaluate_opened
from ups.eval.report import write_report
from ups.eval.runs import trained_run, with_companions
from ups.eval.split_uses import daily_split
from ups.locks import TRAINING_LOCK, locked
from ups.log import logger, once_each, quiet
from ups.pipeline.graph import Node
from ups.pipeline.nodes import (
    BASELINES,
    FIELD_STORES,
    LATENT_STORES,
    STORES,
    TRAINING,
    Run,
    declare_graph,
    shown,
)
from ups.pipeline.run import Executor, run_process
from ups.train.checks import (
    check_encoder,
    check_nothing_refused_later,
    check_sizes,
    has_given_encoder,
    report_folder,
    unused_in_all_stages,
)
from ups.train.distributed import check_num_ranks, joined_ranks
from ups.train.launched import EARLIER_SECONDS, of_stores, with_stores
from ups.train.run import train_unless_valid
from ups.train.saved_state import check_interrupted
from ups.train.stage import ALL
from ups.train.switches import check_switches
from ups.train.tracking import CONTEXT_FILE, context_path, handing_on, send_report
from ups.train.train_baselines import train_configured_baselines
from ups_store.launch import rank_of

_PHASES = {FIELD_STORES: "startup/field_cache_sec", LATENT_STORES: "startup/cache_sec"}


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
    """
    check_encoder(config)
    folder = report_folder(config_path)
    check_nothing_refused_later(config, report_folder=folder)
    training, checkpoints = config.training, config.checkpoint.dir
    with (
        joined_ranks(training.device, timeout_s=training.rank_timeout_s) as (ranks, device),
        handing_on(context_path(checkpoints)),
        ExitStack() as stack,
    ):
        check_num_ranks(training, ranks)
        for name in config.trained_stages:
            check_switches(config, name, device=device, num_ranks=ranks.world_size)
        for text in unused_in_all_stages(config) if ranks.is_first else ():
            logger.warning(text)
        if has_given_encoder(config) and ranks.is_first:
            logger.info(f"no autoencoder is trained: latent.checkpoint = {config.latent.checkpoint}")
        check_sizes(config)
        if ranks.is_first:
            stack.enter_context(locked(checkpoints / TRAINING_LOCK, is_nested=True))
        if not restart:
            check_interrupted(config, config.trained_stages, num_ranks=ranks.world_size)
        file = [] if config_path is None else ["--config", str(config_path)]
        run = Run(config, config, config, checkpoints, words=(*file, *overrides), is_first=ranks.is_first)
        executor = TrainingHere(run, restart=restart, began=began)
        for node in declare_graph(run).of(TRAINING):
            executor.advance(node)
    evaluation = {}
    if config.evaluation.enabled and evaluates and ranks.is_first:
        seconds = {name: report["seconds"] for name, report in executor.reports.items()}
        evaluation = _evaluate([config], checkpoints, seconds, folder=folder)
    return {"stage": ALL, "stages": executor.reports, "cache": executor.cache, "evaluation": evaluation}


class TrainingHere(Executor):
    """Does stages and baselines in this process, on ranks that stay joined; builds are processes.

    Attributes:
        reports: Of stages.
        cache: `startup/cache_sec`, the same as `startup/cache_precompute_time_min`, and
            `startup/cache_reused`, 1 if all stores of latents were valid, else 0; empty where there are none.
    """

    def __init__(self, run: Run, *, restart: bool = False, began: float | None = None) -> None:
        super().__init__(run, restart=restart, began=began)
        self._process_began = began
        self.reports, self.cache = dict[str, Any](), dict[str, float]()

    def execute(self, node: Node) -> Mapping[str, Any]:
        """Train; a build of stores is a process of its own, by each rank, of which one tells."""
        config = self.run.config
        if node.stage is not None:
            self.reports[node.stage] = train_unless_valid(
                node.stage, config, restart=self.restart, began=self._process_began, startup=self.startup
            )
            # What came before counts once: in the stage that waited for it, and then as time that is over.
            self.startup = {EARLIER_SECONDS: time.time() - self.launched} if self._process_began else {}
        elif node.name == BASELINES:
            if config.evaluation.enabled:
                train_configured_baselines(config, restart=self.restart)
        else:
            assert node.command is not None
            command = list(node.command(self.restart))
            with nullcontext() if self.run.is_first else quiet():
                logger.info(f"$ {shlex.join(shown(command))}")
                run_process(command, what="the build of stores", kind="build")
        return {}

    def take_stores(self, node: Node, seconds: float, *, is_reused: bool) -> None:
        """Note the seconds by the phase of the start, too."""
        if node.name in STORES:
            of_phase = {_PHASES[node.name]: seconds}
            metrics = {**of_phase, **of_stores(seconds, is_reused=is_reused and self.run.is_first)}
            self.startup = with_stores(self.startup, metrics)
            self.cache = metrics if node.name == LATENT_STORES else self.cache


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
    """
    configs, reports = [], {}
    for seed in seeds:
        words = [*overrides, *seed_overrides(config, seed)]
        configs.append(own := load_config(config_path, overrides=words))
        logger.info(f"seed {seed}: {own.checkpoint.dir}")
        options: dict[str, Any] = {"restart": restart, "began": began, "evaluates": False}
        with handing_on(own.checkpoint.dir / CONTEXT_FILE):  # each seed is a run of its own
            reports[seed] = run_all(own, config_path=config_path, overrides=words, **options)
        began = None
    evaluation = {}
    if config.evaluation.enabled and rank_of() == 0:
        evaluation = _evaluate(configs, config.checkpoint.dir, {}, folder=report_folder(config_path))
    return {"stage": ALL, "seeds": reports, "evaluation": evaluation}


def _evaluate(
    configs: Sequence[RunConfig], checkpoints: Path, phases: dict[str, float], *, folder: Path
) -> dict[str, str]:
    """Write the report of `ups evaluate` to a folder."""
    settings = configs[0].evaluation
    runs = [
        with_companions(trained_run(config, folder=checkpoints), has_members=settings.members is not None)
        for config in configs
    ]
    report = evaluate_opened(runs, split=daily_split(None, settings.split), phases=phases)
    files = write_report(folder, report)
    send_report(report, files, name="evaluation")
    return {kind: str(path) for kind, path in files.items()}
