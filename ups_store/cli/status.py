"""The verb `status`: what builds do now, on every machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups_store.console import AsJson, format_duration, format_nbytes, print_json, print_lines, results
from ups_store.errors import ConfigError

if TYPE_CHECKING:
    from ups_store.building.status import MachineStatus, ProcessStatus

_REFRESH_S = 2.0


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
    from dataclasses import asdict

    from ups_store.building.status import read_status

    found = read_status(paths)
    if as_json:
        print_json({"machines": [asdict(machine) for machine in found]})
    elif watch:
        _watch(paths, found)
    else:
        print_lines(*_lines(found))


def _watch(paths: Sequence[Path], found: list[MachineStatus]) -> None:
    from rich.live import Live
    from rich.text import Text

    from ups_store.building.status import read_status

    with Live(Text("\n".join(_lines(found))), console=results(), auto_refresh=False) as live:
        while any(machine.is_running for machine in found):
            time.sleep(_REFRESH_S)
            found = read_status(paths)
            live.update(Text("\n".join(_lines(found))), refresh=True)


def _lines(found: Sequence[MachineStatus]) -> Iterator[str]:
    for machine in found:
        rates = [_rate(rate, unit) for unit, rate in machine.per_second.items()]
        left = [] if machine.seconds_left is None else [f"{format_duration(machine.seconds_left)} left"]
        num = len(machine.processes)
        processes = "1 process" if num == 1 else f"{num:,} processes"
        logs = {process.log for process in machine.processes}
        yield f"{machine.host} (run {machine.run}): {', '.join([processes, *rates, *left])}"
        for process in machine.processes:
            log = f" in {Path(process.log).name}" if len(logs) > 1 else ""
            yield f"  rank {process.rank}{log}: {', '.join(_facts(process))}"
            if process.warning is not None:
                yield f"    note: {process.warning.partition(chr(10))[0]}"
            if process.error is not None:
                yield f"    error: {process.error}"


def _facts(process: ProcessStatus) -> Iterator[str]:
    yield process.state
    if process.stage is not None:
        yield f"{process.stage} {_amount(process)}"
    if process.per_second is not None:
        yield _rate(process.per_second, process.unit or "")
    if process.seconds_left is not None:
        yield f"{format_duration(process.seconds_left)} left"
    if process.waits_for and process.state == "running":
        yield f"waits for {process.waits_for}"
    yield f"last line {format_duration(process.silent_s)} ago by pid {process.pid}"


def _amount(process: ProcessStatus) -> str:
    total = process.total or 0
    done, of = (
        (format_nbytes(process.done), format_nbytes(total))
        if process.unit == "bytes"
        else (f"{process.done:,}", f"{total:,} {process.unit}")
    )
    return f"{done} of {of} ({process.done / max(1, total):.0%})"


def _rate(rate: float, unit: str) -> str:
    return f"{format_nbytes(round(rate))}/s" if unit == "bytes" else f"{rate:,.1f} {unit}/s"
