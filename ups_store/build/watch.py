"""How a build shows itself on a terminal, or stays quiet elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from ups_store.build.rates import StageRates

if TYPE_CHECKING:
    from ups_store.sources.pool import ReaderPool  # imports h5py, which --help needn't

_MAX_SHOWN = 4  # readers in one line


class _RateColumn(ProgressColumn):
    """Samples or bytes per second."""

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == "bytes":
            return TransferSpeedColumn().render(task)
        return Text(f"{task.speed or 0:,.0f} {task.fields['unit']}/s", style="progress.data.speed")


class _CountColumn(ProgressColumn):
    """How much of how much."""

    def render(self, task: Task) -> Text:
        column = DownloadColumn() if task.fields["unit"] == "bytes" else MofNCompleteColumn()
        return column.render(task)


class _StateColumn(ProgressColumn):
    """What the stage that isn't done waits for."""

    def __init__(self, state: Callable[[], str]) -> None:
        super().__init__()
        self._state = state

    def render(self, task: Task) -> Text:
        return Text("" if task.finished else self._state())


class ConsoleWatcher:
    """Shows stages as progress bars with rate and time left, and notes as lines, on stderr.

    Args:
        console: Where to; bars are left out if it isn't a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=30),
            _CountColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
            _StateColumn(self.state),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task: TaskID | None = None
        self._pool: ReaderPool | None = None
        self._waits_for = ""
        self._rates = StageRates()

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Show a new bar; a finished one stays."""
        self._rates.begin()
        self._task = self._progress.add_task(name, total=total, unit=unit)

    def advance(self, num: int) -> None:
        """Move the bar."""
        self._rates.advance(num)
        if self._task is not None:
            self._progress.advance(self._task, num)

    def note(self, message: str) -> None:
        """Print a line above the bars."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def watch(self, pool: ReaderPool) -> None:
        """Show what these readers do."""
        self._pool = pool

    def waits(self, what: str) -> None:
        """Show what everything waits for."""
        self._rates.waits(what)
        self._waits_for = what

    def state(self) -> str:
        """What everything waits for, what the readers do, and how fast each stage is.

        Such as "waits for commit (reading 0.3 s, idle 0.1 s; 1 ready); read 900/s, commit 310/s".
        """
        waits = f"waits for {self._waits_for}" if self._waits_for else ""
        per_second = self._rates.per_second()
        rates = ", ".join(f"{stage} {rate:,.0f}/s" for stage, rate in per_second.items())
        rates = rates if len(per_second) > 1 else ""  # of a single one, the bar has it
        return "; ".join(part for part in (f"{waits}{self._queue()}", rates) if part)

    def _queue(self) -> str:
        status = self._pool.status() if self._pool else None
        if status is None or not status.readers or not self._waits_for:
            return ""
        now = time.monotonic()
        longest_first = sorted(status.readers, key=lambda reader: reader.since_s)
        shown = [f"{reader.doing} {now - reader.since_s:.1f} s" for reader in longest_first[:_MAX_SHOWN]]
        if len(longest_first) > _MAX_SHOWN:
            shown.append(f"{len(longest_first) - _MAX_SHOWN} more")
        return f" ({', '.join(shown)}; {status.num_ready} ready)"

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
