"""`python -m benchmarks.harness.run --quick|--full`: every `track_` of this package, in this process."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness import machine, report
from benchmarks.harness.report import Result

OPERATIONS = (
    "store.open_store",
    "store.gather",
    "store.write",
    "store.resume",
    "store.ragged",
    "store.verify",
    "store.preload",
    "loader.order",
    "loader.loaders",
    "build.ingest",
    "build.build",
    "build.encode",
)
_HERE = Path(__file__).resolve().parents[1]
_PAGE = _HERE.parent / "docs" / "results" / "performance.md"
_CHART = _HERE.parent / "docs" / "images" / "performance.png"

console = Console()


def main(
    full: Annotated[bool, typer.Option("--full/--quick", help="larger inputs and more repetitions")] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSON [default: benchmarks/results/DATE-MACHINE.json]")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="measure those whose name contains this; docs stay")
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
    name = f"{about['date']}-{machine.kind(hardware)}.json"
    report.write_json(out or _HERE / "results" / name, results, about)
    if only is None:
        from benchmarks.harness import chart

        report.write_docs(_PAGE, report.markdown(results, about))
        chart.draw(_CHART, results)


def measure_all(only: str) -> Iterator[Result]:
    """Every number of every operation whose asv name contains `only`."""
    for operation in OPERATIONS:
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
        instance.setup(*values)
        try:
            yield from [_result(instance, prefix, track, parameters) for track in tracks]
        finally:
            if hasattr(instance, "teardown"):
                instance.teardown(*values)


def _result(instance: Any, prefix: str, track: str, parameters: dict[str, Any]) -> Result:
    method, values = getattr(instance, track), tuple(parameters.values())
    value = float(method(*values))
    return Result(
        f"{prefix}.{track}",
        method.title,
        parameters,
        value,
        method.unit,
        at_most=report.limit_of(method.at_most, values),
        at_least=report.limit_of(method.at_least, values),
        comparison=getattr(instance, "comparison", None),
    )


if __name__ == "__main__":
    typer.run(main)
