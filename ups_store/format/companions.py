"""The arrays that belong to a ragged one: their metadata, and how a file's are recognised; pure (spec 14)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ups_store.errors import FormatError
from ups_store.format.metadata import SAMPLE_DIM, ArrayMeta
from ups_store.format.ragged import companion_names


def companions_of(rows: ArrayMeta, num_samples: int) -> tuple[ArrayMeta, ArrayMeta]:
    """Metadata of the offsets and of the checksums of a ragged array with `num_samples` samples."""
    names = companion_names(rows.name)
    offsets, checks = names["offsets"], names["crc32c"]
    return (
        ArrayMeta(offsets, (num_samples + 1,), "int64", (offsets,), part="offsets"),
        ArrayMeta(checks, (num_samples,), "uint32", (SAMPLE_DIM,), part="crc32c"),
    )


def names_in_file(arrays: Mapping[str, Any]) -> list[str]:
    """Names of the arrays of a file whose identity names `arrays`, with those of ragged ones (spec 14.3)."""
    names = set(arrays)
    for name, array in arrays.items():
        shape = array.get("shape") if isinstance(array, dict) else None
        if isinstance(shape, list) and shape and shape[0] is None:
            names |= {*companion_names(name).values()}
    return sorted(names)


def recognised(metas: Sequence[ArrayMeta], *, path: object) -> list[ArrayMeta]:
    """The arrays of a file with the companions of ragged ones marked as such, in their order.

    Raises:
        FormatError: If a ragged array isn't as spec 14.1 says.
    """
    found = {meta.name: meta for meta in metas}
    for rows in metas:
        if rows.is_ragged:
            found |= {meta.name: meta for meta in _companions_among(found, rows, path)}
    return list(found.values())


def _companions_among(found: dict[str, ArrayMeta], rows: ArrayMeta, path: object) -> Iterator[ArrayMeta]:
    def bad(expected: str, value: object) -> FormatError:
        return FormatError(
            "ragged array",
            path=path,
            array=rows.name,
            kind="ragged",
            clause="14.1",
            expected=expected,
            found=value,
            hint="its metadata was edited or written by another program: rebuild it",
        )

    checks = found.get(companion_names(rows.name)["crc32c"])
    num_samples = checks.shape[0] if checks is not None and checks.shape else 0
    for wanted in companions_of(rows, num_samples):
        there = found.get(wanted.name)
        if there is None or replace(there, part=wanted.part) != wanted:
            shown = "none" if there is None else f"{there.dtype} {there.shape} {there.dims} {there.attrs}"
            raise bad(f"{wanted.name!r}: {wanted.dtype} {wanted.shape} {wanted.dims}", shown)
        yield wanted
