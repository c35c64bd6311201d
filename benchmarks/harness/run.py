"""`python -m benchmarks.harness.run --quick|--full`: every `track_` of this package, in this process."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness import machine, report
from benchmarks.harness.elsewhere import missed_elsewhere
from benchmarks.harness.measure import UnavailableError, last_line
from benchmarks.harness.report import Result

OPERATIONS = (
    "store.open_store",
    "store.gather",
    "store.sweep",
    "store.write",
    "store.resume",
    "store.ragged",
    "store.verify",
    "store.preload",
    "loader.order",
    "loader.loaders",
    "loader.device",
    "build.ingest",
    "build.build",
    "build.encode",
)
TRAIN = "train."
SWEEP = "store.sweep"
FAILED = "failed:"
OF_TRAINING = (f"{TRAIN}train_step", f"{TRAIN}earlier_step")
_HERE = Path(__file__).resolve().parents[1]
_PAGE = _HERE.parent / "docs" / "results" / "performance.md"
_CHART = _HERE.parent / "docs" / "images" / "performance.png"
_SWEEP_CHART = _CHART.with_name("sweep.png")

console = Console()


def main(
    full: Annotated[bool, typer.Option("--full/--quick", help="larger inputs and more repetitions")] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSON [default: benchmarks/results/DATE-MACHINE.json]")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="measure those whose name contains this; the docs stay, but for `train.` and `store.sweep`"
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="folder on the disk to measure")] = None,
) -> None:
    """Measure, print a table, write JSON and, when all was measured, the documentation's table and chart."""
    mode = "full" if full else "quick"
    os.environ["UPS_BENCH"] = mode  # read when the operations are imported
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes start as where it is installed
    if folder:
        os.environ["UPS_BENCH_DIR"] = str(folder.resolve())
    about = report.describe(mode, folder=folder)
    hardware = about["machine"]
    results = list(measure_all(only or ""))
    console.print(report.table(results))
    part = {TRAIN: "-train", SWEEP: "-sweep"}.get(only or "", "")
    name = f"{about['date']}-{machine.kind(hardware)}{part}.json"
    report.write_json(out or report.RESULTS / name, results, about)
    of_training = [result for result in results if result.benchmark.startswith(TRAIN)]
    if only in (None, TRAIN):
        text = report.markdown(of_training, about, missed_elsewhere(of_training, report.RESULTS, hardware))
        report.write_docs(_PAGE, text, begin=report.BEGIN_TRAINING, end=report.END_TRAINING)
    if only in (None, SWEEP):
        from benchmarks.harness import chart

        chart.draw_sweep(_SWEEP_CHART, [result for result in results if result.benchmark.startswith(SWEEP)])
    if only is None:
        of_stores = [result for result in results if result not in of_training]
        elsewhere = missed_elsewhere(of_stores, report.RESULTS, hardware)
        report.write_docs(_PAGE, report.markdown(of_stores, about, elsewhere))
        chart.draw(_CHART, of_stores)
    num_failed = sum((result.failure or "").startswith(FAILED) for result in results)
    if num_failed:
        console.print(f"{num_failed} of {len(results)} failed, their rows say why")
        raise typer.Exit(1)


def measure_all(only: str) -> Iterator[Result]:
    """Every number of every operation whose asv name contains `only`."""
    for operation in (*OPERATIONS, *OF_TRAINING):
        module = importlib.import_module(f"benchmarks.{operation}")
        for name, benchmark in vars(module).items():  # in the order of its text
            is_own = inspect.isclass(benchmark) and benchmark.__module__ == module.__name__
            if not is_own or name.startswith("_"):
                continue
            prefix, methods = f"{operation}.{name}", inspect.getmembers(benchmark, inspect.isfunction)
            tracks = [track for track, _ in methods if track.startswith("track_")]
            chosen = [track for track in tracks if only in f"{prefix}.{track}"]
            yield from measure(benchmark, prefix, chosen) if chosen else ()


def measure(benchmark: type[Any], prefix: str, tracks: list[str]) -> Iterator[Result]:
    """Rows of these methods, for all values of the parameters; what fails has a row that says why."""
    names = getattr(benchmark, "param_names", ())
    choices = getattr(benchmark, "params", ())
    if len(names) == 1:  # asv's short form
        choices = (choices,)
    for values in itertools.product(*choices):
        parameters = dict(zip(names, values, strict=True))
        console.log(prefix, *parameters.items())
        instance = benchmark()
        rows = [_row(instance, prefix, track, parameters) for track in tracks]
        try:
            instance.setup(*values)
        except Exception as error:
            yield from [_failed(row, error) for row in rows]
            continue
        try:
            for track, row in zip(tracks, rows, strict=True):
                try:
                    value = float(getattr(instance, track)(*values))
                except Exception as error:  # the others are measured all the same, and the row tells
                    yield _failed(row, error)
                else:
                    comparison = getattr(instance, "comparison", None)
                    yield replace(row, value=value, comparison=comparison)
        finally:
            try:
                getattr(instance, "teardown", lambda *values: None)(*values)
            except Exception:  # its numbers count, and the next one is measured
                console.print_exception()


def _row(instance: Any, prefix: str, track: str, parameters: dict[str, Any]) -> Result:
    method, values = getattr(instance, track), tuple(parameters.values())
    limits = {key: report.limit_of(getattr(method, key), values) for key in ("at_most", "at_least")}
    return Result(f"{prefix}.{track}", method.title, parameters, None, method.unit, **limits)


def _failed(row: Result, error: Exception) -> Result:
    """The row with the reason in one line; of a process that failed, what it said last."""
    if isinstance(error, UnavailableError):
        return replace(row, failure=f"not measured: {error}")
    console.print_exception()
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    reason = last_line(said if isinstance(said, str) else str(error))
    return replace(row, failure=f"{FAILED} {type(error).__name__}: {reason}")


if __name__ == "__main__":
    typer.run(main)
