"""`zarr.json` documents as typed values, and the bytes that they are written as; pure (spec 4).

The JSON text is a function of the values (RFC 8785), so `verify` can regenerate every byte of it.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ups_store.canonical import canonical_json
from ups_store.errors import SpecError

SAMPLE_DIM = "sample"  # first dimension of every per-sample array; constants never have it
LARGE_SAMPLE_BYTES = 4096  # from here on an array gets a slot per sample (spec 5.1)
MAX_JSON_BYTES = 16 << 20
MAX_ARRAYS = 4096
MAX_RANK = 32
MAX_ELEMENTS = 1 << 60  # not reached, axes of length 0 counted as 1: NumPy addresses bytes below 2^63

NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPE_NAMES = ("bool", *_INTEGERS, "float16", "float32", "float64", "bfloat16")


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """The little-endian NumPy dtype of a Zarr data type name of `DTYPE_NAMES`."""
    if name == "bfloat16":
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
