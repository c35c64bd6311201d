"""What builds do now, on every machine, out of their event logs (`--log-json`); nothing of them is asked.

So it also works from another machine, for builds that were killed, and for those that hang.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups_store.errors import ConfigError

_ORIGIN = ("host", "rank", "pid")


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a build by its log; None is what the log doesn't say (yet).

    Attributes:
        log: Path of the log.
        run: Id that all processes of the run have.
        host: Its machine.
        rank: Its number among the processes of the run.
        pid: Its process id there.
        state: "running", "finished", "interrupted", "failed", "stalled"; "killed", if it is gone without a
            last line; "unknown", if that was on another machine and it has been silent for ten minutes.
        stage: What it does, or did last.
        done: How much of the stage is done, what was there already included.
        total: How much it has.
        unit: "samples" or "bytes".
        per_second: What is done in a second, since the stage's first progress.
        seconds_left: Of the stage at that rate; None if it doesn't run.
        waits_for: What everything waited for at the last progress.
        silent_s: Seconds since the last line.
        warning: The last note, or diagnosis of a stall.
        error: What it failed by.
    """

    log: str
    run: str
    host: str
    rank: int
    pid: int
    state: str
    stage: str | None
    done: int
    total: int | None
    unit: str | None
    per_second: float | None
    seconds_left: float | None
    waits_for: str | None
    silent_s: float
    warning: str | None
    error: str | None


@dataclass(frozen=True)
class MachineStatus:
    """The processes of one machine that belong to one run.

    Attributes:
        host: The machine.
        run: The run.
        per_second: What its running processes do in a second, together, by unit.
        seconds_left: Until the last of them has ended its stage; None if that isn't known.
        processes: By their rank.
    """

    host: str
    run: str
    per_second: dict[str, float]
    seconds_left: float | None
    processes: tuple[ProcessStatus, ...]

    @property
    def is_running(self) -> bool:
        """Whether any of them runs, as far as this machine can say."""
        return any(process.state == "running" for process in self.processes)


def read_status(paths: Iterable[Path]) -> list[MachineStatus]:
    """What builds do, machine by machine, sorted by run and host.

    Of processes that wrote into the same log one after the other at the same place, the last one counts.

    Args:
        paths: Logs, or folders whose logs (`*.jsonl`) are meant.
    Raises:
        ConfigError: Kind "no_log", if there is none, or one can't be read.
    """
    found: dict[tuple[str, str], list[ProcessStatus]] = {}
    for log in _logs_of(paths):
        for status in _processes(log):
            found.setdefault((status.run, status.host), []).append(status)
    if not found:
        where = ", ".join(map(str, paths))
        raise ConfigError(
            "no event log of a build", kind="no_log", path=where, hint="give what `--log-json` names"
        )
    return [_machine(*key, statuses) for key, statuses in sorted(found.items())]


def _machine(run: str, host: str, statuses: list[ProcessStatus]) -> MachineStatus:
    running = [status for status in statuses if status.state == "running"]
    rates: dict[str, float] = {}
    for status in running:
        if status.per_second is not None and status.unit is not None:
            rates[status.unit] = rates.get(status.unit, 0.0) + status.per_second
    left = [status.seconds_left for status in running]
    known = [seconds for seconds in left if seconds is not None]
    processes = tuple(sorted(statuses, key=lambda status: (status.rank, status.log)))
    return MachineStatus(
        host, run, rates, max(known) if left and len(known) == len(left) else None, processes
    )


def _logs_of(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def _processes(log: Path) -> Iterator[ProcessStatus]:
    """The processes that a log is of: of each place among the ranks the last that began."""
    latest: dict[tuple[Any, ...], _Process] = {}
    for event in _events(log):
        place = tuple(event[name] for name in ("run", *_ORIGIN))
        if event["event"] == "start":
            others = [key for key in latest if key[1:3] == place[1:3]]  # the same host and rank, earlier
            for key in others:
                del latest[key]
            latest[place] = _Process()
        if place in latest:
            latest[place].take(event)
    for (run, host, rank, pid), process in latest.items():
        yield process.status(log=str(log), run=str(run), host=str(host), rank=int(rank), pid=int(pid))


def _events(log: Path) -> Iterator[Mapping[str, Any]]:
    """The lines that are whole; a killed process may leave one that isn't."""
    try:
        with log.open("rb") as file:
            for line in file:
                event = _parsed(line)
                if event is not None:
                    yield event
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"can't be read ({reason})", kind="no_log", path=log) from error


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    needed = ("event", "time_s", "run", *_ORIGIN)
    return event if isinstance(event, dict) and all(name in event for name in needed) else None


@dataclass
class _Process:
    """What a process's lines say, one after the other."""

    events: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # the last of each kind
    first: Mapping[str, Any] | None = None  # progress of the stage
    last_s: float = 0.0
    warning: str | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """One more line."""
        kind = event["event"]
        self.events[kind], self.last_s = event, event["time_s"]
        if kind == "stage":
            self.first = None
            self.events.pop("progress", None)
        elif kind == "progress":
            self.first = self.first or event
        elif kind in ("note", "stalled"):
            self.warning = str(event.get("message", ""))

    def status(self, *, log: str, run: str, host: str, rank: int, pid: int) -> ProcessStatus:
        """All of it."""
        stage, progress = self.events.get("stage", {}), self.events.get("progress", {})
        silent_s = max(0.0, time.time() - self.last_s)
        state = self._state(host, pid, silent_s)
        done, total, rate = int(progress.get("done", 0)), stage.get("total"), self._rate(progress)
        left_s = None
        if rate is not None and total is not None and state == "running":
            left_s = max(0.0, round((total - done) / rate, 1))
        error = self.events.get("error", {}).get("message")
        return ProcessStatus(
            log=log,
            run=run,
            host=host,
            rank=rank,
            pid=pid,
            state=state,
            stage=stage.get("name"),
            done=done,
            total=total,
            unit=stage.get("unit"),
            per_second=rate,
            seconds_left=left_s,
            waits_for=progress.get("waits_for") or None,
            silent_s=round(silent_s, 1),
            warning=self.warning,
            error=None if error is None else str(error),
        )

    def _state(self, host: str, pid: int, silent_s: float) -> str:
        if "end" in self.events:
            if self.events["end"].get("is_done"):
                return "finished"
            kind = self.events.get("error", {}).get("kind")
            return kind if kind in ("interrupted", "stalled") else "failed"
        if host == os.uname().nodename:
            return "running" if os.path.exists(f"/proc/{pid}") else "killed"
        return "running" if silent_s < _SILENT_S else "unknown"

    def _rate(self, progress: Mapping[str, Any]) -> float | None:
        if self.first is None or progress["time_s"] <= self.first["time_s"]:
            return None
        seconds = progress["time_s"] - self.first["time_s"]
        rate = (progress["done"] - self.first["done"]) / seconds
        return round(rate, 3) if rate > 0 else None


_SILENT_S = 600.0  # of a process of another machine, of which nothing else is known
