"""The log of a run: JSON lines in a file, a progress bar on stderr."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# What a line on the terminal shows of a record.
_SHOWN_DIGITS = 4


class RunLog:
    """Appends to the JSON lines and shows the progress; a context manager.

    Args:
        path: File of JSON lines; appended to, its folder is made.
        stage: Name of the stage, in every line.
        total_steps: Optimiser steps of the stage.
        console: Where progress goes; stderr by default.
    """

    def __init__(self, path: Path, *, stage: str, total_steps: int, console: Console | None = None) -> None:
        self.path, self._stage = path, stage
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        )
        self._bar = self._progress.add_task(stage, total=total_steps)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def record(self, event: str, **values: Any) -> None:
        """Append one JSON line, with the time of day in seconds since 1970."""
        line = {"event": event, "stage": self._stage, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def note(self, text: str) -> None:
        """Say something on the terminal."""
        self.console.print(text, markup=False)

    def epoch(self, number: int, total: int, values: dict[str, float]) -> None:
        """Show the end of an epoch on the terminal."""
        shown = "  ".join(f"{name} {value:.{_SHOWN_DIGITS}g}" for name, value in values.items())
        self.note(f"{self._stage} epoch {number}/{total}  {shown}")

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        self._progress.update(self._bar, completed=step)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._file.close()
