"""`python -m benchmarks.harness.run --quick|--full`: every `track_` of this package, in this process."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
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
_RESULTS = _HERE / "results"
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
    hardware = machine.describe(folder or Path(tempfile.gettempdir()))
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "mode": mode, "machine": hardware}
    results = list(measure_all(only or ""))
    console.print(report.table(results))
    part = {TRAIN: "-train", SWEEP: "-sweep"}.get(only or "", "")
    name = f"{about['date']}-{machine.kind(hardware)}{part}.json"
    report.write_json(out or _RESULTS / name, results, about)
    of_training = [result for result in results if result.benchmark.startswith(TRAIN)]
    if only in (None, TRAIN):
        text = report.markdown(of_training, about, missed_elsewhere(of_training, _RESULTS, hardware))
        report.write_docs(_PAGE, text, begin=report.BEGIN_TRAINING, end=report.END_TRAINING)
    if only in (None, SWEEP):
        from benchmarks.harness import chart

        chart.draw_sweep(_SWEEP_CHART, [result for result in results if result.benchmark.startswith(SWEEP)])
    if only is None:
        of_stores = [result for result in results if result not in of_training]
        elsewhere = missed_elsewhere(of_stores, _RESULTS, hardware)
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
        for benchmark in _classes(module):
            tracks = [
                n for n, _ in inspect.getmembers(benchmark, inspect.isfunction) if n.startswith("track_")
            ]
            prefix = f"{operation}.{benchmark.__name__}"
            wanted = [name for name in tracks if only in f"{prefix}.{name}"]
            yield from _measure(benchmark, prefix, wanted) if wanted else ()


def _classes(module: ModuleType) -> list[type[Any]]:
    """The module's own benchmark classes in the order of its text."""
    return [
        item
        for name, item in vars(module).items()
        if inspect.isclass(item) and item.__module__ == module.__name__ and not name.startswith("_")
    ]


def _measure(benchmark: type[Any], prefix: str, tracks: list[str]) -> Iterator[Result]:
    names = getattr(benchmark, "param_names", ())
    choices = getattr(benchmark, "params", ())
    if len(names) == 1:  # asv's short form
        choices = (choices,)
    for values in itertools.product(*choices):
        parameters = dict(zip(names, values, strict=True))
        console.log(prefix, *parameters.items())
        instance = benchmark()
        try:
            instance.setup(*values)
        except Exception as error:
            yield from [_failed(instance, prefix, track, parameters, error) for track in tracks]
            continue
        try:
            yield from [_result(instance, prefix, track, parameters) for track in tracks]
        finally:
            _end(instance, values)


def _end(instance: Any, values: tuple[Any, ...]) -> None:
    if not hasattr(instance, "teardown"):
        return
    try:
        instance.teardown(*values)
    except Exception:  # its numbers count, and the next one is measured
        console.print_exception()


def _result(instance: Any, prefix: str, track: str, parameters: dict[str, Any]) -> Result:
    try:
        value = float(getattr(instance, track)(*parameters.values()))
    except Exception as error:  # the others are measured all the same, and the row tells
        return _failed(instance, prefix, track, parameters, error)
    comparison = getattr(instance, "comparison", None)
    return replace(_unmeasured(instance, prefix, track, parameters), value=value, comparison=comparison)


def _unmeasured(instance: Any, prefix: str, track: str, parameters: dict[str, Any]) -> Result:
    method, values = getattr(instance, track), tuple(parameters.values())
    return Result(
        f"{prefix}.{track}",
        method.title,
        parameters,
        None,
        method.unit,
        at_most=report.limit_of(method.at_most, values),
        at_least=report.limit_of(method.at_least, values),
    )


def _failed(instance: Any, prefix: str, track: str, parameters: dict[str, Any], error: Exception) -> Result:
    if isinstance(error, UnavailableError):
        failure = f"not measured: {error}"
    else:
        console.print_exception()
        failure = f"{FAILED} {type(error).__name__}: {_reason(error)}"
    return replace(_unmeasured(instance, prefix, track, parameters), failure=failure)


def _reason(error: Exception) -> str:
    """In one line; of a process that failed, what it said last."""
    if isinstance(error, subprocess.CalledProcessError) and isinstance(error.stderr, str):
        return last_line(error.stderr)
    return last_line(str(error))


if __name__ == "__main__":
    typer.run(main)
