"""The verb `info`: what stores hold, and whether they share samples."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ups_store
from ups_store.console import Verbose, is_verbose, log, print_json, progress_bar, results
from ups_store.reader import open_store

if TYPE_CHECKING:
    from ups_store.info import StoreInfo


def info(
    paths: Annotated[list[Path], typer.Argument(help="stores, <task>_<split>.zarr.zip", metavar="PATH...")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per store and line")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="read all float arrays: range, mean, NaN")] = False,
    verbose: Verbose = 0,
) -> None:
    """Say what stores hold; warn if they share samples.

    Unfinished stores are described too, but not compared.
    """
    from ups_store.info import describe

    stores = [open_store(path, partial=True) for path in paths]
    infos = []
    for store in stores:
        with progress_bar(
            f"reading {store.path.name}", total=store.nbytes, quiet=as_json or not stats
        ) as bar:
            infos.append(describe(store, statistics=stats, progress=bar))
    shared = _shared(stores, infos)
    if as_json:
        for i, described in enumerate(infos):
            print_json({**described.to_json(), "shared_samples": shared[i]})
        return
    _show_infos(infos)
    for i, j in itertools.combinations(range(len(infos)), 2):
        if num := shared[i].get(str(infos[j].path)):
            pair = f"{num:,} of the {len(stores[i]):,} samples of {infos[i].path} are in {infos[j].path} too"
            log(pair, label="WARNING", style="yellow")


def _shared(stores: list[ups_store.Store], infos: list[StoreInfo]) -> list[dict[str, int]]:
    """For each store how many of its samples are in which other one; unfinished stores are left out."""
    from ups_store.info import shared_samples

    found: list[dict[str, int]] = [{} for _ in stores]
    finished = [i for i, described in enumerate(infos) if described.build is None]
    for i in finished:
        for j in finished:
            if i != j and (num := len(shared_samples(stores[i], stores[j]))):
                found[i][str(infos[j].path)] = num
    return found


def _show_infos(infos: list[StoreInfo]) -> None:
    from ups_store.info_text import one_store, several_stores

    output = results()
    if len(infos) > 1:
        output.print(several_stores(infos))
    if len(infos) == 1 or is_verbose() or any(described.statistics for described in infos):
        for described in infos:
            for part in one_store(described, verbose=is_verbose()):
                output.print(part)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(info)
