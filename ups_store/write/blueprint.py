"""`Blueprint`: everything that `create`'s arguments decide, checked; nothing is written (spec 4, 8)."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.layout import Layout, plan
from ups_store.format.metadata import (
    DTYPE_NAMES,
    MAX_ARRAYS,
    MAX_DIM_BYTES,
    MAX_ELEMENTS,
    MAX_EMPTY_SAMPLES,
    MAX_JSON_BYTES,
    MAX_METADATA_BYTES,
    MAX_RANK,
    SAMPLE_DIM,
    ArrayMeta,
    ArraySpec,
    check_name,
    companions_of,
    dtype_name,
    is_dim,
    row_flaw,
    too_many_empty,
)
from ups_store.format.ragged import LENGTHS, MAX_ROWS, companion_names, offsets_of
from ups_store.format.root import (
    FORMAT_VERSION,
    RootMeta,
    config_hash,
    constant_digest,
    identity_document,
    identity_flaw,
)
from ups_store.read.gather import int64_of
from ups_store.write.described import Described, described
from ups_store.write.encode import as_payload, check_unmasked

MAX_FILE_BYTES = 2**62 - 1  # lock bytes lie behind it (spec 6.3, 9.1)


@dataclass(frozen=True)
class Blueprint:
    """A store before it is built.

    Attributes:
        root: Metadata of the root group, identity included.
        documents: The `zarr.json` documents in file order.
        constants: C-order little-endian bytes of every constant, and of every ragged array's offsets, by
            the name of the array in the file: they are written before the first sample.
        layout: Geometry.
    """

    root: RootMeta
    documents: tuple[bytes, ...]
    constants: dict[str, bytes]
    layout: Layout


def blueprint_of(
    arrays: Mapping[str, ArraySpec],
    constants: Mapping[str, npt.ArrayLike],
    dims: Mapping[str, Sequence[str]],
    identity: Mapping[str, Any],
    attrs: Mapping[str, Any],
    partition: Sequence[int] | None = None,
) -> Blueprint:
    """Check the arguments of `create` and of `identity_of`, which have the same meaning here.

    Raises:
        SpecError: If no store can be made from them.
    """
    given = {"arrays": arrays, "constants": constants, "identity": identity, "attrs": attrs}
    for argument, mapping in given.items():
        _check_type(mapping, Mapping, "a mapping by name", argument=argument)
    metas, payloads = [], dict[str, bytes]()
    for name, spec in arrays.items():
        _check_type(spec, ArraySpec, "ups_store.ArraySpec(shape, dtype)", argument=f"arrays[{name!r}]")
        metas.append(_ragged_meta(name, spec) if spec.is_ragged else _array_meta(name, spec))
    for name, value in constants.items():
        check_unmasked(value, name)
        given = described(name, value)
        meta, payload = _constant(name, np.asarray(given), dims.get(name))
        meta = replace(meta, attrs=dict(given.attrs)) if isinstance(given, Described) else meta
        metas.append(meta)
        payloads[name] = payload
    digests = {name: constant_digest(payload) for name, payload in payloads.items()}
    for name, spec in arrays.items():
        if spec.is_ragged:
            offsets = offsets_of(_lengths(name, spec))
            payloads[companion_names(name)["offsets"]] = offsets.tobytes()
            metas += companions_of(next(m for m in metas if m.name == name), len(offsets) - 1)
            _check_reserved(name, [*arrays, *constants])
    metas.sort(key=lambda meta: meta.name)
    num_samples = _check_together(metas, arrays, constants, dims)
    users = [meta for meta in metas if not meta.is_companion]
    document = identity_document(users, digests, identity, partition)
    if partition is not None and identity_flaw(document):
        expected = "(number, number of partitions)"
        raise SpecError("partition", kind="partition", clause="8.1", expected=expected, found=partition)
    if "ups_store" in attrs:
        raise SpecError("attribute 'ups_store' is the format's own", kind="attrs", clause="4.3")
    requires = ("ragged",) if any(meta.is_ragged for meta in metas) else ()
    root = RootMeta(FORMAT_VERSION, config_hash(document), document, dict(attrs), requires)
    documents = (root.to_json(), *(meta.to_json() for meta in metas))
    sizes = [(meta, len(text)) for meta, text in zip(metas, documents[1:], strict=True)]
    layout = plan(len(documents[0]), sizes, num_samples)
    if max(map(len, documents)) > MAX_JSON_BYTES or layout.metadata[-1].end > MAX_METADATA_BYTES:
        expected = f"at most {MAX_JSON_BYTES} bytes, all together {MAX_METADATA_BYTES}"
        raise SpecError("a zarr.json would be too long", kind="limits", clause="9.1", expected=expected)
    if layout.building_nbytes > MAX_FILE_BYTES:
        found = layout.building_nbytes
        raise SpecError("the file would be too long", kind="limits", expected=MAX_FILE_BYTES, found=found)
    return Blueprint(root, documents, payloads, layout)


def _check_type(value: object, wanted: type, expected: str, *, argument: str) -> None:
    if not isinstance(value, wanted):
        raise SpecError(f"argument {argument}", kind="argument", expected=expected, found=repr(value))


def _ragged_meta(name: str, spec: ArraySpec) -> ArrayMeta:
    """Metadata of the array that holds the rows (spec 14.2)."""
    if spec.encoding not in (None, "utf-8", "bytes"):
        expected, found = "'utf-8', 'bytes' or None", repr(spec.encoding)
        raise SpecError("encoding", kind="encoding", array=name, expected=expected, found=found)
    lengths = _lengths(name, spec)
    plain = replace(spec, shape=(len(lengths), 1, *spec.shape[2:]), lengths=None, encoding=None)
    given = _array_meta(name, plain)
    shape = (int(lengths.sum()), *given.shape[2:])
    rows = replace(given, shape=shape, dims=given.dims[1:], part="rows", encoding=spec.encoding)
    flaw = row_flaw(rows)
    if flaw is not None:
        found = f"{rows.dtype} {rows.shape} {rows.dims}"
        raise SpecError("ragged array", kind="ragged", clause="14.1", array=name, expected=flaw, found=found)
    return rows


def _lengths(name: str, spec: ArraySpec) -> npt.NDArray[np.int64]:
    """Numbers of rows of a ragged array's samples, checked."""
    num_samples = spec.shape[0]
    check_unmasked(spec.lengths, name)
    try:
        lengths = None if spec.lengths is None else int64_of(spec.lengths)
    except ValueError:  # lists within lists
        lengths = None
    if lengths is None or lengths.ndim != 1 or num_samples not in (None, len(lengths)):
        expected = f"a whole number of rows per sample, {'N' if num_samples is None else num_samples} in all"
        found = reprlib.repr(spec.lengths) if lengths is None else f"shape {lengths.shape}"
        hint = "where they aren't known yet, write with `ups_store.write`"
        raise SpecError("lengths", kind="lengths", array=name, expected=expected, found=found, hint=hint)
    if (lengths < 0).any():
        raise SpecError(
            "lengths",
            kind="lengths",
            array=name,
            sample=int((lengths < 0).argmax()),
            expected="0 rows or more",
            found=int(lengths[lengths < 0][0]),
        )
    if lengths.sum(dtype=float) > MAX_ROWS:  # as an integer it might wrap around
        expected = f"at most {MAX_ROWS} rows in all"
        raise SpecError("lengths", kind="lengths", clause="9.1", array=name, expected=expected)
    return lengths


def _check_reserved(name: str, names: Iterable[str]) -> None:
    taken = sorted({*companion_names(name).values(), name + LENGTHS} & set(names))
    if taken:
        raise SpecError(
            "array name",
            kind="name",
            clause="14.1",
            array=taken[0],
            expected=f"another name: it belongs to the ragged array {name!r}",
        )


def _array_meta(name: str, spec: ArraySpec) -> ArrayMeta:
    if spec.attrs and "ups_store" in spec.attrs:
        raise SpecError("attribute 'ups_store' is the format's own", kind="attrs", clause="4.4", array=name)
    if not spec.is_ragged and (spec.lengths is not None or spec.encoding is not None):
        expected = "None as the second axis of `shape`, or neither lengths nor encoding"
        raise SpecError("shape", kind="shape", array=name, expected=expected, found=tuple(spec.shape))
    shape = _shape(name, spec.shape)
    defaults = (SAMPLE_DIM, *(f"{name}_dim_{i}" for i in range(1, len(shape))))
    dims = tuple(spec.dims) if spec.dims is not None else defaults
    if not shape or min(shape) < 0 or len(shape) > MAX_RANK or not _num_elements_ok(shape):
        expected = f"1 to {MAX_RANK} axes, N first, fewer than {MAX_ELEMENTS} elements"
        raise SpecError("shape", kind="shape", array=name, expected=expected, found=shape)
    if len(dims) != len(shape) or dims[0] != SAMPLE_DIM or SAMPLE_DIM in dims[1:]:
        expected = f"{len(shape)} names, the first and no other {SAMPLE_DIM!r}"
        raise SpecError("dims", kind="dims", clause="4.5", array=name, expected=expected, found=dims)
    return ArrayMeta(check_name(name), shape, _dtype_name(name, spec.dtype), dims, dict(spec.attrs or {}))


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(n) for n in shape)
    except TypeError as error:
        expected = "a sequence of integers"
        raise SpecError("shape", kind="shape", array=name, expected=expected, found=shape) from error


def _dtype_name(name: str, dtype: Any) -> str:
    try:
        return dtype_name(dtype)
    except (TypeError, SpecError) as error:
        expected = f"one of {', '.join(DTYPE_NAMES)}"
        raise SpecError(
            "unsupported dtype", kind="dtype", array=name, expected=expected, found=dtype
        ) from error


def _constant(name: str, value: npt.NDArray[Any], dims: Sequence[str] | None) -> tuple[ArrayMeta, bytes]:
    defaults = (name,) if value.ndim == 1 else tuple(f"{name}_dim_{i}" for i in range(value.ndim))
    names = tuple(dims) if dims is not None else defaults
    if len(names) != value.ndim or SAMPLE_DIM in names:
        expected = f"{value.ndim} names other than {SAMPLE_DIM!r}"
        raise SpecError("dims", kind="dims", clause="4.5", array=name, expected=expected, found=names)
    meta = ArrayMeta(check_name(name), value.shape, _dtype_name(name, value.dtype), names)
    return meta, as_payload(value, meta, value.shape).tobytes()


def _check_together(
    metas: list[ArrayMeta], arrays: Iterable[str], constants: Iterable[str], dims: Iterable[str]
) -> int:
    """Check what arrays must have in common; returns N."""
    twice, unknown = set(arrays) & set(constants), set(dims) - set(constants)
    if len(metas) > MAX_ARRAYS:
        raise SpecError(
            "too many arrays",
            kind="limits",
            clause="9.1",
            expected=f"at most {MAX_ARRAYS}",
            found=len(metas),
        )
    if twice or unknown:
        found = f"both: {sorted(twice)}, dims of no constant: {sorted(unknown)}"
        raise SpecError("array names", kind="arrays", expected="names of arrays or constants", found=found)
    lengths: dict[str, tuple[int, str]] = {}
    for meta in metas:
        if len(set(meta.dims)) < len(meta.dims) or not all(map(is_dim, meta.dims)):
            expected = f"distinct names of 1 to {MAX_DIM_BYTES} bytes without control characters"
            found = reprlib.repr(meta.dims)
            raise SpecError(
                "dims", kind="dims", clause="4.5", array=meta.name, expected=expected, found=found
            )
        for dim, length in zip(meta.dims, meta.shape, strict=True):
            other = lengths.setdefault(dim, (length, meta.name))
            if other[0] != length:
                raise SpecError(
                    f"dimension {dim!r}",
                    kind="dims",
                    clause="4.5",
                    array=meta.name,
                    expected=f"length {other[0]}, as in array {other[1]!r}",
                    found=length,
                    hint="give it another name",
                )
    num_samples = lengths[SAMPLE_DIM][0] if SAMPLE_DIM in lengths else 0
    if too_many_empty(metas, num_samples):
        expected = f"at most {MAX_EMPTY_SAMPLES} where no array has bytes for a sample"
        raise SpecError("shape", kind="limits", clause="9.1", expected=expected, found=num_samples)
    return num_samples


def _num_elements_ok(shape: tuple[int, ...]) -> bool:
    return math.prod(max(1, n) for n in shape) < MAX_ELEMENTS
