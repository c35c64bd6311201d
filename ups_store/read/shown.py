"""How a store is shown: `repr` for a terminal, a table for notebooks. What comes from a file is escaped."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from ups_store.format.metadata import SAMPLE_DIM, ArrayMeta
from ups_store.printable import one_line

MAX_ROWS = 20  # arrays that are shown; there may be thousands
_MAX_TEXT = 160  # characters of the identity


def text_of(title: str, metas: Iterable[ArrayMeta], identity: Mapping[str, Any]) -> str:
    """Several lines: what it is, a line for each array, and what it was made from."""
    rows, more = _rows(metas)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"<{one_line(title)}>"]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"    {'  '.join(cells)}".rstrip())
    return "\n".join([*lines, *(f"    {line}" for line in more), *_ends(identity)])


def html_of(title: str, metas: Iterable[ArrayMeta], identity: Mapping[str, Any]) -> str:
    """The same as HTML, without scripts and styles."""
    rows, more = _rows(metas)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    rest = "".join(f"<div>{escape(line)}</div>" for line in [*more, *_ends(identity)])
    head = "<tr><th>array</th><th>axes</th><th>dtype</th><th></th></tr>"
    return f"<div><b>{escape(one_line(title))}</b><table>{head}{table}</table>{rest}</div>"


def _rows(metas: Iterable[ArrayMeta]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Of each array that is shown its name, axes and dtype; and what is said of the others."""
    ordered = sorted(metas, key=lambda meta: meta.is_constant)
    rows: list[tuple[str, ...]] = [
        (meta.name, _axes(meta), meta.dtype, "constant" if meta.is_constant else "")
        for meta in ordered[:MAX_ROWS]
    ]
    more = len(ordered) - len(rows)
    return rows, [f"and {more:,} more: `store.arrays` and `store.constants` have all"] if more else []


def _axes(meta: ArrayMeta) -> str:
    axes = [f"{one_line(dim)}: {length:,}" for dim, length in zip(meta.dims, meta.shape, strict=True)]
    if meta.is_ragged:
        axes = [SAMPLE_DIM, f"{axes[0]} in all", *axes[1:]]
    return f"({', '.join(axes)})"


def _ends(identity: Mapping[str, Any]) -> list[str]:
    text = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in identity.items())
    text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return [f"Identity: {one_line(text)}"] if text else []
