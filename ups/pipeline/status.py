"""What a run does now, out of what it wrote: logs of stages, the records of `ups run`, and living processes.

Nothing of a run is imported, changed or waited for: it may work on another machine, which shares the folder.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.config.legacy import stage_file
from ups.errors import ConfigError, UpsError, needs
from ups.pipeline.records import RunFolder, json_lines
from ups_store.console import format_duration

with needs("train"):
    import yaml

_RUN_LOG = "run.jsonl"
_LOGS = ("*.jsonl", "baselines/*/*.jsonl", "seed-*/*.jsonl", "seed-*/baselines/*/*.jsonl")
_ENDS = {"end": "finished", "interrupted": "interrupted", "failed": "failed", "stalled": "stalled"}
_STATES = {0: "done", 5: "interrupted", 10: "gate_missed"}  # of a node, by its exit code; others: failed
_CLOCK_S = 2.0  # by which a process's start and its first line may disagree


@dataclass(frozen=True)
class StageStatus:
    """A stage by its log; None is what the log doesn't say (yet)."""

    stage: str
    log: str
    # "running", "finished", "interrupted", "failed", "stalled"; "gate_missed", if that is why it failed;
    # "killed", if its process is gone without a last line; "unknown", if that was on another machine.
    state: str
    process: str  # that wrote the last line
    step: int
    total_steps: int | None
    seconds_left: float | None  # at the pace since this process began, validation included
    samples_per_s: float | None  # of all ranks, at the last line with losses
    data_wait_share: float | None
    mfu: float | None
    memory_gib: float | None  # of the process
    gpu_memory_gib: float | None  # the most that tensors had
    loss: float | None
    score: float | None  # of the last validation
    saved_s: float | None  # since the training state was written
    silent_s: float  # since the last line
    warning: str | None
    error: str | None
    ended_by: str | None = None  # "patience", if that ended it before its last step

    def lines(self, name: str) -> Iterator[str]:
        """For people."""
        steps = f"step {self.step}"
        if self.total_steps is not None:
            steps += f" of {self.total_steps} ({self.step / max(self.total_steps, 1):.0%})"
        left = f", {format_duration(self.seconds_left)} left" if self.seconds_left is not None else ""
        by = f" by {self.ended_by}" if self.ended_by is not None else ""
        yield f"{name}: {self.state.replace('_', ' ')}{by}, {steps}{left}"
        parts = (
            (
                (self.samples_per_s, "{:,.0f} samples/s"),
                (self.data_wait_share, "{:.0%} waiting for data"),
                (self.mfu, "MFU {:.1%}"),
            ),
            (
                (self.memory_gib, "memory {:.2f} GiB"),
                (self.gpu_memory_gib, "at most {:.2f} GiB of the GPU's"),
            ),
            ((self.loss, "loss {:.4g}"), (self.score, "validation error {:.4g}")),
        )
        for part in parts:
            if shown := [text.format(value) for value, text in part if value is not None]:
                yield f"  {', '.join(shown)}"
        saved = f"saved {format_duration(self.saved_s)} ago, " if self.saved_s is not None else ""
        yield f"  {saved}last line {format_duration(self.silent_s)} ago by {self.process}"
        for word, text in (("warning", self.warning), ("error", self.error)):
            if text is not None:
                yield f"  {word}: {text}"


@dataclass(frozen=True)
class NodeStatus:
    """A node of `ups run`; "running", "done", "failed", "gate_missed", "interrupted" or "killed"."""

    node: str
    state: str
    seconds: float | None
    exit_code: int | None


@dataclass(frozen=True)
class Status:
    """A folder's run and stages, the stages in the order of their last lines.

    Attributes:
        folder: Of the run; None if only stages were trained.
        holder: The process that works in it.
        nodes: Those that were begun, in that order.
        stages: All whose logs are there.
    """

    folder: str | None
    holder: str | None
    nodes: tuple[NodeStatus, ...]
    stages: tuple[StageStatus, ...]

    @property
    def is_running(self) -> bool:
        """Whether something works there, as far as this machine can say."""
        return self.holder is not None or any(stage.state == "running" for stage in self.stages)

    def lines(self) -> Iterator[str]:
        """For people."""
        if self.folder is not None:
            holder = f"running ({self.holder})" if self.holder is not None else "nothing runs"
            yield f"run {self.folder}: {holder}"
        width = max((len(node.node) for node in self.nodes), default=0) + 2
        for node in self.nodes:
            code = f" (exit code {node.exit_code})" if node.state == "failed" else ""
            seconds = f"  {format_duration(node.seconds)}" if node.seconds is not None else ""
            yield f"  {node.node:<{width}}{node.state.replace('_', ' ')}{code}{seconds}"
        folders = {Path(stage.log).parent for stage in self.stages}
        for stage in self.stages:  # of several seeds or baselines with where each is
            yield from stage.lines(stage.stage if len(folders) == 1 else stage.log.removesuffix(".jsonl"))


def read_status(folder: Path) -> Status:
    """Read what happens in a folder of checkpoints, or of `ups run`; refuse one without any logs."""
    try:
        run, logs = _find_logs(folder)
        holder = run.holder() if run is not None else None
        nodes = tuple(_nodes(run, is_held=holder is not None)) if run is not None else ()
        stages = [status for log in logs if (status := _stage(log)) is not None]
    except OSError as error:
        problem = f"can't be read ({error.strerror})"
        raise UpsError(problem, kind="unreadable", path=error.filename or folder) from error
    if not nodes and not stages:
        raise ConfigError(
            str(folder),
            kind="no_run",
            expected="<stage>.jsonl or run.jsonl",
            found="neither" if folder.is_dir() else "no such folder",
            hint="give checkpoint.dir, or the folder that `ups run` prints",
        )
    stages.sort(key=lambda stage: -stage.silent_s)
    return Status(str(run.path) if run is not None else None, holder, nodes, tuple(stages))


def _find_logs(folder: Path) -> tuple[RunFolder | None, list[Path]]:
    """The folder of the run, if there is one, and the logs of stages."""
    run = next((path for path in (folder, folder / "run") if (path / _RUN_LOG).exists()), None)
    config: Mapping[str, Any] = {}  # as the run resolved it; nothing if it isn't written
    if run is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, yaml.YAMLError):
            config = dict(yaml.safe_load((run / "train.yaml").read_text(encoding="utf-8")))
    checkpoints = folder if run != folder else Path(config.get("checkpoint", {}).get("dir", folder.parent))
    if not checkpoints.is_dir():  # relative to the folder in which the run was started
        checkpoints = folder.parent
    logs = {path: None for pattern in _LOGS for path in sorted(checkpoints.glob(pattern))}
    elsewhere = config.get("training", {}).get("log_path")
    if elsewhere is not None and Path(elsewhere).exists():
        logs[Path(elsewhere)] = None
    return (RunFolder(run) if run is not None else None), [path for path in logs if path.name != _RUN_LOG]


def _nodes(run: RunFolder, *, is_held: bool) -> Iterator[NodeStatus]:
    last = {str(line.get("node")): line for line in run.lines()}
    for name, line in last.items():
        if line.get("event") == "begin":
            seconds = time.time() - line["time"] if is_held else None
            yield NodeStatus(name, "running" if is_held else "killed", seconds, None)
        else:
            code = int(line.get("exit_code", 0))
            yield NodeStatus(name, _STATES.get(code, "failed"), line.get("seconds"), code)


def _stage(log: Path) -> StageStatus | None:
    """None for another kind of file."""
    lines = [line for line in json_lines(log) if {"event", "stage", "time", "pid", "host"} <= line.keys()]
    if not lines:
        return None
    starts = [number for number, line in enumerate(lines) if line["event"] == "start"]
    last, begun = lines[-1], lines[starts[-1] :] if starts else lines  # of the last process that trained
    state = _ENDS.get(last["event"]) or _alive(last)
    if state == "failed" and any(line["event"] == "gate_missed" for line in begun):
        state = "gate_missed"
    rates: Mapping[str, Any] = next((line for line in reversed(lines) if line["event"] == "step"), {})
    losses = [value for name, value in rates.items() if name.startswith("loss/") and value is not None]
    total, step = begun[0].get("total_steps"), max((int(line.get("step", 0)) for line in begun), default=0)
    state_file = stage_file(log.parent / f"{last['stage']}.training.safetensors")
    newest = {line["event"]: line for line in lines}
    warned = {line["event"]: line for line in begun}.get("warning", {})
    return StageStatus(
        stage=str(last["stage"]),
        log=str(log),
        state=state,
        process=f"process {last['pid']} of {last['host']}",
        step=step,
        total_steps=total,
        seconds_left=_seconds_left(begun, total) if state in ("running", "unknown") else None,
        samples_per_s=rates.get("training/samples_per_sec"),
        data_wait_share=rates.get("training/data_wait_share"),
        mfu=rates.get("training/mfu"),
        memory_gib=rates.get("training/memory_gib"),
        gpu_memory_gib=rates.get("training/gpu_memory_gib"),
        loss=sum(losses) if losses else None,
        score=newest.get("epoch", {}).get("score"),
        saved_s=max(time.time() - state_file.stat().st_mtime, 0.0) if state_file.exists() else None,
        silent_s=max(time.time() - last["time"], 0.0),
        warning=warned.get("text"),
        error=last.get("error"),
        ended_by=last.get("ended_by"),
    )


def _seconds_left(begun: Sequence[Mapping[str, Any]], total: int | None) -> float | None:
    """By the steps between two lines, so that start and compilation don't count, once there are two."""
    seen = [line for line in begun if line["event"] in ("step", "epoch", "startup")]
    first, last = (seen[0], seen[-1]) if len(seen) > 1 else (begun[0], begun[-1])
    steps, seconds = last.get("step", 0) - first.get("step", 0), last["time"] - first["time"]
    if total is None or steps <= 0:
        return None
    return max((total - last["step"]) * seconds / steps - (time.time() - last["time"]), 0.0)


def _alive(last: Mapping[str, Any]) -> str:
    """Whether the process that wrote a line is there; a later one of the same number doesn't count."""
    if last["host"] != os.uname().nodename:
        return "unknown"
    try:
        stat = Path(f"/proc/{last['pid']}/stat").read_text()
    except OSError:
        return "killed"
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[19])  # since the machine's start (proc_pid_stat(5), field 22)
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    is_later = time.time() - age_s > last["time"] + _CLOCK_S
    return "killed" if is_later or fields[0] == "Z" else "running"
