"""The verb `lineage`: what a file was made from, and whether all of it is still there and the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.common import AsJson
from ups.errors import CheckpointError
from ups_store.console import importing, print_json, results

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from ups.pipeline.lineage import Lineage, Link

_UNREADABLE = 3  # as of a store
_DIGITS = 12  # of a hash, for people
_STYLES = {"same": "green", "changed": "red", "missing": "red", "unnamed": "yellow"}


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
        from ups.pipeline.lineage import lineage_of
    try:
        found = lineage_of(file, search=search or ())
    except CheckpointError as error:  # here it is what is read, not what works
        error.exit_code = _UNREADABLE
        raise
    if as_json:
        print_json(found.to_json())
    else:
        results().print(_tree(found))
    if not found.is_whole:
        raise typer.Exit(1)


def _tree(found: Lineage) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text.assemble((found.kind, "bold"), f" {found.path}"))
    if not found.made_from:
        tree.add(Text("it names nothing that it was made from", style="dim"))
    for link in found.made_from:
        _add(tree, link)
    return tree


def _add(tree: Tree, link: Link) -> None:
    branch = tree.add(_line(link))
    for other in link.made_from:
        _add(branch, other)


def _line(link: Link) -> Text:
    """State, role and kind; where it was; which hash."""
    from rich.text import Text

    origin = link.origin
    what = origin.role if origin.role == origin.kind else f"{origin.role}, {origin.kind}"
    where = f" {origin.path}" if origin.path else ""
    if link.state == "same" and link.found and link.found != origin.path:
        where += f" (at {link.found})"
    elif link.state == "changed":
        where += f" (at {link.found})" if link.found != origin.path else ""
    hashes = "no hash was noted"
    if origin.hash is not None:
        hashes = f"{origin.hash_of} {origin.hash[:_DIGITS]}"
    if link.state == "changed":
        now = "it can't be read" if link.found_hash is None else f"now {link.found_hash[:_DIGITS]}"
        hashes += f", {now}"
    return Text.assemble((link.state, _STYLES[link.state]), f" {what}{where}", (f"\n{hashes}", "dim"))
