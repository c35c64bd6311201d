"""Arrays: `ArraySpec` as callers describe them, `ArrayMeta` as files have them, and `zarr.json` (spec 4).

The JSON text is a function of the values (RFC 8785), so `verify` can regenerate every byte of it. What
reading doesn't know it refuses. Pure: nothing is read or written here.
"""

from __future__ import annotations

import functools
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import FormatError, SpecError, needs
from ups_store.format.canonical import (
    MAX_EXACT_INTEGER,
    canonical_json,
    check_canonical,
    is_text_of,
    parse_json,
)
from ups_store.format.ragged import (
    MAX_NAME_BYTES,
    MAX_ROWS,
    Encoding,
    RaggedPart,
    RowGeometry,
    attribute_of,
    companion_names,
    encoding_of,
)

SAMPLE_DIM = "sample"  # first dimension of every per-sample array; constants never have it
LARGE_SAMPLE_BYTES = 4096  # from here on an array gets a slot per sample (spec 5.1)
MAX_JSON_BYTES = 16 << 20
MAX_METADATA_BYTES = 64 << 20  # where the last `zarr.json` ends (spec 9.1)
MAX_EMPTY_SAMPLES = 1 << 24  # N of a store that holds no byte for a sample: nothing else bounds it (spec 9.1)
MAX_DIM_BYTES = 256
MAX_ARRAYS = 4096
MAX_RANK = 32
_KEPT_PARSED_BYTES = 4 << 10  # of a document whose attributes are kept as objects
MAX_ELEMENTS = 1 << 60  # not reached, axes of length 0 counted as 1: NumPy addresses bytes below 2^63
NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPE_NAMES = ("bool", *_INTEGERS, "float16", "float32", "float64", "bfloat16")
_HINT = "open it with a general Zarr reader, or rebuild it"


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the little-endian NumPy dtype of a Zarr data type name of `DTYPE_NAMES`."""
    if name == "bfloat16":
        with needs("bfloat16"):
            import ml_dtypes  # 20 ms that most stores don't need

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(name).newbyteorder("<")
    return dtype


def dtype_name(dtype: Any) -> str:
    """Return the Zarr data type name of a NumPy dtype, or raise `SpecError` with the names that exist."""
    name = "bfloat16" if dtype == "bfloat16" else np.dtype(dtype).name
    if name not in DTYPE_NAMES:
        raise SpecError(
            "unsupported dtype", kind="dtype", expected=f"one of {', '.join(DTYPE_NAMES)}", found=name
        )
    return name


class StoredAttrs(Mapping[str, Any]):
    """Attributes of an array whose `zarr.json` is long, parsed when they are asked for.

    As Python's objects they may take fifty times the room of their text, of which a file has up to 16 MiB for
    every array.
    """

    def __init__(self, document: bytes) -> None:
        self._document = document

    def _parsed(self) -> dict[str, Any]:
        attrs: dict[str, Any] = parse_json(self._document)["attributes"]
        attrs.pop("ups_store", None)  # of a ragged array, not the caller's (spec 14.2)
        return attrs

    def __getitem__(self, key: str) -> Any:
        return self._parsed()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsed())

    def __len__(self) -> int:
        return len(self._parsed())

    def __repr__(self) -> str:
        return f"<attributes of {len(self._document):,} bytes>"


@dataclass(frozen=True)
class ArraySpec:
    """Describe what an array with a sample axis will hold.

    Of a *ragged* array every sample has its own number of rows: `ArraySpec((N, None, 3), "float32",
    lengths=[...])` holds `lengths[i]` points of 3 coordinates for sample i.

    Args:
        shape: Whole shape, the number of samples N first; None as the second one for a ragged array.
        dtype: Anything that NumPy takes as a dtype, or "bfloat16".
        dims: Dimension names, "sample" first; made from the array's name where not given.
        attrs: Zarr attributes of the array, JSON values; not part of the identity.
        lengths: Of a ragged array the number of rows of each sample, shape (N,); of text that of its bytes.
        encoding: Of a ragged array of uint8 what its bytes are: "utf-8" for samples that are `str`, "bytes".
    """

    shape: Sequence[Any]
    dtype: Any
    dims: Sequence[str] | None = None
    attrs: Mapping[str, Any] | None = None
    lengths: Sequence[int] | npt.NDArray[np.integer[Any]] | None = field(default=None, compare=False)
    encoding: Literal["utf-8", "bytes"] | None = None

    @property
    def is_ragged(self) -> bool:
        """Return whether every sample has its own number of rows."""
        return len(self.shape) > 1 and self.shape[1] is None


@dataclass(frozen=True)
class ArrayMeta:
    """One array of a store.

    `part` says what it holds of a ragged array: the rows of all samples, one behind the other, under the name
    that users know, or what belongs to them (spec 14); None for every other array.
    """

    name: str  # also its path in the hierarchy (spec 4.2)
    shape: tuple[int, ...]  # whole; for per-sample arrays the first axis is the sample
    dtype: str  # Zarr data type name
    dims: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)  # the caller's
    part: RaggedPart | None = None
    encoding: Encoding | None = None  # what the bytes of each sample of a ragged array are, if text or bytes

    @cached_property
    def is_constant(self) -> bool:
        """Return whether the array has no sample axis (spec 4.5) and belongs to no ragged one."""
        return self.part is None and (not self.dims or self.dims[0] != SAMPLE_DIM)

    @cached_property
    def is_committed(self) -> bool:
        """Return whether every sample has bytes in it, which commit records vouch for (spec 6.4)."""
        return not self.is_constant and self.part != "offsets"

    @property
    def is_ragged(self) -> bool:
        """Return whether it holds the rows of a ragged array."""
        return self.part == "rows"

    @property
    def is_companion(self) -> bool:
        """Return whether it belongs to a ragged array, and users don't see it."""
        return self.part is not None and self.part != "rows"

    @cached_property
    def row_geometry(self) -> RowGeometry:
        """Give where the rows of a ragged array lie."""
        return RowGeometry(self.shape[0], self.sample_nbytes)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Dimension names as users and the identity have them: those of a ragged array with the sample."""
        return (SAMPLE_DIM, *self.dims) if self.is_ragged else self.dims

    @cached_property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample; the whole shape for a constant; of one row for a ragged array."""
        return self.shape if self.is_constant else self.shape[1:]

    @cached_property
    def sample_nbytes(self) -> int:
        """Payload bytes of one sample; of the whole array for a constant; of a row for a ragged array."""
        return math.prod(self.sample_shape) * dtype_of(self.dtype).itemsize

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes of the whole array."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    @cached_property
    def is_sharded(self) -> bool:
        """Return whether every sample has a slot of its own (spec 5.1)."""
        return self.part is None and not self.is_constant and self.sample_nbytes >= LARGE_SAMPLE_BYTES

    @property
    def chunk_key(self) -> str:
        """Name of the single data entry: `u/c/0/0` (spec 4.6)."""
        return "/".join([self.name, "c", *["0"] * len(self.shape)])

    def to_json(self) -> bytes:
        """Write the array's `zarr.json` (spec 4.4)."""
        return canonical_json(self.document(), what=f"attrs of {self.name!r}")

    def document(self) -> dict[str, Any]:
        """Make the array's `zarr.json` as JSON values (spec 4.4)."""
        chunk_shape = [max(1, n) for n in self.shape]
        attributes = dict(self.attrs)
        if self.is_ragged:
            chunk_shape[0] = self.row_geometry.chunk_rows
            attributes["ups_store"] = attribute_of(self.name, self.encoding)
        codecs: list[dict[str, Any]] = [bytes_codec(self.dtype), {"name": "crc32c"}]
        if self.is_sharded or self.is_ragged:
            configuration = {
                "chunk_shape": [self.row_geometry.rows_per_chunk if self.is_ragged else 1, *chunk_shape[1:]],
                "codecs": codecs[:1] if self.is_ragged else codecs,
                "index_codecs": [bytes_codec("uint64"), {"name": "crc32c"}],
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": configuration}]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if self.dtype == "bool" else 0,
            "codecs": codecs,
            "dimension_names": list(self.dims),
            "attributes": attributes,
        }


def bytes_codec(dtype: str) -> dict[str, Any]:
    """Return the codec `bytes` as `zarr.json` has it for a Zarr data type (spec 4.4)."""
    if dtype_of(dtype).itemsize == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def companions_of(rows: ArrayMeta, num_samples: int) -> tuple[ArrayMeta, ArrayMeta]:
    """Return the metadata of the offsets and of the checksums of a ragged array (spec 14.1)."""
    names = companion_names(rows.name)
    return (
        ArrayMeta(names["offsets"], (num_samples + 1,), "int64", (names["offsets"],), part="offsets"),
        ArrayMeta(names["crc32c"], (num_samples,), "uint32", (SAMPLE_DIM,), part="crc32c"),
    )


def names_in_file(arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of a file's arrays, companions included, from those of its identity (spec 14.3)."""
    names = set(arrays)
    for name, array in arrays.items():
        shape = array.get("shape") if isinstance(array, dict) else None
        if isinstance(shape, list) and shape[:1] == [None]:
            names |= {*companion_names(name).values()}
    return sorted(names)


def with_companions_marked(metas: Sequence[ArrayMeta], *, path: object) -> list[ArrayMeta]:
    """Return the arrays of a file, those that belong to a ragged one marked as such (spec 14.1), in order."""
    arrays = {meta.name: meta for meta in metas}
    for rows in [meta for meta in metas if meta.is_ragged]:
        checks = arrays.get(companion_names(rows.name)["crc32c"])
        num_samples = checks.shape[0] if checks is not None and checks.shape else 0
        for companion in companions_of(rows, num_samples):
            present = arrays.get(companion.name)
            if present is None or replace(present, part=companion.part) != companion:
                expected, actual = _shown(companion), "none" if present is None else _shown(present)
                hint = "its metadata was edited or written by another program: rebuild it"
                values: dict[str, Any] = {"kind": "ragged", "clause": "14.1", "array": rows.name}
                raise FormatError(
                    "ragged array", path=path, **values, expected=expected, found=actual, hint=hint
                )
            arrays[companion.name] = companion
    return list(arrays.values())


def _shown(meta: ArrayMeta) -> str:
    return f"{meta.name!r}: {meta.dtype} {meta.shape} {meta.dims} {meta.attrs or ''}".rstrip()


def row_flaw(rows: ArrayMeta) -> str | None:
    """Say in a short sentence what of a ragged array the format doesn't allow; None if nothing (spec 14)."""
    if not rows.dims or SAMPLE_DIM in rows.dims:
        return f"its rows have dimensions, none of them {SAMPLE_DIM!r}"
    if len(rows.name) > MAX_NAME_BYTES:
        return f"its name has at most {MAX_NAME_BYTES} characters"
    if not rows.sample_nbytes:
        return "a row has elements"
    if rows.row_geometry.chunk_rows > MAX_ROWS:
        return f"its inner chunks have room for at most {MAX_ROWS} rows"
    if rows.encoding is not None and (rows.dtype, rows.sample_shape) != ("uint8", ()):
        return "text and bytes are rows of one uint8"
    return None


def is_name(name: object) -> bool:
    """Tell whether the format allows it as the name of an array (spec 4.2)."""
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        return False
    return not name.startswith("__") and name != "zarr.json"


def is_dim(name: object) -> bool:
    """Tell whether the format allows it as the name of a dimension (spec 4.5)."""
    if not isinstance(name, str) or _CONTROL.search(name):
        return False
    return 0 < len(name.encode(errors="surrogatepass")) <= MAX_DIM_BYTES


def too_many_empty(metas: Iterable[ArrayMeta], num_samples: int) -> bool:
    """Tell whether a store that holds no byte for a sample has more of them than it may (spec 9.1)."""
    return num_samples > MAX_EMPTY_SAMPLES and not any(m.is_committed and m.sample_nbytes for m in metas)


def check_name(name: str) -> str:
    """Return `name` if the format allows it (spec 4.2), else raise `SpecError`."""
    if is_name(name):
        return name
    raise SpecError(
        "array name not allowed",
        kind="name",
        clause="4.2",
        expected="1 to 128 of letters, digits, '_', '.', '-', not starting with '.', '-' or '__'",
        found=repr(name),
    )


def read_document(raw: bytes, *, path: object, entry: str, is_checked: bool = True) -> dict[str, Any]:
    """Decode the JSON object of one `zarr.json` entry, whose text must be canonical (spec 4.1).

    Unless `is_checked` the caller checks that form.
    """
    try:
        document = parse_json(raw)
        if is_checked:
            check_canonical(raw, document)
        if not isinstance(document, dict):
            raise ValueError("not an object")
    except ValueError as error:
        hint = "it was edited or written by another program: rebuild it"
        problem = f"{entry} is no canonical JSON object ({error})"
        raise FormatError(problem, path=path, kind="json", clause="4.1", hint=hint) from error
    return document


def parse_array(
    name: str,
    raw: bytes,
    *,
    path: object,
    document_of: Callable[[ArrayMeta], dict[str, Any]] = ArrayMeta.document,
) -> ArrayMeta:
    """Read one array's `zarr.json`; anything that `document_of` wouldn't write is refused (spec 4.4)."""
    entry = f"{name}/zarr.json"
    document = read_document(raw, path=path, entry=entry, is_checked=False)
    bad = functools.partial(bad_key, path, document, array=name)
    shape, dtype, dims = _parse_geometry(document, bad)
    attrs = document.get("attributes")
    if not isinstance(attrs, dict):
        raise bad("attributes", "an object")
    meta = _as_rows(ArrayMeta(name, shape, dtype, dims, attrs), bad)
    expected = document_of(meta)
    if not is_text_of(expected, attrs, raw):
        read_document(raw, path=path, entry=entry)
        for key in sorted(expected.keys() | document.keys()):
            text = json.dumps(expected.get(key), sort_keys=True)  # unlike `==` it tells `false` from 0
            if key != "attributes" and json.dumps(document.get(key), sort_keys=True) != text:
                raise bad(key, text, kind="codec" if key == "codecs" else "array_metadata")
    return meta if len(raw) <= _KEPT_PARSED_BYTES else replace(meta, attrs=StoredAttrs(raw))


def _as_rows(meta: ArrayMeta, bad: Callable[..., FormatError]) -> ArrayMeta:
    """Return the array as the rows of a ragged one, if its attributes say so (spec 14.2)."""
    if "ups_store" not in meta.attrs:
        return meta
    ours, bad = meta.attrs["ups_store"], functools.partial(bad, kind="ragged", clause="14.2")
    others = {key: value for key, value in meta.attrs.items() if key != "ups_store"}
    rows = replace(meta, attrs=others, part="rows", encoding=encoding_of(ours))
    if ours != attribute_of(rows.name, rows.encoding):
        raise bad("attributes", f"no key 'ups_store', or {attribute_of(rows.name, None)}")
    flaw = row_flaw(rows)
    if flaw is not None:
        raise bad("attributes", f"a ragged array as there are: {flaw}")
    return rows


def bad_key(
    path: object,
    document: dict[str, Any],
    key: str,
    expected: str,
    *,
    where: str = "zarr.json",
    array: str | None = None,
    kind: str = "array_metadata",
    clause: str = "4.4",
    hint: str = _HINT,
) -> FormatError:
    """Return the error for a key of a document that has another value than expected, or none."""
    return FormatError(
        f"{where}, key {key!r}",
        path=path,
        array=array,
        kind=kind,
        clause=clause,
        expected=expected,
        found=short(document[key]) if key in document else f"only {short(sorted(document))}",
        hint=hint,
    )


def _parse_geometry(
    document: dict[str, Any], bad: Callable[..., FormatError]
) -> tuple[tuple[int, ...], str, tuple[str, ...]]:
    """Read shape, dtype and dimension names, within the limits (spec 4.5, 4.7, 9.1)."""
    shape, dtype, dims = (document.get(key) for key in ("shape", "data_type", "dimension_names"))
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    if len(sizes) > MAX_RANK or not all(type(n) is int and 0 <= n <= MAX_EXACT_INTEGER for n in sizes):
        raise bad("shape", f"at most {MAX_RANK} integers from 0 to 2^53 - 1")
    if math.prod(max(1, n) for n in sizes) >= MAX_ELEMENTS:
        raise bad("shape", f"fewer than {MAX_ELEMENTS} elements, axes of length 0 counted as 1")
    if dtype not in DTYPE_NAMES:
        raise bad("data_type", f"one of {', '.join(DTYPE_NAMES)}", kind="dtype")
    if not isinstance(dims, list) or len(dims) != len(sizes) or not all(isinstance(d, str) for d in dims):
        raise bad("dimension_names", f"{len(sizes)} names")
    if not all(map(is_dim, dims)) or len(set(dims)) < len(dims) or SAMPLE_DIM in dims[1:]:
        expected = f"distinct names of 1 to {MAX_DIM_BYTES} bytes without control characters"
        expected += f", {SAMPLE_DIM!r} only as the first"
        raise bad("dimension_names", expected, kind="dims", clause="4.5")
    return tuple(sizes), str(dtype), tuple(dims)


def short(value: object) -> str:
    """Show a value in a message."""
    return reprlib.repr(value)  # bounded in depth and length
