"""Fails unless enough branches are covered: the total that coverage itself checks counts lines as well.

Run by `make test` on what `pytest --cov-report=json:FILE` wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def main(
    report: Annotated[Path, typer.Argument(help="coverage's report as JSON")],
    at_least: Annotated[float, typer.Option(help="per cent of the branches")] = 95.0,
) -> None:
    """Print the share of branches that were taken both ways, and compare it."""
    totals = json.loads(report.read_text())["totals"]
    taken, num = totals["covered_branches"], totals["num_branches"]
    share = 100 * taken / num
    verdict = "" if share >= at_least else f": expected at least {at_least:g} %"
    print(f"branches: {taken:,} of {num:,} covered, {share:.2f} %{verdict}")
    raise typer.Exit(int(share < at_least))


if __name__ == "__main__":
    typer.run(main)
