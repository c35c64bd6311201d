"""How a build shows itself on a terminal, or stays quiet elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

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
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task: TaskID | None = None

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Show a new bar; a finished one stays."""
        self._task = self._progress.add_task(name, total=total, unit=unit)

    def advance(self, num: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.advance(self._task, num)

    def note(self, message: str) -> None:
        """Print a line above the bars."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
