"""The verb `leaderboard`: runs of a folder, by a metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.common import AsJson, note
from ups_store.console import importing, print_json, results

if TYPE_CHECKING:
    from ups.pipeline.leaderboard import Place


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
        from ups.pipeline.leaderboard import read_places, to_csv
    places = read_places(folder, metric=metric, price_per_hour=price_per_hour, note=note)
    if csv is not None:
        write_atomically(csv, to_csv(places).encode())
    if as_json:
        print_json(with_nulls([asdict(place) for place in places]))
    else:
        _show(places, metric, folder)


def _show(places: Sequence[Place], metric: str, folder: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    for task in dict.fromkeys(place.task for place in places):
        table = Table("run", "seeds", metric, "of", "gates", "time", "cost", title=task, title_justify="left")
        for place in (place for place in places if place.task == task):
            name = Path(place.run).relative_to(folder)
            table.add_row(
                Text(f"{name}{' (best)' if place.promoted else ''}"),
                " ".join(map(str, place.seeds)),
                _value(place),
                place.evaluation,
                Text(place.gates),
                f"{place.seconds / 3600:.2f} h",
                "" if place.cost is None else f"{place.cost:.2f}",
            )
        results().print(table)


def _value(place: Place) -> str:
    ends = "" if math.isnan(place.low) else f"\n{place.low:.3g} to {place.high:.3g}"
    return "no number" if math.isnan(place.mean) else f"{place.mean:.4g}{ends}"
