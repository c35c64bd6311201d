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
from ups_store.write.described import Described, described
from ups_store.write.encode import as_payload, check_unmasked

MAX_FILE_BYTES = 2**62 - 1  # lock bytes lie behind it (spec 6.3, 9.1)


@dataclass(frozen=True)
class Plan(Catalog):
    """The catalog of a store that is going to be built, with the bytes that are written before any sample."""

    documents: tuple[bytes, ...]  # `zarr.json` texts in file order
    constants: dict[str, bytes]  # of constants, and of the offsets of ragged arrays, by name in the file

    @property
    def offsets(self) -> dict[str, Offsets]:
        """Of each ragged array, the row at which each sample begins, shape (N + 1,)."""
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
    given = {"arrays": arrays, "constants": constants, "identity": identity, "attrs": attrs}
    for argument, mapping in given.items():
        _check_type(mapping, Mapping, "a mapping by name", argument=argument)
    metas, payloads = [], dict[str, bytes]()
    for name, spec in arrays.items():
        _check_type(spec, ArraySpec, "ups_store.ArraySpec(shape, dtype)", argument=f"arrays[{name!r}]")
        metas.append(_ragged_meta(name, spec) if spec.is_ragged else _array_meta(name, spec))
    for name, value in constants.items():
        check_unmasked(value, name)
        meta, payloads[name] = _constant(name, described(name, value), dims.get(name))
        metas.append(meta)
    digests = {name: constant_digest(payload) for name, payload in payloads.items()}
    for name in [name for name, spec in arrays.items() if spec.is_ragged]:
        offsets = offsets_of(_lengths(name, arrays[name]))
        payloads[companion_names(name)["offsets"]] = offsets.tobytes()
        metas += companions_of(next(m for m in metas if m.name == name), len(offsets) - 1)
        taken = sorted({*companion_names(name).values(), name + LENGTHS} & {*arrays, *constants})
        if taken:
            expected = f"another name: it belongs to the ragged array {name!r}"
            raise SpecError("array name", kind="name", clause="14.1", array=taken[0], expected=expected)
    metas.sort(key=lambda meta: meta.name)
    if {*arrays} & {*constants} or {*dims} - {*constants}:
        both, unknown = sorted({*arrays} & {*constants}), sorted({*dims} - {*constants})
        found = f"both: {both}, dims of no constant: {unknown}"
        raise SpecError("array names", kind="arrays", expected="names of arrays or constants", found=found)
    num_samples = _check_together(metas)
    document = identity_document(
        [meta for meta in metas if not meta.is_companion], digests, identity, partition
    )
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
        nbytes = layout.building_nbytes
        raise SpecError("the file would be too long", kind="limits", expected=MAX_FILE_BYTES, found=nbytes)
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


def _check_type(value: object, wanted: type, expected: str, *, argument: str) -> None:
    if not isinstance(value, wanted):
        raise SpecError(f"argument {argument}", kind="argument", expected=expected, found=repr(value))


def _array_meta(name: str, spec: ArraySpec) -> ArrayMeta:
    if spec.attrs and "ups_store" in spec.attrs:
        raise SpecError("attribute 'ups_store' is the format's own", kind="attrs", clause="4.4", array=name)
    if not spec.is_ragged and (spec.lengths is not None or spec.encoding is not None):
        expected = "None as the second axis of `shape`, or neither lengths nor encoding"
        raise SpecError("shape", kind="shape", array=name, expected=expected, found=tuple(spec.shape))
    try:
        shape = tuple(operator.index(n) for n in spec.shape)
    except TypeError as error:
        expected = "a sequence of integers"
        raise SpecError("shape", kind="shape", array=name, expected=expected, found=spec.shape) from error
    defaults = (SAMPLE_DIM, *(f"{name}_dim_{i}" for i in range(1, len(shape))))
    dims = tuple(spec.dims) if spec.dims is not None else defaults
    num_elements = math.prod(max(1, n) for n in shape)
    if not shape or min(shape) < 0 or len(shape) > MAX_RANK or num_elements >= MAX_ELEMENTS:
        expected = f"1 to {MAX_RANK} axes, N first, fewer than {MAX_ELEMENTS} elements"
        raise SpecError("shape", kind="shape", array=name, expected=expected, found=shape)
    if len(dims) != len(shape) or dims[0] != SAMPLE_DIM or SAMPLE_DIM in dims[1:]:
        expected = f"{len(shape)} names, the first and no other {SAMPLE_DIM!r}"
        raise SpecError("dims", kind="dims", clause="4.5", array=name, expected=expected, found=dims)
    return ArrayMeta(check_name(name), shape, _dtype_name(name, spec.dtype), dims, dict(spec.attrs or {}))


def _ragged_meta(name: str, spec: ArraySpec) -> ArrayMeta:
    """Metadata of the array that holds the rows (spec 14.2)."""
    if spec.encoding not in (None, "utf-8", "bytes"):
        expected, found = "'utf-8', 'bytes' or None", repr(spec.encoding)
        raise SpecError("encoding", kind="encoding", array=name, expected=expected, found=found)
    lengths = _lengths(name, spec)
    plain = replace(spec, shape=(len(lengths), 1, *spec.shape[2:]), lengths=None, encoding=None)
    meta = _array_meta(name, plain)
    shape = (int(lengths.sum()), *meta.shape[2:])
    rows = replace(meta, shape=shape, dims=meta.dims[1:], part="rows", encoding=spec.encoding)
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
    for sample in np.flatnonzero(lengths < 0)[:1].tolist():
        raise SpecError(
            "lengths",
            kind="lengths",
            array=name,
            sample=sample,
            expected="0 rows or more",
            found=int(lengths[sample]),
        )
    if lengths.sum(dtype=float) > MAX_ROWS:  # as an integer it might wrap around
        expected = f"at most {MAX_ROWS} rows in all"
        raise SpecError("lengths", kind="lengths", clause="9.1", array=name, expected=expected)
    return lengths


def _constant(name: str, value: Any, dims: Sequence[str] | None) -> tuple[ArrayMeta, bytes]:
    array = np.asarray(value)
    defaults = (name,) if array.ndim == 1 else tuple(f"{name}_dim_{i}" for i in range(array.ndim))
    names = tuple(dims) if dims is not None else defaults
    if len(names) != array.ndim or SAMPLE_DIM in names:
        expected = f"{array.ndim} names other than {SAMPLE_DIM!r}"
        raise SpecError("dims", kind="dims", clause="4.5", array=name, expected=expected, found=names)
    attrs = dict(value.attrs) if isinstance(value, Described) else {}
    meta = ArrayMeta(check_name(name), array.shape, _dtype_name(name, array.dtype), names, attrs)
    return meta, as_payload(array, meta, array.shape).tobytes()


def _dtype_name(name: str, dtype: Any) -> str:
    try:
        return dtype_name(dtype)
    except (TypeError, SpecError) as error:
        expected = f"one of {', '.join(DTYPE_NAMES)}"
        raise SpecError(
            "unsupported dtype", kind="dtype", array=name, expected=expected, found=dtype
        ) from error


def _check_together(metas: list[ArrayMeta]) -> int:
    """Check what arrays must have in common; returns N."""
    if len(metas) > MAX_ARRAYS:
        expected = f"at most {MAX_ARRAYS}"
        raise SpecError("too many arrays", kind="limits", clause="9.1", expected=expected, found=len(metas))
    lengths: dict[str, tuple[int, str]] = {}
    for meta in metas:
        if len(set(meta.dims)) < len(meta.dims) or not all(map(is_dim, meta.dims)):
            expected = f"distinct names of 1 to {MAX_DIM_BYTES} bytes without control characters"
            found = reprlib.repr(meta.dims)
            raise SpecError(
                "dims", kind="dims", clause="4.5", array=meta.name, expected=expected, found=found
            )
        for dim, length in zip(meta.dims, meta.shape, strict=True):
            known, array = lengths.setdefault(dim, (length, meta.name))
            if known != length:
                raise SpecError(
                    f"dimension {dim!r}",
                    kind="dims",
                    clause="4.5",
                    array=meta.name,
                    expected=f"length {known}, as in array {array!r}",
                    found=length,
                    hint="give it another name",
                )
    num_samples = lengths[SAMPLE_DIM][0] if SAMPLE_DIM in lengths else 0
    if too_many_empty(metas, num_samples):
        expected = f"at most {MAX_EMPTY_SAMPLES} where no array has bytes for a sample"
        raise SpecError("shape", kind="limits", clause="9.1", expected=expected, found=num_samples)
    return num_samples
