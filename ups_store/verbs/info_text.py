"""How `info` tells people what a store is: one store in full, several as a table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import indent
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ups_store.check.info import ArrayInfo, BuildInfo, PackedInfo, StoreInfo
from ups_store.check.statistics import ArrayStatistics
from ups_store.console import counted, format_age, format_nbytes

_SHORT_HASH = 12


def one_store(info: StoreInfo, *, verbose: bool = False) -> Iterator[RenderableType]:
    """Everything about one store.

    Args:
        info: The store.
        verbose: Whether to show the attributes of arrays and the whole identity document.
    """
    yield Text(str(info.path), style="bold")
    size = format_nbytes(info.nbytes)
    samples = counted(info.num_samples, "sample")
    yield f"format {info.format_version} · {samples} · {size} · {_state(info)}"
    yield f"config hash {info.config_hash}"
    yield f"reads: {info.reads}" + (f", for it lies on {info.network}" if info.network else "")
    yield ""
    yield _arrays(info)
    if info.statistics is not None:
        yield ""
        yield _statistics(info.statistics)
    attrs = {name: array.attrs for name, array in info.arrays.items() if array.attrs} if verbose else {}
    identity = info.identity if verbose else info.identity.get("content", {})
    for heading, document in (
        ("attributes", info.attrs),
        ("array attributes", attrs),
        ("identity", identity),
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
        table.add_row(str(info.path), f"{info.num_samples:,}", size, arrays, config_hash, _state(info))
    return table


def _state(info: StoreInfo) -> str:
    age = format_age(time.time() - info.modified_s)
    if info.build is None:
        packed = _packing(info) if isinstance(info, PackedInfo) else ""
        return f"{packed}written {age} · {info.resident_share:.0%} in RAM"
    return f"{_build(info.build, info.num_samples)} · last written {age}"


def _packing(info: PackedInfo) -> str:
    return f"packed by {info.codec}, level {info.level}, {format_nbytes(info.mapped_nbytes)} unpacked · "


def _build(build: BuildInfo, num_samples: int) -> str:
    text = f"unfinished: {build.num_committed:,} of {num_samples:,} samples committed"
    text += f", {build.durability}" if build.durability else ", only its renaming is left"
    if build.is_running:
        return f"{text} · being built by {build.owner or 'an unknown process'}"
    return f"{text} · nobody builds it" + (f" (last {build.owner})" if build.owner else "")


def _arrays(info: StoreInfo) -> Table:
    table = _table("array", "shape", "dtype", "dims", "per sample", "slot", right=("per sample", "slot"))
    for name, array in info.arrays.items():
        slot = format_nbytes(array.slot_nbytes) if array.slot_nbytes else "-"
        table.add_row(name, *_cells(array), format_nbytes(array.sample_nbytes), slot)
    for name, array in info.constants.items():
        table.add_row(name, *_cells(array), f"constant, {format_nbytes(array.sample_nbytes)}", "-")
    return table


def _cells(array: ArrayInfo) -> tuple[str, str, str]:
    return str(array.shape), array.dtype, " ".join(array.dims)


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


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"


def _pretty(document: Mapping[str, Any]) -> str:
    """A line for each key; nested values as JSON."""
    lines = []
    for key, value in document.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(text) > 100:
            text = json.dumps(value, ensure_ascii=False, indent=2)
        lines.append(f"{key}: {text}")
    return "\n".join(lines)
