"""`ups run`: what isn't valid of a run's graph is executed, each node in a process of its own.

Everything that decides is on disk: records of nodes, training states, committed samples of stores. So it
doesn't matter when a run ends, or how; the same command goes on. This process imports no torch.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.config import RunConfig, dump_config, load_config
from ups.errors import ConfigError, GateMissedError, InterruptedTrainingError, UpsError
from ups.log import logger, once_each, quiet
from ups.output import write_atomically
from ups.pipeline.gates import check_judgeable, gate_missed_by_stage
from ups.pipeline.graph import Graph, Node
from ups.pipeline.metadata import write_metadata
from ups.pipeline.nodes import Run, declare_graph, shown
from ups.pipeline.processes import run_process
from ups.pipeline.records import RunFolder
from ups.pipeline.tracking import Tracking, send_metadata, tracking


@dataclass(frozen=True)
class Options:
    """Which nodes are looked at, and how.

    Attributes:
        skipped: Groups that are left out; without full evaluation nothing is promoted.
        first: Begin with this node.
        only: This node alone.
        restart: Execute what is valid, too, and train from scratch.
        dry_run: Say what would be done, and do nothing.
        price_per_hour: Of the machine, for the cost of the run.
    """

    skipped: Collection[str] = ()
    first: str | None = None
    only: str | None = None
    restart: bool = False
    dry_run: bool = False
    price_per_hour: float | None = None


def open_run(
    config_path: Path | None, overrides: Sequence[str], *, phases: Mapping[str, float] | None = None
) -> Run:
    """A run's three configurations, and where it lies.

    Args:
        phases: Seconds of what happened before, by name, for the reports.

    Raises:
        ConfigError: If one of them is wrong.
    """
    config = load_config(config_path, overrides=overrides)
    folder = config.pipeline.dir or config.checkpoint.dir / "run"
    checks = (config.pipeline.small, config.pipeline.full)
    with quiet():
        small, full = (load_config(config_path, overrides=[*overrides, *check.overrides]) for check in checks)
    for name, other in (("small", small), ("full", full)):
        _check_same_run(name, other, config)
        check_judgeable(name, config, evaluated=other)
    return Run(config, small, full, folder, phases or {})


def _check_same_run(name: str, other: RunConfig, config: RunConfig) -> None:
    """Refuse overrides of an evaluation by which it would evaluate another run."""
    if other.checkpoint.dir != config.checkpoint.dir:
        raise ConfigError(
            f"pipeline.{name}.overrides: checkpoint.dir",
            expected=f"that of the run, {config.checkpoint.dir}",
            found=str(other.checkpoint.dir),
        )


def run_pipeline(run: Run, options: Options, *, siblings: Sequence[Path] = ()) -> dict[str, Any]:
    """Execute what isn't valid of a run.

    Args:
        options: Which nodes, and how.
        siblings: Folders of the same run with other seeds: a node that was done alike there is valid.

    Returns:
        As `run_graph`.

    Raises:
        UpsError: As `run_graph`.
    """
    return run_graph(run, declare_graph(run), options, siblings=siblings)


@once_each()
def run_graph(
    run: Run,
    graph: Graph,
    options: Options,
    *,
    siblings: Sequence[Path] = (),
    of_seeds: Mapping[int, Run] | None = None,
) -> dict[str, Any]:
    """Execute what isn't valid of a graph.

    Args:
        run: Whose records and results these are.
        options: Which nodes, and how.
        siblings: See `run_pipeline`.
        of_seeds: Runs with single seeds, if this one is about all of them.

    Returns:
        What `metadata.json` holds; {"plan": by node "valid", "run" or "unknown"} of a dry run.

    Raises:
        GateMissedError: Everything that was made is kept.
        InterruptedTrainingError: On SIGTERM or SIGINT.
        UpsError: Of a node that failed, with its exit code; kind "run_locked", if another run works here.
    """
    folder = RunFolder(run.folder, siblings=siblings)
    nodes = _chosen(graph, options)
    if options.dry_run:
        return {"plan": _plan(nodes, graph, folder, restart=options.restart)}
    with folder.locked() as lock_fd, tracking(run, restart=options.restart) as tracked:
        _write_configs(run)
        execution = _Execution(run, folder, options, tracked, lock_fd)
        try:
            for node in nodes:
                execution.advance(node)
        finally:
            metadata = execution.write_metadata(graph, of_seeds or {})
            if execution.has_executed and not isinstance(sys.exception(), InterruptedTrainingError):
                send_metadata(run, metadata)
    return metadata


def _chosen(graph: Graph, options: Options) -> list[Node]:
    """The nodes that are looked at; without full evaluation nothing is promoted."""
    skipped = {*options.skipped, *(("promotion",) if "full-eval" in options.skipped else ())}
    return graph.chosen(skipped=skipped, first=options.first, only=options.only)


def _plan(nodes: Sequence[Node], graph: Graph, folder: RunFolder, *, restart: bool) -> dict[str, str]:
    """What would become of each node: what comes behind one that leaves something isn't known before."""
    plan: dict[str, str] = {}
    for node in nodes:
        before = [other for other in graph if other.name in node.after or other.group in node.after]
        if any(plan.get(other.name, "valid") != "valid" and other.outputs() for other in before):
            plan[node.name] = "unknown"
        else:
            plan[node.name] = "valid" if not restart and folder.is_valid(node, node.key()) else "run"
    return plan


def _write_configs(run: Run) -> None:
    """The resolved configurations, which nodes read: a file that is edited meanwhile changes nothing."""
    configs = {"train": run.config, "small-eval": run.small, "full-eval": run.full}
    for name, config in configs.items():
        write_atomically(run.config_path(name), dump_config(config).encode())


class _Execution:
    """One call of `run_pipeline`, node by node."""

    def __init__(
        self, run: Run, folder: RunFolder, options: Options, tracked: Tracking, lock_fd: int
    ) -> None:
        self._run, self._folder, self._options = run, folder, options
        self._tracked, self._lock_fd = tracked, lock_fd
        self.has_executed = False
        self._began, self._in_nodes = time.perf_counter(), 0.0
        self._missed: dict[str, Any] = {}

    def advance(self, node: Node) -> None:
        """Execute a node unless it is valid."""
        key = node.key()
        if not self._options.restart and self._folder.is_valid(node, key):
            logger.info(f"{node.name}: valid")
            self._tracked.valid(node)
            return
        self.has_executed = True
        self._folder.log("begin", node.name)
        began, code = time.perf_counter(), UpsError.exit_code
        try:
            result, code = self._execute(node), 0
        except UpsError as error:
            code = error.exit_code
            if isinstance(error, GateMissedError):
                self._missed[node.name] = list(error.verdicts)
            raise
        finally:
            seconds = time.perf_counter() - began
            self._in_nodes += seconds
            self._folder.log("end", node.name, seconds=round(seconds, 3), exit_code=code)
        self._folder.write_record(node, key=key, result={"seconds": round(seconds, 3), **result})
        self._tracked.done(node, seconds)
        logger.info(f"{node.name}: done in {seconds:.1f} s")

    def _execute(self, node: Node) -> Mapping[str, Any]:
        if node.work is not None:
            logger.info(f"{node.name}")
            return node.work()
        assert node.command is not None
        command = list(node.command(self._options.restart))
        logger.info(f"{node.name}: $ {shlex.join(shown(command))}")
        began = time.time()
        try:
            run_process(command, what=node.name, kind="node", lock_fd=self._lock_fd)
        except InterruptedTrainingError:
            raise
        except UpsError as error:
            missed = node.stage and gate_missed_by_stage(self._run.config, node.stage, since=began)
            if missed:
                raise missed from error
            raise
        return {"command": shown(command)}

    def write_metadata(self, graph: Graph, of_seeds: Mapping[int, Run]) -> dict[str, Any]:
        """Write `metadata.json` as things are now."""
        own_s = time.perf_counter() - self._began - self._in_nodes
        return write_metadata(
            self._run,
            graph,
            self._folder,
            own_s=own_s,
            missed=self._missed,
            of_seeds=of_seeds,
            price_per_hour=self._options.price_per_hour,
        )
