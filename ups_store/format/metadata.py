"""`zarr.json` documents as typed values: the bytes that they are written as, and reading them; pure (spec 4).

The JSON text is a function of the values (RFC 8785), so `verify` can regenerate every byte of it. What
reading doesn't know it refuses.
"""

from __future__ import annotations

import functools
import json
import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ups_store.errors import FormatError, SpecError, needs
from ups_store.format.canonical import canonical_json

SAMPLE_DIM = "sample"  # first dimension of every per-sample array; constants never have it
LARGE_SAMPLE_BYTES = 4096  # from here on an array gets a slot per sample (spec 5.1)
MAX_JSON_BYTES = 16 << 20
MAX_ARRAYS = 4096
MAX_RANK = 32
MAX_ELEMENTS = 1 << 60  # not reached, axes of length 0 counted as 1: NumPy addresses bytes below 2^63
NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPE_NAMES = ("bool", *_INTEGERS, "float16", "float32", "float64", "bfloat16")
_HINT = "open it with a general Zarr reader, or rebuild it"
_VERSION_PATTERN = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """The little-endian NumPy dtype of a Zarr data type name of `DTYPE_NAMES`."""
    if name == "bfloat16":
        with needs("bfloat16"):
            import ml_dtypes  # 20 ms that most stores don't need

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(name).newbyteorder("<")
    return dtype


def dtype_name(dtype: Any) -> str:
    """The Zarr data type name of a NumPy dtype, or `SpecError` with the names that exist."""
    name = "bfloat16" if dtype == "bfloat16" else np.dtype(dtype).name
    if name not in DTYPE_NAMES:
        raise SpecError(
            "unsupported dtype", kind="dtype", expected=f"one of {', '.join(DTYPE_NAMES)}", found=name
        )
    return name


@dataclass(frozen=True)
class ArrayMeta:
    """One array of a store.

    Attributes:
        name: Array name, also its path in the hierarchy (spec 4.2).
        shape: Whole shape; for per-sample arrays the first axis is the sample.
        dtype: Zarr data type name.
        dims: Dimension names, one per axis.
        attrs: Zarr attributes of the array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def is_constant(self) -> bool:
        """Whether the array has no sample axis (spec 4.5)."""
        return not self.dims or self.dims[0] != SAMPLE_DIM

    @cached_property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample; the whole shape for a constant."""
        return self.shape if self.is_constant else self.shape[1:]

    @cached_property
    def sample_nbytes(self) -> int:
        """Payload bytes of one sample; of the whole array for a constant."""
        return math.prod(self.sample_shape) * dtype_of(self.dtype).itemsize

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes of the whole array."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    @cached_property
    def is_sharded(self) -> bool:
        """Whether every sample has a slot of its own (spec 5.1)."""
        return not self.is_constant and self.sample_nbytes >= LARGE_SAMPLE_BYTES

    @property
    def chunk_key(self) -> str:
        """Name of the single data entry: `u/c/0/0` (spec 4.6)."""
        return "/".join([self.name, "c", *["0"] * len(self.shape)])

    def to_json(self) -> bytes:
        """The bytes of the array's `zarr.json` (spec 4.4)."""
        return canonical_json(self.document(), what=f"attrs of {self.name!r}")

    def document(self) -> dict[str, Any]:
        """The array's `zarr.json` as JSON values (spec 4.4)."""
        chunk_shape = [max(1, n) for n in self.shape]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if self.dtype == "bool" else 0,
            "codecs": self._codecs(chunk_shape),
            "dimension_names": list(self.dims),
            "attributes": self.attrs,
        }

    def _codecs(self, chunk_shape: list[int]) -> list[dict[str, Any]]:
        chain = [bytes_codec(self.dtype), {"name": "crc32c"}]
        if not self.is_sharded:
            return chain
        configuration = {
            "chunk_shape": [1, *chunk_shape[1:]],
            "codecs": chain,
            "index_codecs": [bytes_codec("uint64"), {"name": "crc32c"}],
            "index_location": "end",
        }
        return [{"name": "sharding_indexed", "configuration": configuration}]


def bytes_codec(dtype: str) -> dict[str, Any]:
    """The codec `bytes` as `zarr.json` names it for a Zarr data type (spec 4.4)."""
    if dtype_of(dtype).itemsize == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


@dataclass(frozen=True)
class RootMeta:
    """The root group's `zarr.json`.

    Attributes:
        version: Format version, `(major, minor)`.
        config_hash: sha256 of the canonical identity document, hexadecimal.
        identity: The identity document (spec 8).
        attrs: The caller's attributes, without the key `ups_store`.
        packed: How a packed store is packed (spec 13.2); None for a mapped one.
    """

    version: tuple[int, int]
    config_hash: str
    identity: dict[str, Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    packed: dict[str, Any] | None = None

    def to_json(self) -> bytes:
        """The bytes of the root `zarr.json`, padded with spaces to whole pages (spec 4.3)."""
        ours = {
            "format_version": f"{self.version[0]}.{self.version[1]}",
            "config_hash": self.config_hash,
            "identity": self.identity,
        }
        if self.packed is not None:
            ours["packed"] = self.packed
        document = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {**self.attrs, "ups_store": ours},
        }
        text = canonical_json(document, what="attrs")
        return text + b" " * (-len(text) % 4096)


def is_name(name: object) -> bool:
    """Whether the format allows it as the name of an array (spec 4.2)."""
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        return False
    return not name.startswith("__") and name != "zarr.json"


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


def parse_json(raw: bytes, *, path: object, entry: str) -> dict[str, Any]:
    """Decode the JSON object of one `zarr.json` entry."""
    try:
        # not the bytes: json would guess UTF-16 and UTF-32 too
        document = _DECODER.decode(raw.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{entry} is not JSON ({error})", path=path, kind="json", clause="4.1") from error
    if not isinstance(document, dict):
        raise FormatError(
            f"{entry} is not a JSON object",
            path=path,
            kind="json",
            clause="4.1",
            expected="an object",
            found=type(document).__name__,
        )
    return document


def parse_array(
    name: str,
    raw: bytes,
    *,
    path: object,
    document_of: Callable[[ArrayMeta], dict[str, Any]] = ArrayMeta.document,
) -> ArrayMeta:
    """Read one array's `zarr.json`; anything that `document_of` wouldn't write is refused (spec 4.4)."""
    document = parse_json(raw, path=path, entry=f"{name}/zarr.json")
    bad = functools.partial(_bad_key, path, document, array=name)
    shape, dtype, dims = _parse_geometry(document, bad)
    attrs = document.get("attributes")
    if not isinstance(attrs, dict):
        raise bad("attributes", "an object")
    _check_attrs(attrs, path=path, entry=f"{name}/zarr.json")
    meta = ArrayMeta(name, shape, dtype, dims, attrs)
    expected = document_of(meta)
    if json.dumps(expected, sort_keys=True, separators=(",", ":")).encode() == raw:
        return meta  # as our writer writes it, which spares comparing value by value
    for key in sorted(expected.keys() | document.keys()):
        if not _same(document.get(key), expected.get(key)):
            kind = "codec" if key == "codecs" else "array_metadata"
            raise bad(key, json.dumps(expected.get(key)), kind=kind)
    return meta


def _bad_key(
    path: object,
    document: dict[str, Any],
    key: str,
    expected: str,
    *,
    where: str = "zarr.json",
    array: str | None = None,
    kind: str = "array_metadata",
    clause: str = "4.4",
) -> FormatError:
    return FormatError(
        f"{where}, key {key!r}",
        path=path,
        array=array,
        kind=kind,
        clause=clause,
        expected=expected,
        found=_short(document[key]) if key in document else f"only {_short(sorted(document))}",
        hint=_HINT,
    )


def _parse_geometry(
    document: dict[str, Any], bad: Callable[..., FormatError]
) -> tuple[tuple[int, ...], str, tuple[str, ...]]:
    """Shape, dtype and dimension names, within the limits (spec 4.5, 4.7, 9.1)."""
    shape, dtype, dims = (document.get(key) for key in ("shape", "data_type", "dimension_names"))
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        raise bad("shape", f"at most {MAX_RANK} integers from 0 on")
    if math.prod(max(1, n) for n in shape) >= MAX_ELEMENTS:
        raise bad("shape", f"fewer than {MAX_ELEMENTS} elements, axes of length 0 counted as 1")
    if dtype not in DTYPE_NAMES:
        raise bad("data_type", f"one of {', '.join(DTYPE_NAMES)}", kind="dtype")
    if not isinstance(dims, list) or len(dims) != len(shape) or not all(isinstance(d, str) for d in dims):
        raise bad("dimension_names", f"{len(shape)} names")
    if len(set(dims)) < len(dims) or SAMPLE_DIM in dims[1:]:
        wanted = f"distinct names, {SAMPLE_DIM!r} only as the first"
        raise bad("dimension_names", wanted, kind="dims", clause="4.5")
    return tuple(shape), str(dtype), tuple(dims)


def parse_root(raw: bytes, *, path: object) -> RootMeta:
    """Read the root `zarr.json` (spec 4.3); the hash isn't checked here."""
    document = parse_json(raw, path=path, entry="zarr.json")
    attrs = document.get("attributes")
    ours = attrs.get("ups_store") if isinstance(attrs, dict) else None
    node = (document.get("zarr_format"), document.get("node_type"))
    if not isinstance(attrs, dict) or not isinstance(ours, dict) or node != (3, "group"):
        raise FormatError(
            "no root group with the attribute 'ups_store'",
            path=path,
            kind="foreign",
            clause="4.3",
            hint="it is a Zarr file of another program: read it with zarr-python",
        )
    where = "attribute 'ups_store'"
    bad = functools.partial(_bad_key, path, ours, where=where, kind="root_metadata", clause="4.3")
    version, config_hash, identity = (ours.get(key) for key in ("format_version", "config_hash", "identity"))
    numbers = _VERSION_PATTERN.fullmatch(version) if isinstance(version, str) else None
    if numbers is None:
        raise bad("format_version", "'MAJOR.MINOR', numbers of at most six digits")
    if not isinstance(config_hash, str):
        raise bad("config_hash", "64 hexadecimal digits")
    if not isinstance(identity, dict):
        raise bad("identity", "an object")
    packed = ours.get("packed")
    if "packed" in ours and not isinstance(packed, dict):
        raise bad("packed", "an object", clause="13.2")
    others = {key: value for key, value in attrs.items() if key != "ups_store"}
    _check_attrs(others, path=path, entry="zarr.json")
    return RootMeta((int(numbers[1]), int(numbers[2])), config_hash, identity, others, packed)


def _check_attrs(attrs: dict[str, Any], *, path: object, entry: str) -> None:
    """Refuse attributes that have no RFC 8785 form: then the text of the document can't have it either."""
    if not attrs:
        return
    try:
        canonical_json(attrs, what=f"{entry}: attributes")
    except SpecError as error:
        raise FormatError(
            error.problem, path=path, kind="json", clause="4.1", expected=error.expected, found=error.found
        ) from error


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(text: str) -> int | float:
    """An integer, or beyond 53 bits the double that RFC 8785 writes without a point up to 1e21."""
    number = float(text)
    return int(text) if abs(number) < 2**53 else number


def _raise_on_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


_DECODER = json.JSONDecoder(parse_int=_number, parse_constant=_raise_on_constant)


def _same(found: Any, expected: Any) -> bool:
    """Whether two JSON values are the same, unlike `==` also in type: `true` isn't 1, nor is 1.0."""
    if found is expected:
        return True
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[k], expected[k]) for k in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    return bool(found == expected)


def _short(value: object) -> str:
    return reprlib.repr(value)  # bounded in depth and length
