"""Ragged arrays in batches: in which form they are given, and what there isn't for them (spec 14)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.format.ragged import LENGTHS
from ups_store.read.gather import TIME_DIM, WindowArguments, check_output

Form: TypeAlias = Literal["views", "padded"]


def check_form(
    form: object, names: Sequence[str], out: Mapping[str, Any] | None, *, path: Path
) -> dict[str, Any]:
    """Check how `gather` shall give ragged arrays, and the memory for them.

    Args:
        form: As given to `gather`.
        names: The ragged arrays that are asked for.
        out: As given to `gather`.
        path: For messages.
    Returns:
        What of `out` isn't theirs.
    Raises:
        SpecError: For a form that there isn't, and for memory that it has no use for.
    """
    if form not in ("views", "padded"):
        hint = "`ups_store.torch.gather_nested` gives nested tensors" if form == "nested" else None
        expected = "views or padded"
        raise SpecError("ragged", kind="argument", path=path, expected=expected, found=repr(form), hint=hint)
    given = out if isinstance(out, Mapping) else {}
    theirs = {*names, *(name + LENGTHS for name in names)}
    if form == "views" and theirs & given.keys():
        hint = 'views are not copied: leave `out` away, or say ragged="padded"'
        raise SpecError("out", kind="out", path=path, array=min(theirs & given.keys()), hint=hint)
    return {name: value for name, value in given.items() if name not in theirs}


def check_not_ragged(metas: Iterable[ArrayMeta], what: str, hint: str, *, path: Path) -> None:
    """Refuse what isn't there for ragged arrays; `what` names it.

    Raises:
        SpecError: Kind "ragged", names the array.
    """
    for meta in metas:
        if meta.is_ragged:
            problem = f"{what} isn't there for ragged arrays"
            raise SpecError(problem, kind="ragged", path=path, array=meta.name, clause="14.1", hint=hint)


def check_no_window(metas: Sequence[ArrayMeta], window: WindowArguments, *, path: Path) -> None:
    """Refuse windows over the time of ragged arrays; arrays without time are taken whole."""
    if not window.is_any:
        return
    for meta in metas:
        if TIME_DIM in meta.dims:
            problem = "windows over time aren't cut out of a ragged array"
            hint = "gather whole samples, which are views, and cut them"
            raise SpecError(problem, kind="unsupported", path=path, array=meta.name, hint=hint)


def in_form(form: Form, meta: ArrayMeta, views: list[Any], out: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `gather` gives of a ragged array whose samples are these."""
    if form == "views":
        return {meta.name: views}
    given, name = out or {}, meta.name
    values, lengths = padded(meta, views, given.get(name), given.get(name + LENGTHS))
    return {name: values, name + LENGTHS: lengths}


def padded(
    meta: ArrayMeta,
    views: Sequence[npt.NDArray[Any]],
    out: npt.NDArray[Any] | None = None,
    lengths: npt.NDArray[Any] | None = None,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Samples of a ragged array in one array, the rest of each row zeros.

    Args:
        meta: The array.
        views: Its samples, shape (rows, ...) each.
        out: Memory to write to, shape (B, L, ...), where no sample has more than L rows; converted to if it
            has another dtype. By default new memory, L that of the longest sample.
        lengths: Likewise for the numbers of rows, shape (B,), integers.
    Returns:
        The array and the numbers of rows.
    Raises:
        SpecError: If `out` or `lengths` can't take the batch.
    """
    sizes = np.array([len(view) for view in views], np.int64)
    longest = int(sizes.max(initial=0))
    if out is None:
        out = np.empty((len(views), longest, *meta.sample_shape), dtype_of(meta.dtype))
    else:
        room = out.shape[1] if isinstance(out, np.ndarray) and out.ndim > 1 else longest
        if room < longest:
            wrong = int(sizes.argmax())
            expected, found = f"room for {longest} rows", f"{room}"
            hint = "make its second axis longer, or leave `out` away"
            problem = f"out: item {wrong} doesn't fit"
            raise SpecError(problem, kind="out", array=meta.name, expected=expected, found=found, hint=hint)
        check_output(meta.name, dtype_of(meta.dtype), (len(views), room, *meta.sample_shape), out)
    for row, view, size in zip(out, views, sizes.tolist(), strict=True):
        row[:size] = view
        if size < len(row):
            row[size:] = 0
    if lengths is None:
        return out, sizes
    check_output(meta.name + LENGTHS, np.dtype(np.int64), (len(views),), lengths)
    lengths[...] = sizes
    return out, lengths
