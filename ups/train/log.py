"""The log of a run: records go to sinks; progress, notes and the table of a stage go to the terminal."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ups.errors import InterruptedTrainingError
from ups.log import logger
from ups.output import terminal, with_nulls
from ups_store.printable import json_text

# What a line on the terminal shows of a record.
_SHOWN_DIGITS = 4

# Values by task: key of the report, heading, format.
_COLUMNS = (
    ("compression", "compression", "{:.3g}x"),
    ("rollout_steps", "steps", "{}"),
    ("nrmse", "nRMSE of rollouts", "{:.3%}"),
    ("operator_nrmse", "operator alone", "{:.3%}"),
    ("crps", "CRPS", "{:.3g}"),
    ("operator_crps", "operator alone", "{:.3g}"),
    ("spread_skill", "spread over skill", "{:.3g}"),
    ("persistence_nrmse", "persistence", "{:.3%}"),
    ("floor_nrmse", "autoencoder floor, nRMSE", "{:.3%}"),
    ("decoder_condition", "decoder's condition", "{:.3g}"),
)
_ROUNDED = "floor_nrmse_"  # then the dtype of latents in a store, as in "floor_nrmse_float16_latents"
_NOT_TRAINED = (
    "no validation was better than before the first step; the checkpoint holds the untrained weights: "
    "lower training.lr, or train for longer"
)
_FILES = ("checkpoint", "autoencoder", "figure")


def _record_warnings(log: RunLog) -> Callable[[], object]:
    """Record what a run is warned of in its log, too, be it shown or not; returns what ends that.

    A filter, and the first one: a handler would miss what is quiet, and Python shows warnings by itself only
    where there is none. It ends with the log where a training is made and never begins.
    """
    wanted = weakref.ref(log)

    def look(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and (own := wanted()) is not None:
            own.warned(record.getMessage())
        return True

    logger.filters.insert(0, look)
    return weakref.finalize(log, logger.removeFilter, look)


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
        self.sinks: list[Any] = []
        self.console = console or terminal()
        self._stage, self._is_quiet = stage, is_quiet
        self._unrecorded: list[str] = []  # warnings that came before there were sinks
        self._stop_recording = (lambda: None) if is_quiet else _record_warnings(self)
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        rates = TextColumn("{task.fields[rates]}", markup=False)
        is_shown = self.console.is_terminal and not is_quiet
        self._progress = Progress(*columns, rates, console=self.console, transient=True, disable=not is_shown)
        self._bar = self._progress.add_task(stage, total=total_steps, rates="")

    def record(self, event: str, **values: Any) -> None:
        """Hand a record to the sinks, with the time of day in seconds since 1970."""
        record = {"event": event, "stage": self._stage, "time": round(time.time(), 3), **values}
        for sink in self.sinks:
            sink.write(record)
        if self.sinks and self._unrecorded:
            warnings, self._unrecorded = self._unrecorded, []
            for text in warnings:
                self.record("warning", text=text)

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
        """Say something, unless this is another rank than the first."""
        if not self._is_quiet:
            logger.info(text)

    def warned(self, text: str) -> None:
        """Record a warning; before there are sinks, once there are."""
        if self.sinks:
            self.record("warning", text=text)
        else:
            self._unrecorded.append(text)

    def epoch(self, number: int, total: int, values: dict[str, float]) -> None:
        """Say the end of an epoch."""
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
        if has_failed:
            self.record("failed", error=str(error) or type(error).__name__)
        for sink in reversed(self.sinks):  # the file last: it takes what the others warn of
            sink.close(has_failed=has_failed)
        self._stop_recording()


def show_report(report: Mapping[str, Any], console: Console) -> None:
    """Show a stage's report, or those of all stages and seeds: errors by task, time, files.

    Args:
        report: As `run_stage` or `run_all` returns it.
        console: Where to.
    """
    for seed, inner in report.get("seeds", {}).items():
        console.print(f"seed {seed}", style="bold", markup=False)
        show_report(inner, console)
    for stage, inner in report.get("stages", {}).items():
        console.print(f"{stage}", style="bold", markup=False)
        show_report(inner, console)
    if "stages" in report or "seeds" in report:
        _show_paths(report.get("evaluation", {}).values(), console)
        return
    columns = [column for column in (*_COLUMNS, *_rounded(report)) if report.get(column[0])]
    if columns:
        console.print(_table(report, columns))
    for name, ratio in report.get("compression", {}).items():
        if ratio <= 1:
            console.print(f"warning: latents of {name} are no smaller than the fields ({ratio:.2g}x)")
    console.print(_summary(report), markup=False)
    if report.get("best_step") == 0:
        console.print(f"warning: {_NOT_TRAINED}", markup=False)
    _show_paths((report[key] for key in _FILES if key in report), console)


def report_json(report: Mapping[str, Any]) -> str:
    """A report for machines; JSON has neither NaN nor infinity, so these are null."""
    return json_text(with_nulls(report), indent=2)


def _table(report: Mapping[str, Any], columns: list[tuple[str, str, str]]) -> Table:
    table = Table("fields", *(heading for _, heading, _ in columns))
    names = dict.fromkeys(name for key, _, _ in columns for name in report[key])
    for name in names:
        cells = (form.format(report[key][name]) if name in report[key] else "" for key, _, form in columns)
        table.add_row(name, *cells)
    return table


def _rounded(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The floor with latents as a store holds them."""
    return [
        (key, key.removeprefix(_ROUNDED).replace("_", " "), "{:.3%}")
        for key in report
        if key.startswith(_ROUNDED)
    ]


def _summary(report: Mapping[str, Any]) -> str:
    parts = []
    if latent := report.get("latent"):
        parts.append(f"latent state {latent['tokens']} x {latent['dim']}")
    parts.append(_effort(report))
    if report.get("best_step"):
        parts.append(f"best after step {report['best_step']}")
    if report["data_wait_share"]:
        parts.append(f"{report['data_wait_share']:.1%} of training waiting for data")
    return ", ".join(parts)


def _effort(report: Mapping[str, Any]) -> str:
    """Steps in all; the seconds are those of this call alone."""
    steps, before, seconds = report["steps"], report.get("resumed_at", 0), report["seconds"]
    if not before:
        return f"{steps} steps in {seconds:.1f} s"
    return f"{steps} steps, of which {before} were made before; {seconds:.1f} s now"


def _show_paths(paths: Any, console: Console) -> None:
    for path in paths:
        console.print(str(path), markup=False)
