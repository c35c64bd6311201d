"""The verb `info`: what stores hold, one in full, several as a table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import ups_store
from ups_store.check.info import ArrayInfo, BuildInfo, PackedInfo, StoreInfo
from ups_store.check.statistics import ArrayStatistics
from ups_store.command_line import reading_urls
from ups_store.console import (
    format_age,
    format_nbytes,
    is_verbose,
    print_json,
    progress_bar,
    results,
)
from ups_store.printable import counted, one_line
from ups_store.read.open import open_any
from ups_store.system.paths import partition_of

_SHORT_HASH = 12


@reading_urls("paths")
def info(
    paths: Annotated[
        list[Path], typer.Argument(help="stores, <task>_<split>.zarr.zip, or their URLs", metavar="PATH...")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per store and line")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="read all float arrays: range, mean, NaN")] = False,
) -> None:
    """Say what stores hold; unfinished and packed ones and patterns of partitions, too."""
    stores = [open_any(path, partial=True) for path in paths]
    infos = [_describe(store, stats, quiet=as_json) for store in stores]
    if as_json:
        for described in infos:
            print_json(described.to_json())
        return
    _show_infos(infos)


def _describe(store: ups_store.AnyStore, stats: bool, *, quiet: bool) -> StoreInfo:
    from ups_store.check.info import describe

    with progress_bar(f"reading {store.path.name}", total=store.nbytes, quiet=quiet or not stats) as bar:
        return describe(store, statistics=stats, progress=bar)


def _show_infos(infos: list[StoreInfo]) -> None:
    output = results()
    if len(infos) > 1:
        output.print(several_stores(infos))
    if len(infos) == 1 or is_verbose() or any(described.statistics for described in infos):
        for described in infos:
            for part in one_store(described, verbose=is_verbose()):
                output.print(part)


def one_store(info: StoreInfo, *, verbose: bool = False) -> Iterator[RenderableType]:
    """Everything about one store.

    Args:
        info: The store.
        verbose: Whether to show the attributes of arrays and the identity document.
    """
    yield Text(one_line(str(info.path)), style="bold")
    size = format_nbytes(info.nbytes)
    samples = counted(info.num_samples, "sample")
    yield f"format {info.format_version} · {samples} · {size} · {_state(info)}"
    yield f"config hash {info.config_hash}"
    where = f", for it lies on {info.network}" if info.network and info.reads != "remote" else ""
    yield f"reads: {info.reads}{where}"
    yield ""
    yield _arrays(info)
    if info.statistics is not None:
        yield ""
        yield _statistics(info.statistics)
    attrs = {name: array.attrs for name, array in info.arrays.items() if array.attrs} if verbose else {}
    for heading, document in (
        ("attributes", info.attrs),
        ("array attributes", attrs),
        ("identity", info.identity),
        ("identity document", info.identity_document if verbose else {}),
    ):
        if document:
            yield ""
            yield Text(heading, style="bold")
            yield indent(_pretty(document), "  ")


def several_stores(infos: Sequence[StoreInfo]) -> Table:
    """A line for each store."""
    table = _table("store", "samples", "size", "arrays", "config hash", "state", right=("samples", "size"))
    for info in infos:
        arrays = ", ".join(f"{name} {_shape(array.shape[1:])}" for name, array in info.arrays.items())
        size, config_hash = format_nbytes(info.nbytes), info.config_hash[:_SHORT_HASH]
        path, num_samples = one_line(str(info.path)), f"{info.num_samples:,}"
        table.add_row(path, num_samples, size, arrays, config_hash, _state(info))
    return table


def _state(info: StoreInfo) -> str:
    age = format_age(time.time() - info.modified_s)
    if info.build is None:
        packed = _packing(info.packed) if info.packed else ""
        noun = "partition" if partition_of(info.partitions[0] if info.partitions else "") else "store"
        partitions = f"{counted(len(info.partitions), noun)} · " if info.partitions else ""
        return f"{partitions}{packed}written {age} · {info.resident_share:.0%} in RAM"
    return f"{_build(info.build, info.num_samples)} · last written {age}"


def _packing(packed: PackedInfo) -> str:
    nbytes = format_nbytes(packed.mapped_nbytes)
    level = "" if packed.level is None else f", level {packed.level}"
    return f"packed by {packed.codec}{level}, {nbytes} unpacked · "


def _build(build: BuildInfo, num_samples: int) -> str:
    which = f"{build.num_committed:,} of {num_samples:,} samples" if build.is_counted else ""
    which = which or f"{counted(build.num_committed, 'sample')} of an unknown number"
    text = f"unfinished: {which} committed"
    text += f", {build.durability}" if build.durability else ", only its renaming is left"
    if build.is_running:
        return f"{text} · being built by {one_line(build.owner or 'an unknown process')}"
    return f"{text} · no process builds it" + (f" (last {one_line(build.owner)})" if build.owner else "")


def _arrays(info: StoreInfo) -> Table:
    table = _table("array", "shape", "dtype", "dims", "per sample", "slot", right=("per sample", "slot"))
    for name, array in info.arrays.items():
        slot = format_nbytes(array.slot_nbytes) if array.slot_nbytes else "-"
        table.add_row(name, *_cells(array), format_nbytes(array.sample_nbytes), slot)
    for name, array in info.constants.items():
        table.add_row(name, *_cells(array), f"constant, {format_nbytes(array.sample_nbytes)}", "-")
    return table


def _cells(array: ArrayInfo) -> tuple[str, str, str]:
    return str(array.shape).replace("None", "*"), array.dtype, one_line(" ".join(array.dims))


def _statistics(statistics: Mapping[str, ArrayStatistics]) -> Table:
    table = _table("array", "min", "max", "mean", "NaN", "Inf", right=("min", "max", "mean", "NaN", "Inf"))
    for name, values in statistics.items():
        numbers = (_number(value) for value in (values.minimum, values.maximum, values.mean))
        counts = (Text(f"{n:,}", style="bold red" if n else "") for n in (values.num_nan, values.num_inf))
        table.add_row(name, *numbers, *counts)
    return table


def _table(*headings: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _shape(shape: tuple[int | None, ...]) -> str:
    return "×".join("*" if num is None else str(num) for num in shape) if shape else "scalar"


def _pretty(document: Mapping[str, Any]) -> str:
    """A line for each key; nested values as JSON."""
    lines = []
    for key, value in document.items():
        text = one_line(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(text) > 100:
            text = json.dumps(value, ensure_ascii=False, indent=2)
        lines.append(f"{one_line(key)}: {text}")
    return "\n".join(lines)
