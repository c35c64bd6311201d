"""The verb `status`: what builds do now, on every machine, by their event logs; the builds aren't asked."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ups_store.console import AsJson, format_duration, format_nbytes, print_json, print_lines, results
from ups_store.errors import ConfigError
from ups_store.system.files import opened_text

_REFRESH_S = 2.0
_SILENT_S = 600.0  # of a process of another machine, of which nothing else is known


def status(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="event logs of builds (--log-json), or their folders"),
    ],
    *,
    watch: Annotated[bool, typer.Option("--watch", help="refresh until nothing runs there any more")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what builds do now on every machine: stage, rate, time left, the last warning."""
    if watch and as_json:
        raise ConfigError("--watch and --json", expected="one of them", found="both")
    processes = _read(paths)
    if as_json:
        machines: dict[Any, list[Any]] = {}
        for process in processes:
            machines.setdefault((process["run"], process["host"]), []).append(process)
        print_json({"machines": [{"host": h, "run": r, "processes": of} for (r, h), of in machines.items()]})
    elif not watch:
        print_lines(*_lines(processes))
    else:
        from rich.live import Live
        from rich.text import Text

        with Live(Text("\n".join(_lines(processes))), console=results(), auto_refresh=False) as live:
            while any(process["state"] == "running" for process in processes):
                time.sleep(_REFRESH_S)
                processes = _read(paths)
                live.update(Text("\n".join(_lines(processes))), refresh=True)


def _read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Sum up every process; of those of the same place in one log, one after the other, the last."""
    processes = []
    for log in (log for path in paths for log in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])):
        latest: dict[Any, list[dict[str, Any]]] = {}
        for event in _events(log):
            rank_key = event["host"], event["rank"]
            if event["event"] == "start":
                latest[rank_key] = [event]
            elif rank_key in latest and latest[rank_key][0]["pid"] == event["pid"]:
                latest[rank_key].append(event)
        processes += [_summary(log, events) for events in latest.values()]
    if not processes:
        where, hint = ", ".join(map(str, paths)), "give what `--log-json` names"
        raise ConfigError("no event log of a build", kind="no_log", path=where, hint=hint)
    return sorted(processes, key=lambda each: (each["run"], each["host"], each["rank"], each["log"]))


def _events(log: Path) -> Iterator[dict[str, Any]]:
    try:
        with opened_text(log) as file:
            for line in file:
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):  # a killed process may leave a line that isn't whole
                    continue
                needed = {"event", "time_s", "run", "host", "rank", "pid"}
                if isinstance(event, dict) and needed <= event.keys():
                    yield event
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"can't be read ({reason})", kind="no_log", path=log) from error


def _summary(log: Path, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a process's lines say; None is what they don't say (yet)."""
    last = {event["event"]: event for event in events}  # of each kind
    stage, error = last.get("stage", {}), last.get("error", {})
    since = max((number for number, event in enumerate(events) if event is stage), default=0)
    progress = [event for event in events[since:] if event["event"] == "progress"]
    notes = [str(event.get("message")) for event in events if event["event"] in ("note", "stalled")]
    document = {name: events[0][name] for name in ("run", "host", "rank", "pid")}
    silent_s = max(0.0, time.time() - events[-1]["time_s"])
    if "end" in last:
        ended = error.get("kind") if error.get("kind") in ("interrupted", "stalled") else "failed"
        state = "finished" if last["end"].get("is_done") else ended
    elif document["host"] == os.uname().nodename:
        state = "running" if os.path.exists(f"/proc/{document['pid']}") else "killed"
    else:
        state = "running" if silent_s < _SILENT_S else "unknown"
    done, total, rate = progress[-1]["done"] if progress else 0, stage.get("total"), 0.0
    if progress and (seconds := progress[-1]["time_s"] - progress[0]["time_s"]) > 0:
        rate = round((done - progress[0]["done"]) / seconds, 3)
    left_s = round((total - done) / rate, 1) if rate > 0 and total and state == "running" else None
    document |= {
        "log": str(log),
        "state": state,
        "silent_s": round(silent_s, 1),
        "error": error.get("message"),
    }
    document |= {"stage": stage.get("name"), "done": done, "total": total, "unit": stage.get("unit")}
    waits_for, warning = progress[-1].get("waits_for") if progress else None, notes[-1] if notes else None
    return document | {"per_second": rate, "seconds_left": left_s, "waits_for": waits_for, "warning": warning}


def _lines(processes: Sequence[dict[str, Any]]) -> Iterator[str]:
    for process in processes:
        amount = format_nbytes if process["unit"] == "bytes" else "{:,}".format
        facts = [process["state"]]
        if process["stage"]:
            facts.append(
                f"{process['stage']} {amount(process['done'])} of "
                f"{amount(process['total'])} {process['unit']}"
            )
        facts += [f"{amount(round(process['per_second']))}/s"] if process["per_second"] else []
        facts += (
            [f"{format_duration(process['seconds_left'])} left"]
            if process["seconds_left"] is not None
            else []
        )
        facts += (
            [f"waits for {process['waits_for']}"] if process["waits_for"] and not process["error"] else []
        )
        facts.append(f"last line {format_duration(process['silent_s'])} ago")
        name = f"{process['host']} (run {process['run']}), rank {process['rank']}, pid {process['pid']}"
        yield f"{name} in {Path(process['log']).name}: {', '.join(facts)}"
        yield from (
            f"  {kind}: {process[kind]}".split("\n")[0] for kind in ("warning", "error") if process[kind]
        )
