"""Executes what isn't valid of a run's graph, node by node: `ups run`, with one seed or several.

Everything that decides is on disk: records of nodes, training states, committed samples of stores. So it
doesn't matter when a run ends, or how; the same command goes on. Each node is a process of its own, and this
one imports no torch; `ups train` has the same executor do the nodes that train by itself
(`ups.pipeline.training`).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ups.config import RunConfig, dump_config, load_config
from ups.config.seeds import seed_folder, seed_overrides
from ups.data.stores import are_reused
from ups.errors import ConfigError, GateMissedError, InterruptedTrainingError, UpsError
from ups.log import logger, once_each, prefixed, quiet
from ups.output import terminal, write_atomically
from ups.pipeline.best import check_loadable
from ups.pipeline.gates import check_judgeable, gate_missed_by_stage
from ups.pipeline.graph import Graph, Group, Node
from ups.pipeline.metadata import send_metadata, write_metadata
from ups.pipeline.nodes import EVALUATIONS, STORES, Run, declare_graph, evaluation_node, shown
from ups.pipeline.records import RunFolder
from ups.train.interrupt import SAME_COMMAND
from ups.train.launched import (
    STARTUP_VARIABLE,
    hand_over,
    launched_at,
    of_stores,
    process_began,
    restored,
    with_stores,
)
from ups.train.tracking import context_path, forget_run, handing_on


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
    """Read a run's three configurations.

    Args:
        phases: Seconds of what happened before, by name, for the reports.
    """
    config = load_config(config_path, overrides=overrides)
    folder = config.pipeline.dir or config.checkpoint.dir / "run"
    evaluated = dict[str, RunConfig]()
    for name, check in (("small", config.pipeline.small), ("full", config.pipeline.full)):
        with quiet():
            other = load_config(config_path, overrides=[*overrides, *check.overrides])
        if other.checkpoint.dir != config.checkpoint.dir:  # it would evaluate another run
            expected = f"that of the run, {config.checkpoint.dir}"
            where, found = f"pipeline.{name}.overrides: checkpoint.dir", str(other.checkpoint.dir)
            raise ConfigError(where, expected=expected, found=found)
        check_judgeable(name, config, evaluated=other)
        evaluated[name] = other
    return Run(config, evaluated["small"], evaluated["full"], folder, phases or {})


def run_pipeline(run: Run, options: Options, *, siblings: Sequence[Path] = ()) -> dict[str, Any]:
    """Execute what isn't valid of a run; arguments and errors are those of `run_graph`."""
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
        siblings: Folders of the same run with other seeds: a node that was done alike there is valid.
        of_seeds: Runs with single seeds, if this one is about all of them.

    Returns:
        What `metadata.json` holds; {"plan": by node "valid", "run" or "unknown"} of a dry run.
    """
    records = RunFolder(run.folder, siblings=siblings)
    without_promotion = ("promotion",) if "full-eval" in options.skipped else ()
    skipped = {*options.skipped, *without_promotion}
    nodes = graph.chosen(skipped=skipped, first=options.first, only=options.only)
    if options.dry_run:
        return {"plan": _plan(nodes, graph, records, restart=options.restart)}
    if any(node.name in EVALUATIONS.values() for node in nodes):
        check_loadable(run.best_dir, run.config.operator.name)
    checkpoints = run.config.checkpoint.dir
    with records.locked() as lock_fd:
        if options.restart:
            forget_run(checkpoints)
        # Nodes read these: a file that is edited meanwhile changes nothing.
        for name, config in (("train", run.config), ("small-eval", run.small), ("full-eval", run.full)):
            write_atomically(run.config_path(name), dump_config(config).encode())
        executor = Executor(run, restart=options.restart, records=records, lock_fd=lock_fd)
        with handing_on(context_path(checkpoints)), restored(STARTUP_VARIABLE):
            try:
                for node in nodes:
                    executor.advance(node)
            finally:
                metadata = write_metadata(
                    run,
                    graph,
                    records,
                    own_s=executor.own_s,
                    missed=executor.missed,
                    of_seeds=of_seeds or {},
                    price_per_hour=options.price_per_hour,
                )
                if executor.has_executed and not isinstance(sys.exception(), InterruptedTrainingError):
                    send_metadata(run.config, metadata)
    return metadata


def _plan(nodes: Sequence[Node], graph: Graph, records: RunFolder, *, restart: bool) -> dict[str, str]:
    """Say what would become of each node: what comes behind one that leaves something isn't known before."""
    plan: dict[str, str] = {}
    for node in nodes:
        before = [other for other in graph if other.name in node.after or other.group in node.after]
        if any(plan.get(other.name, "valid") != "valid" and other.outputs() for other in before):
            plan[node.name] = "unknown"
        else:
            plan[node.name] = "valid" if not restart and records.is_valid(node, node.key()) else "run"
    return plan


class Executor:
    """Executes nodes in turn, each unless it is valid, in a process of its own.

    Args:
        run: Whose nodes they are.
        restart: Execute what is valid, too, and train from scratch.
        records: What was done before, and what is done now. Without them nothing is taken as valid: stores
            and states of stages say themselves what is there.
        lock_fd: Holds the lock of the records' folder; processes inherit it.
        began: When this process was started, seconds since 1970.

    Attributes:
        launched: When the command was launched, which may be an outer process.
        startup: What stores took, for the logs of stages that come next.
        has_executed: Whether any node wasn't valid.
        missed: Verdicts of gates that were missed, by node.
    """

    def __init__(
        self,
        run: Run,
        *,
        restart: bool,
        records: RunFolder | None = None,
        lock_fd: int | None = None,
        began: float | None = None,
    ) -> None:
        self.run, self.restart = run, restart
        self._records, self._lock_fd = records, lock_fd
        self.launched = launched_at(process_began() if began is None else began)
        self.startup: dict[str, float] = {}
        self.has_executed, self.missed = False, dict[str, Any]()
        self._began, self._in_nodes = time.perf_counter(), 0.0

    @property
    def own_s(self) -> float:
        """Seconds besides those of nodes."""
        return time.perf_counter() - self._began - self._in_nodes

    def advance(self, node: Node) -> None:
        """Execute a node unless it is valid."""
        records, key = self._records, ""
        if records is not None:
            key = node.key()
            if not self.restart and records.is_valid(node, key):
                logger.info(f"{node.name}: valid")
                self.take_stores(node, 0.0, is_reused=True)
                return
            records.log("begin", node.name)
        self.has_executed = True
        began, code = time.perf_counter(), UpsError.exit_code
        try:
            result, code = self.execute(node), 0
        except UpsError as error:
            code = error.exit_code
            if isinstance(error, GateMissedError):
                self.missed[node.name] = list(error.verdicts)
            raise
        finally:
            seconds = time.perf_counter() - began
            self._in_nodes += seconds
            if records is not None:
                records.log("end", node.name, seconds=round(seconds, 3), exit_code=code)
        if node.name in STORES:
            is_reused = False
            with suppress(OSError, ValueError, KeyError):  # a build without a manifest has built
                is_reused = are_reused(self.run.manifest_path(node.name))
            self.take_stores(node, seconds, is_reused=is_reused)
        if records is not None:
            records.write_record(node, key=key, result={"seconds": round(seconds, 3), **result})
            logger.info(f"{node.name}: done in {seconds:.1f} s")

    def take_stores(self, node: Node, seconds: float, *, is_reused: bool) -> None:
        """Note what a build of stores took; other nodes build none."""
        if node.name in STORES:
            self.startup = with_stores(self.startup, of_stores(seconds, is_reused=is_reused))

    def execute(self, node: Node) -> Mapping[str, Any]:
        """Do what a node does, and give what its record says of it."""
        if node.work is not None:
            logger.info(f"{node.name}")
            return node.work()
        assert node.command is not None
        command = list(node.command(self.restart))
        logger.info(f"{node.name}: $ {shlex.join(shown(command))}")
        hand_over(self.launched, self.startup)
        began = time.time()
        try:
            run_process(command, what=node.name, kind="node", lock_fd=self._lock_fd)
        except InterruptedTrainingError:
            raise
        except UpsError as error:
            missed = node.stage and gate_missed_by_stage(self.run.config, node.stage, since=began)
            if missed:
                raise missed from error
            raise
        return {"command": shown(command)}


# --- a process for a node -----------------------------------------------------------------------------------

# PR_SET_PDEATHSIG is 1 (prctl(2)); it outlives exec. If the parent ended before, nothing is begun. As a
# program it takes 20 ms; a `preexec_fn` calls functions between fork and exec that may wait for a lock that a
# thread held.
_ENDING_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(5)
os.execv(sys.argv[2], sys.argv[2:])
"""


def run_process(command: Sequence[str], *, what: str, kind: str, lock_fd: int | None = None) -> None:
    """Run a command with its output on stderr, -q without its results; signals to stop go to it.

    Args:
        command: With its interpreter.
        what: What it is, for errors, such as "the build of stores".
        kind: Of the error where it fails, "<kind>_interrupted" where it was stopped.
        lock_fd: Holds the lock of the run's folder. The process inherits it, so a second run waits for it. If
            this process is killed, the kernel sends it SIGTERM: it saves itself and ends.
    """
    running: list[subprocess.Popen[bytes]] = []
    stopped_by: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        for process in running:
            process.send_signal(number)

    # Before the process is there: a signal between its start and ours would leave it behind.
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, forward) for number in numbers}
    if lock_fd is not None:
        command = [sys.executable, "-I", "-S", "-c", _ENDING_WITH_PARENT, str(os.getpid()), *command]
    try:
        # In a session of its own a Ctrl-C on the terminal reaches it once, through us.
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL if terminal().quiet else sys.stderr.fileno(),  # only a step of the run
            start_new_session=True,
            pass_fds=() if lock_fd is None else (lock_fd,),
        )
        running.append(process)
        for number in stopped_by[:1]:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == 0:
        return
    if stopped_by:
        problem = f"stopped by {signal.Signals(stopped_by[0]).name} during {what}"
        raise InterruptedTrainingError(problem, kind=f"{kind}_interrupted", continued_by=SAME_COMMAND)
    if code == GateMissedError.exit_code:
        raise GateMissedError(f"{what} missed a gate", hint="number and limit stand above")
    if code < 0:  # such as by the kernel, for want of memory
        problem, hint = f"{what} was ended by {signal.Signals(-code).name}", None
    else:
        problem, hint = f"{what} ended with exit code {code}", "fix what its own message above says"
    error = UpsError(problem, kind=kind, hint=hint, continued_by=SAME_COMMAND)
    error.exit_code = code if code > 0 else UpsError.exit_code
    raise error


# --- several seeds ------------------------------------------------------------------------------------------


def open_seeds(
    run: Run, seeds: Sequence[int], *, config_path: Path | None, overrides: Sequence[str]
) -> dict[int, Run]:
    """Read the run of each seed, in `<checkpoint.dir>/seed-N`.

    Args:
        run: What the file and the overrides say.
    """
    pipeline, runs = run.config.pipeline, dict[int, Run]()
    named = {"dir": pipeline.dir, "report_dir": pipeline.report_dir}  # where the configuration says it
    for seed in seeds:
        own = [f"pipeline.{key}={seed_folder(path, seed)}" for key, path in named.items() if path is not None]
        with quiet():
            given = [*overrides, *seed_overrides(run.config, seed), *own]
            runs[seed] = open_run(config_path, given, phases=run.phases)
    return runs


def run_seeds(run: Run, runs: Mapping[int, Run], options: Options) -> dict[str, Any]:
    """Execute what isn't valid of each seed's run, one after the other, and evaluate all together.

    What two seeds would do alike (checks of the data, stores of fields, latents of a given encoder) is done
    by the first of them. A seed that misses a gate doesn't keep the others from their turn.

    Args:
        run: The run, whose own seed isn't used: its folder gets the report in which the seeds are one row.
        runs: Of each seed.
        options: As `run_pipeline`; `first` and `only` are about each seed.

    Returns:
        What `metadata.json` of the run holds, under "by_seed" that of each seed; of a dry run {"plan": by
        "seed N", and "all seeds", what `run_pipeline` says}.
    """
    missed, by_seed = list[GateMissedError](), dict[int, dict[str, Any]]()
    for seed, own in runs.items():
        logger.info(f"seed {seed}: {own.folder}")
        others = [other.folder for other in runs.values() if other is not own]
        try:
            with prefixed(f"seed {seed}: "):
                by_seed[seed] = run_pipeline(own, options, siblings=others)
        except GateMissedError as error:
            missed.append(error)
            logger.warning(f"seed {seed}: {error}")
    # Of the two evaluations of all seeds, only the last one that isn't skipped is made.
    skipped = [*options.skipped, *(() if "full-eval" in options.skipped else ("small-eval",))]
    joint = replace(options, first=None, only=None, skipped=skipped)
    if options.dry_run:
        plans = {f"seed {seed}": document["plan"] for seed, document in by_seed.items()}
        return {"plan": {**plans, "all seeds": run_graph(run, joint_graph(run, runs), joint)["plan"]}}
    metadata = {}
    if options.only is None:
        metadata = run_graph(run, joint_graph(run, runs), joint, of_seeds=runs)
    if missed:
        raise missed[0]
    return {**metadata, "by_seed": by_seed}


def joint_graph(run: Run, runs: Mapping[int, Run]) -> Graph:
    """Declare evaluations in which the seeds are one row, of all that each seed's own evaluation reads."""

    def evaluation(group: Group) -> Node:
        node = evaluation_node(run, group, ())
        each = {str(seed): evaluation_node(own, group, ()) for seed, own in runs.items()}

        def command(restart: bool) -> list[str]:
            assert node.command is not None
            return [*node.command(restart), "--seeds", ",".join(each)]

        def inputs() -> dict[str, Any]:
            return {seed: one.inputs() for seed, one in each.items()}

        return replace(node, inputs=inputs, command=command)

    groups: tuple[Group, ...] = ("small-eval", "full-eval")
    return Graph(map(evaluation, groups))
