"""`save` and `load`: arrays by name in one line each, as `numpy.savez` and `load`, but mapped and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ups_store.read.open import open_any
from ups_store.write.found_store import check_left, is_of_values, is_unnamed
from ups_store.write.from_iterable import target_of, write


def save(
    path: str | os.PathLike[str],
    /,
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    attrs: Mapping[str, Any] | None = None,
    **arrays: Any,
) -> Path:
    """Write arrays whose first axis is the sample; what is there is replaced once the new store is whole.

    Nothing happens if the store that is there holds the same values already.

    Args:
        path: Where, usually `NAME.zarr.zip`.
        constants: Arrays without a sample axis, such as coordinates.
        attrs: Attributes of the root group.
        arrays: Arrays or tensors by name, all of the same number of samples; lists of `str`, of `bytes`, or
            of arrays whose first axes differ in length become ragged.
    Returns:
        Absolute path of the store.
    Raises:
        SpecError: If an array has another number of samples, or can't be stored.
        IdentityMismatchError: If an interrupted call that named its samples, by `identity`, left some here.
        DiskFullError: If there is no room.
    """
    hint = "finish that call, or remove them with `ups-store gc --delete`"
    check_left(
        target_of(path), None, gives_way=lambda each: is_unnamed(each) or is_of_values(each), hint=hint
    )
    with write(path, arrays, constants=constants, attrs=attrs, on_mismatch="restart") as store:
        return store.path


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All arrays and constants of a store by name: read-only views of the mapped file, nothing is read yet.

    A ragged array is a `RaggedArray`, whose samples are `[i]`. `ups_store.open` gives the store itself, which
    knows its identity and batches.

    Raises:
        StoreNotFoundError: If there is no store.
        FormatError: If it isn't one.
        SpecError: If its samples are no single arrays: packed, or in partitions; kind "unsupported".
    """
    store = open_any(path)  # the views keep the mapping
    return {name: store[name] for name in store.metas}
