"""The log of a run: records go to sinks, progress and notes to the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ups.errors import InterruptedTrainingError
from ups.train.sinks import Sink

# What a line on the terminal shows of a record.
_SHOWN_DIGITS = 4


class RunLog:
    """Hands records to sinks and shows the progress; a context manager.

    Args:
        stage: Name of the stage, in every record.
        total_steps: Optimiser steps of the stage.
        is_quiet: Whether the terminal shows nothing, as on all ranks but the first.
        console: Where progress goes; stderr by default.

    Attributes:
        sinks: Take the records; closed at the end.
    """

    def __init__(
        self, *, stage: str, total_steps: int, is_quiet: bool = False, console: Console | None = None
    ) -> None:
        self.sinks: list[Sink] = []
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._stage, self._is_quiet = stage, is_quiet
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        rates = TextColumn("{task.fields[rates]}")
        is_shown = self.console.is_terminal and not is_quiet
        self._progress = Progress(*columns, rates, console=self.console, transient=True, disable=not is_shown)
        self._bar = self._progress.add_task(stage, total=total_steps, rates="")

    def record(self, event: str, **values: Any) -> None:
        """Hand a record to the sinks, with the time of day in seconds since 1970."""
        record = {"event": event, "stage": self._stage, "time": round(time.time(), 3), **values}
        for sink in self.sinks:
            sink.write(record)

    def losses(
        self, losses: Mapping[str, float], *, step: int, lr: float, rates: Mapping[str, float]
    ) -> None:
        """Record the losses and rates since the last time, and show the rates beside the progress bar.

        Args:
            losses: Means by name.
            step: Optimiser step.
            lr: Learning rate of that step.
            rates: As `Stopwatch.read` has them, and more.
        """
        self.record("step", step=step, lr=lr, **{f"loss/{k}": v for k, v in losses.items()}, **rates)
        samples_per_s, share = rates["training/samples_per_sec"], rates["training/data_wait_share"]
        shown = f"{samples_per_s:,.0f} samples/s, {share:.0%} waiting for data"
        self._progress.update(self._bar, rates=shown)

    def note(self, text: str) -> None:
        """Say something on the terminal, also before there are sinks."""
        if not self._is_quiet:
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
        has_failed = error is not None and not isinstance(error, InterruptedTrainingError)
        for sink in self.sinks:
            sink.close(has_failed=has_failed)
