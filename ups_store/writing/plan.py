"""`Plan`: everything that `create`'s arguments decide, checked; nothing is written (spec 4, 8)."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.checksum import crc32
from ups_store.format.layout import plan
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
from ups_store.format.ragged import LENGTHS, MAX_ROWS, Offsets, companion_names, offsets_of
from ups_store.format.root import (
    FORMAT_VERSION,
    RootMeta,
    config_hash,
    constant_digest,
    identity_document,
    identity_flaw,
)
from ups_store.read.catalog import Catalog
from ups_store.read.gather import int64_of
from ups_store.writing.described import Described, described
from ups_store.writing.encode import as_payload, check_unmasked

MAX_FILE_BYTES = 2**62 - 1  # lock bytes lie behind it (spec 6.3, 9.1)


@dataclass(frozen=True)
class Plan(Catalog):
    """The catalog of a store that is going to be built, with the bytes that are written before any sample."""

    documents: tuple[bytes, ...]  # `zarr.json` texts in file order
    constants: dict[str, bytes]  # of constants, and of the offsets of ragged arrays, by name in the file

    @property
    def offsets(self) -> dict[str, Offsets]:
        """Give of each ragged array the row at which each sample begins, shape (N + 1,)."""
        ragged = self.layout.ragged.items()
        return {name: np.frombuffer(self.constants[array.offsets.meta.name], "<i8") for name, array in ragged}


def plan_of(
    arrays: Mapping[str, ArraySpec],
    *,
    identity: Mapping[str, Any],
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    attrs: Mapping[str, Any] | None = None,
    partition: Sequence[int] | None = None,
) -> Plan:
    """Check the arguments of `create`, and plan the store that they make; `SpecError` if they make none."""
    constants, dims, attrs = constants or {}, dims or {}, attrs or {}
    mappings = {"arrays": arrays, "constants": constants, "identity": identity, "attrs": attrs}
    types: list[tuple[str, object, type, str]] = [
        *((name, value, Mapping, "a mapping by name") for name, value in mappings.items()),
        *(
            (f"arrays[{name!r}]", spec, ArraySpec, "ups_store.ArraySpec(shape, dtype)")
            for name, spec in (arrays.items() if isinstance(arrays, Mapping) else ())
        ),
    ]
    for argument, value, cls, expected in types:
        if not isinstance(value, cls):
            raise _wrong("argument", None, expected, repr(value), subject=f"argument {argument}")
    metas, payloads = [], dict[str, bytes]()
    for name, spec in arrays.items():
        metas.append(_ragged_meta(name, spec) if spec.is_ragged else _array_meta(name, spec))
    for name, value in constants.items():
        check_unmasked(value, name)
        constant = described(name, value)
        array = np.asarray(constant)
        axes = (name,) if array.ndim == 1 else tuple(f"{name}_dim_{i}" for i in range(array.ndim))
        axes = tuple(dims[name]) if dims.get(name) is not None else axes
        if len(axes) != array.ndim or SAMPLE_DIM in axes:
            raise _wrong("dims", name, f"{array.ndim} names other than {SAMPLE_DIM!r}", axes)
        more = dict(constant.attrs) if isinstance(constant, Described) else {}
        meta = ArrayMeta(check_name(name), array.shape, _dtype_name(name, array.dtype), axes, more)
        payloads[name] = as_payload(array, meta, array.shape).tobytes()
        metas.append(meta)
    digests = {name: constant_digest(payload) for name, payload in payloads.items()}
    for name in [name for name, spec in arrays.items() if spec.is_ragged]:
        offsets = offsets_of(_lengths(name, arrays[name]))
        payloads[companion_names(name)["offsets"]] = offsets.tobytes()
        metas += companions_of(next(m for m in metas if m.name == name), len(offsets) - 1)
        taken = sorted({*companion_names(name).values(), name + LENGTHS} & {*arrays, *constants})
        if taken:
            expected = f"another name: it belongs to the ragged array {name!r}"
            raise _wrong("name", taken[0], expected, subject="array name")
    metas.sort(key=lambda meta: meta.name)
    if {*arrays} & {*constants} or {*dims} - {*constants}:
        both, unknown = sorted({*arrays} & {*constants}), sorted({*dims} - {*constants})
        mixed = f"both: {both}, dims of no constant: {unknown}"
        raise _wrong("arrays", None, "names of arrays or constants", mixed, subject="array names")
    num_samples = _check_together(metas)
    document = identity_document(
        [meta for meta in metas if not meta.is_companion], digests, identity, partition
    )
    if partition is not None and identity_flaw(document):
        raise _wrong("partition", None, "(number, number of partitions)", partition)
    if "ups_store" in attrs:
        raise SpecError(_RESERVED, kind="attrs", clause="4.3")
    requires = ("ragged",) if any(meta.is_ragged for meta in metas) else ()
    root = RootMeta(FORMAT_VERSION, config_hash(document), document, dict(attrs), requires)
    documents = (root.to_json(), *(meta.to_json() for meta in metas))
    sizes = [(meta, len(text)) for meta, text in zip(metas, documents[1:], strict=True)]
    layout = plan(len(documents[0]), sizes, num_samples)
    if max(map(len, documents)) > MAX_JSON_BYTES or layout.metadata[-1].end > MAX_METADATA_BYTES:
        expected = f"at most {MAX_JSON_BYTES} bytes, all together {MAX_METADATA_BYTES}"
        raise _wrong("limits", None, expected, subject="a zarr.json would be too long")
    if layout.building_nbytes > MAX_FILE_BYTES:
        nbytes, problem = layout.building_nbytes, "the file would be too long"
        raise _wrong("limits", None, MAX_FILE_BYTES, nbytes, subject=problem)
    return Plan(root, layout, tuple(map(crc32, documents)), documents, payloads)


def identity_of(
    arrays: Mapping[str, ArraySpec],
    *,
    identity: Mapping[str, Any],
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    partition: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Make the identity document that `create` would give a store (spec 8.1)."""
    plan = plan_of(arrays, identity=identity, constants=constants, dims=dims, partition=partition)
    return plan.root.identity


_RESERVED = "attribute 'ups_store' is the format's own"
_CLAUSES = {"dims": "4.5", "partition": "8.1", "limits": "9.1", "name": "14.1", "ragged": "14.1"}


def _wrong(
    kind: str, array: str | None, expected: object, found: object = None, *, subject: str = "", **details: Any
) -> SpecError:
    """Make the error for an argument; its kind says what it is about, and by which clause."""
    details |= {"array": array, "expected": expected, "found": found}
    return SpecError(subject or kind, kind=kind, clause=_CLAUSES.get(kind), **details)


def _array_meta(name: str, spec: ArraySpec) -> ArrayMeta:
    if spec.attrs and "ups_store" in spec.attrs:
        raise SpecError(_RESERVED, kind="attrs", clause="4.4", array=name)
    if not spec.is_ragged and (spec.lengths is not None or spec.encoding is not None):
        expected = "None as the second axis of `shape`, or neither lengths nor encoding"
        raise _wrong("shape", name, expected, tuple(spec.shape))
    try:
        shape = tuple(operator.index(n) for n in spec.shape)
    except TypeError as error:
        raise _wrong("shape", name, "a sequence of integers", spec.shape) from error
    defaults = (SAMPLE_DIM, *(f"{name}_dim_{i}" for i in range(1, len(shape))))
    dims = tuple(spec.dims) if spec.dims is not None else defaults
    num_elements = math.prod(max(1, n) for n in shape)
    if not shape or min(shape) < 0 or len(shape) > MAX_RANK or num_elements >= MAX_ELEMENTS:
        expected = f"1 to {MAX_RANK} axes, N first, fewer than {MAX_ELEMENTS} elements"
        raise _wrong("shape", name, expected, shape)
    if len(dims) != len(shape) or dims[0] != SAMPLE_DIM or SAMPLE_DIM in dims[1:]:
        raise _wrong("dims", name, f"{len(shape)} names, the first and no other {SAMPLE_DIM!r}", dims)
    return ArrayMeta(check_name(name), shape, _dtype_name(name, spec.dtype), dims, dict(spec.attrs or {}))


def _ragged_meta(name: str, spec: ArraySpec) -> ArrayMeta:
    """Make the metadata of the array that holds the rows (spec 14.2)."""
    if spec.encoding not in (None, "utf-8", "bytes"):
        raise _wrong("encoding", name, "'utf-8', 'bytes' or None", repr(spec.encoding))
    lengths = _lengths(name, spec)
    plain = replace(spec, shape=(len(lengths), 1, *spec.shape[2:]), lengths=None, encoding=None)
    meta = _array_meta(name, plain)
    shape = (int(lengths.sum()), *meta.shape[2:])
    rows = replace(meta, shape=shape, dims=meta.dims[1:], part="rows", encoding=spec.encoding)
    if (flaw := row_flaw(rows)) is not None:
        geometry = f"{rows.dtype} {rows.shape} {rows.dims}"
        raise _wrong("ragged", name, flaw, geometry, subject="ragged array")
    return rows


def _lengths(name: str, spec: ArraySpec) -> npt.NDArray[np.int64]:
    """Check the numbers of rows of a ragged array's samples."""
    num_samples = spec.shape[0]
    check_unmasked(spec.lengths, name)
    try:
        lengths = None if spec.lengths is None else int64_of(spec.lengths)
    except ValueError:  # lists within lists
        lengths = None
    if lengths is None or lengths.ndim != 1 or num_samples not in (None, len(lengths)):
        expected = f"a whole number of rows per sample, {'N' if num_samples is None else num_samples} in all"
        lengths_text = reprlib.repr(spec.lengths) if lengths is None else f"shape {lengths.shape}"
        hint = "where they aren't known yet, write with `ups_store.write`"
        raise _wrong("lengths", name, expected, lengths_text, hint=hint)
    for sample in np.flatnonzero(lengths < 0)[:1].tolist():
        raise _wrong("lengths", name, "0 rows or more", int(lengths[sample]), sample=sample)
    if lengths.sum(dtype=float) > MAX_ROWS:  # as an integer it might wrap around
        expected = f"at most {MAX_ROWS} rows in all"
        raise SpecError("lengths", kind="lengths", clause="9.1", array=name, expected=expected)
    return lengths


def _dtype_name(name: str, dtype: Any) -> str:
    try:
        return dtype_name(dtype)
    except (TypeError, SpecError) as error:
        expected = f"one of {', '.join(DTYPE_NAMES)}"
        raise _wrong("dtype", name, expected, dtype, subject="unsupported dtype") from error


def _check_together(metas: list[ArrayMeta]) -> int:
    """Check what arrays must have in common; returns N."""
    if len(metas) > MAX_ARRAYS:
        raise _wrong("limits", None, f"at most {MAX_ARRAYS}", len(metas), subject="too many arrays")
    lengths: dict[str, tuple[int, str]] = {}
    for meta in metas:
        if len(set(meta.dims)) < len(meta.dims) or not all(map(is_dim, meta.dims)):
            expected = f"distinct names of 1 to {MAX_DIM_BYTES} bytes without control characters"
            raise _wrong("dims", meta.name, expected, reprlib.repr(meta.dims))
        for dim, length in zip(meta.dims, meta.shape, strict=True):
            known, array = lengths.setdefault(dim, (length, meta.name))
            if known != length:
                expected, hint = f"length {known}, as in array {array!r}", "give it another name"
                raise _wrong("dims", meta.name, expected, length, subject=f"dimension {dim!r}", hint=hint)
    num_samples = lengths[SAMPLE_DIM][0] if SAMPLE_DIM in lengths else 0
    if too_many_empty(metas, num_samples):
        expected = f"at most {MAX_EMPTY_SAMPLES} where no array has bytes for a sample"
        raise _wrong("limits", None, expected, num_samples, subject="shape")
    return num_samples
