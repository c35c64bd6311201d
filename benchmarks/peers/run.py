"""`python -m benchmarks.peers.run --quick|--full`: the same samples through every peer, in one run.

Peers are other ways to keep a training set (`formats`). `make bench-peers` makes their environment,
measures, and writes the tables of `docs/results/performance.md`. This folder has no `__init__.py`: asv, which
imports every module of a package, then passes over it.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.harness.inputs import Folder
from benchmarks.harness.report import RESULTS, describe, write_docs, write_results
from benchmarks.peers import table
from benchmarks.peers.formats import PEERS, Samples, sizes
from benchmarks.peers.isolated import FailedError, isolated
from benchmarks.peers.measure import PeerResult, measure_peer

_ROOT = Path(__file__).resolve().parents[2]
_PAGE = _ROOT / "docs" / "results" / "performance.md"
_CHART = _ROOT / "docs" / "images" / "peers.png"
_FIGURE_S = {False: 60.0, True: 600.0}  # at most, per figure

console = Console()


def main(
    full: Annotated[bool, typer.Option("--full/--quick", help="eight times as many samples")] = False,
    only: Annotated[str | None, typer.Option(help="peers whose name contains this; docs stay")] = None,
    size: Annotated[str | None, typer.Option(help="4 KB, 100 KB or 13 MB; docs stay")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON [default: benchmarks/results/DATE-peers.json]")
    ] = None,
) -> None:
    """Measure, print, write JSON and, when all was measured, the documentation's tables and chart."""
    about = describe("full" if full else "quick")
    names = [name for name in PEERS if (only or "") in name]
    chosen = [samples for samples in sizes(full=full) if size in (None, samples.label)]
    results = [_measured(name, samples, full=full) for samples in chosen for name in names]
    console.print(table.markdown(results, about))
    path = out or RESULTS / f"{about['date']}-peers.json"
    write_results(path, [asdict(result) for result in results], about)
    if only is None and size is None:
        write_docs(_PAGE, table.markdown(results, about), begin=table.BEGIN, end=table.END)
        table.draw(_CHART, results)


def _measured(name: str, samples: Samples, *, full: bool) -> PeerResult:
    began, limit = time.perf_counter(), _FIGURE_S[full]
    with Folder() as folder:
        try:
            # Its packages are imported in there, once; the time limit is that of every figure, added up.
            place = Path(folder) / "samples"
            place.mkdir()
            result = isolated(measure_peer, name, place, samples, limit, timeout_s=12 * limit)
        except FailedError as error:
            result = PeerResult(name, samples.label, "", None, str(error))
    console.log(name, samples.label, f"{time.perf_counter() - began:.1f} s", result.reason)
    return result


if __name__ == "__main__":
    assert importlib.util.find_spec("torch"), (
        "run it with the Python of benchmarks/peers/env: make bench-peers"
    )
    typer.run(main)
