"""The verb `gc`: what dead builders left in a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ups_store.console import Verbose, format_age, format_nbytes, log, print_json
from ups_store.errors import ConfigError, StoreNotFoundError


def gc(
    folder: Annotated[Path, typer.Argument(help="folder of the stores")] = Path("cache"),
    delete: Annotated[bool, typer.Option("--delete", help="remove what can't be continued")] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="with --delete: unfinished stores too, with their samples")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per file and line")] = False,
    verbose: Verbose = 0,
) -> None:
    """List what dead builders left in a folder; remove it on request. Files of living ones are left alone."""
    from ups_store.check.garbage import find_garbage, remove_garbage

    if unfinished and not delete:
        raise ConfigError(
            "--unfinished has no effect",
            expected="--delete beside it",
            hint="say --delete too, or leave --unfinished out to list what is there",
        )
    if not folder.is_dir():
        raise StoreNotFoundError("no such folder", path=folder, hint="check the path")
    kinds = {"temporary", "damaged", "unfinished"} if unfinished else {"temporary", "damaged"}
    found = find_garbage(folder)
    if not found:
        log(f"{folder}: nothing that a dead builder left")
    for garbage in found:
        is_removed = delete and garbage.kind in kinds and remove_garbage(garbage)
        if as_json:
            print_json({**asdict(garbage), "removed": is_removed})
            continue
        committed = f", {garbage.num_committed} of {garbage.num_samples} samples committed"
        what = {
            "unfinished": f"unfinished{committed}",
            "finished": "finished store, left alone",
            "foreign": "foreign file, left alone",
        }.get(garbage.kind, garbage.kind)
        size = f"{format_nbytes(garbage.nbytes)}, written {format_age(garbage.age_s)}"
        print(f"{garbage.path}: {what}, {size}{', removed' if is_removed else ''}")
