"""The verb `info`: what stores hold, and whether they share samples."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ups_store
from ups_store.console import Verbose, is_verbose, log, print_json, progress_bar, results
from ups_store.errors import ConfigError, FormatError
from ups_store.read.open import open_store

if TYPE_CHECKING:
    from ups_store.check.info import StoreInfo
    from ups_store.packed.store import PackedStore


def info(
    paths: Annotated[list[Path], typer.Argument(help="stores, <task>_<split>.zarr.zip", metavar="PATH...")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per store and line")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="read all float arrays: range, mean, NaN")] = False,
    verbose: Verbose = 0,
) -> None:
    """Say what stores hold; warn if they share samples.

    Unfinished and packed stores are described too, but not compared.
    """
    stores = [_open(path) for path in paths]
    infos = [_describe(store, stats, quiet=as_json) for store in stores]
    shared = _shared(stores, infos)
    if as_json:
        for i, described in enumerate(infos):
            print_json({**described.to_json(), "shared_samples": shared[i]})
        return
    _show_infos(infos)
    for i, j in itertools.combinations(range(len(infos)), 2):
        if num := shared[i].get(str(infos[j].path)):
            pair = f"{num:,} of the {len(stores[i]):,} samples of {infos[i].path} are in {infos[j].path} too"
            log(pair, label="warning", style="yellow")


def _open(path: Path) -> ups_store.Store | PackedStore:
    try:
        return open_store(path, partial=True)
    except FormatError as error:
        if error.kind != "packed":
            raise
    from ups_store.packed.store import open_packed

    return open_packed(path)


def _describe(store: ups_store.Store | PackedStore, stats: bool, *, quiet: bool) -> StoreInfo:
    from ups_store.check.info import describe

    if isinstance(store, ups_store.Store):
        with progress_bar(f"reading {store.path.name}", total=store.nbytes, quiet=quiet or not stats) as bar:
            return describe(store, statistics=stats, progress=bar)
    from ups_store.check.info import describe_packed

    if stats:
        hint = "unpack it with `ups-store unpack`, or leave --stats out"
        raise ConfigError("--stats of a packed store", path=store.path, hint=hint)
    return describe_packed(store)


def _shared(stores: list[ups_store.Store | PackedStore], infos: list[StoreInfo]) -> list[dict[str, int]]:
    """For each store how many of its samples are in which other one; of finished mapped stores."""
    from ups_store.check.info import shared_samples

    found: list[dict[str, int]] = [{} for _ in stores]
    finished = {
        i: store
        for i, store in enumerate(stores)
        if isinstance(store, ups_store.Store) and infos[i].build is None
    }
    for i, left in finished.items():
        for j, right in finished.items():
            if i != j and (num := len(shared_samples(left, right))):
                found[i][str(infos[j].path)] = num
    return found


def _show_infos(infos: list[StoreInfo]) -> None:
    from ups_store.verbs.info_text import one_store, several_stores

    output = results()
    if len(infos) > 1:
        output.print(several_stores(infos))
    if len(infos) == 1 or is_verbose() or any(described.statistics for described in infos):
        for described in infos:
            for part in one_store(described, verbose=is_verbose()):
                output.print(part)
