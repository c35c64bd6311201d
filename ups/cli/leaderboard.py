"""The verb `leaderboard`: runs of a folder, by a metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.common import AsJson
from ups_store.console import importing, print_json, results

if TYPE_CHECKING:
    from ups.pipeline.leaderboard import LeaderboardRow


def leaderboard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="with folders of `ups run`, at any depth")],
    *,
    metric: Annotated[str, typer.Option(help="of the reports, less being better")] = "nrmse",
    csv: Annotated[Path | None, typer.Option(help="write the table there, too")] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="of the machine, for runs that don't know theirs")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs by a metric, with its interval, their time and cost."""
    with importing():
        from dataclasses import asdict

        from ups.output import with_nulls, write_atomically
        from ups.pipeline.leaderboard import read_rows, to_csv
    rows = read_rows(folder, metric=metric, price_per_hour=price_per_hour)
    if csv is not None:
        write_atomically(csv, to_csv(rows).encode())
    if as_json:
        print_json(with_nulls([asdict(row) for row in rows]))
    else:
        _show(rows, metric, folder)


def _show(rows: Sequence[LeaderboardRow], metric: str, folder: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    for task in dict.fromkeys(row.task for row in rows):
        table = Table("run", "seeds", metric, "of", "gates", "time", "cost", title=task, title_justify="left")
        for row in (row for row in rows if row.task == task):
            name = Path(row.run).relative_to(folder)
            table.add_row(
                Text(f"{name}{' (best)' if row.promoted else ''}"),
                " ".join(map(str, row.seeds)),
                _value(row),
                row.evaluation,
                Text(row.gates),
                f"{row.seconds / 3600:.2f} h",
                "" if row.cost is None else f"{row.cost:.2f}",
            )
        results().print(table)


def _value(row: LeaderboardRow) -> str:
    ends = "" if math.isnan(row.low) else f"\n{row.low:.3g} to {row.high:.3g}"
    return "no number" if math.isnan(row.mean) else f"{row.mean:.4g}{ends}"
