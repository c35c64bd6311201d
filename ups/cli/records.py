"""The verbs that read what runs leave: `status`, `leaderboard`, `lineage`; none waits for torch."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.common import AsJson
from ups.errors import CheckpointError, ConfigError
from ups_store.console import importing, print_json, print_lines, results

if TYPE_CHECKING:
    from rich.tree import Tree

    from ups.pipeline.lineage import Link

_REFRESH_S = 2.0
_UNREADABLE = 3  # exit code, as of a store
_DIGITS = 12  # of a hash, for people
_STYLES = {"same": "green", "changed": "red", "missing": "red", "unnamed": "yellow"}


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="of checkpoints, or of `ups run`")],
    *,
    watch: Annotated[bool, typer.Option("--watch", help="refresh until nothing runs there any more")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a run does now: step, rates, time left, memory, the last warning.

    Reads logs and records, so it also works where the run's folder is mounted, or over ssh.
    """
    if watch and as_json:
        raise ConfigError("--watch and --json", expected="one of them", found="both")
    with importing():
        from dataclasses import asdict

        from rich.live import Live
        from rich.text import Text

        from ups.output import with_nulls
        from ups.pipeline.status import read_status
    run = read_status(folder)
    if as_json:
        print_json(with_nulls(asdict(run)))
    elif not watch:
        print_lines(*run.lines())
    else:
        with Live(Text("\n".join(run.lines())), console=results(), auto_refresh=False) as live:
            while run.is_running:
                time.sleep(_REFRESH_S)
                run = read_status(folder)
                live.update(Text("\n".join(run.lines())), refresh=True)


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

        from rich.table import Table
        from rich.text import Text

        from ups.output import with_nulls, write_atomically
        from ups.pipeline.leaderboard import read_rows, to_csv
    rows = read_rows(folder, metric=metric, price_per_hour=price_per_hour)
    if csv is not None:
        write_atomically(csv, to_csv(rows).encode())
    if as_json:
        print_json(with_nulls([asdict(row) for row in rows]))
        return
    for task in dict.fromkeys(row.task for row in rows):
        table = Table("run", "seeds", metric, "of", "gates", "time", "cost", title=task, title_justify="left")
        for row in (row for row in rows if row.task == task):
            ends = "" if math.isnan(row.low) else f"\n{row.low:.3g} to {row.high:.3g}"
            table.add_row(
                Text(f"{Path(row.run).relative_to(folder)}{' (best)' if row.promoted else ''}"),
                " ".join(map(str, row.seeds)),
                "no number" if math.isnan(row.mean) else f"{row.mean:.4g}{ends}",
                row.evaluation,
                Text(row.gates),
                f"{row.seconds / 3600:.2f} h",
                "" if row.cost is None else f"{row.cost:.2f}",
            )
        results().print(table)


def lineage(
    file: Annotated[
        Path,
        typer.Argument(help="store, checkpoint, prediction, report.json, or metadata.json of a run"),
    ],
    *,
    search: Annotated[
        list[Path] | None,
        typer.Option(help="look for files that moved in this folder, at any depth; repeatable"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a file was made from: each file by its hash, and whether it is there and the same."""
    with importing():
        from rich.text import Text
        from rich.tree import Tree

        from ups.pipeline.lineage import lineage_of
    try:
        chain = lineage_of(file, search=search or ())
    except CheckpointError as error:  # here it is what is read, not what works
        error.exit_code = _UNREADABLE
        raise
    if as_json:
        print_json(chain.to_json())
    else:
        tree = Tree(Text.assemble((chain.kind, "bold"), f" {chain.path}"))
        if not chain.made_from:
            tree.add(Text("it names nothing that it was made from", style="dim"))
        for link in chain.made_from:
            _add(tree, link)
        results().print(tree)
    if not chain.is_whole:
        raise typer.Exit(1)


def _add(tree: Tree, link: Link) -> None:
    """Add a link and those before it: state, role and kind; where it was; which hash."""
    from rich.text import Text

    origin = link.origin
    kind = origin.role if origin.role == origin.kind else f"{origin.role}, {origin.kind}"
    where = f" {origin.path}" if origin.path else ""
    if link.found != origin.path and (link.state == "changed" or (link.state == "same" and link.found)):
        where += f" (at {link.found})"
    hashes = f"{origin.hash_of} {origin.hash[:_DIGITS]}" if origin.hash else "no hash was noted"
    if link.state == "changed":
        hashes += ", it can't be read" if link.found_hash is None else f", now {link.found_hash[:_DIGITS]}"
    line = Text.assemble((link.state, _STYLES[link.state]), f" {kind}{where}", (f"\n{hashes}", "dim"))
    branch = tree.add(line)
    for other in link.made_from:
        _add(branch, other)
