"""Codec chains of packed stores: what they are called in `zarr.json`, how chunks go in and out (spec 13.4).

A chunk is decoded only into memory of its known size, and only if it says that this is its size.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ups_store.errors import FormatError, SpecError, needs
from ups_store.format.metadata import ArrayMeta, bytes_codec, dtype_of

MAX_CHUNK_BYTES = (1 << 31) - 64  # of payload: Blosc's limit (spec 13.8)
LEVELS = {"blosc": range(10), "pcodec": range(13)}
DEFAULT_LEVELS = {"blosc": 5, "pcodec": 8}

_PCODEC_DTYPES = frozenset(f"{kind}{bits}" for kind in ("float", "int", "uint") for bits in (16, 32, 64))
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOSC_HEADER = struct.Struct("<4B3I")  # versions, flags, type size; payload, block and whole bytes

Bytes = npt.NDArray[np.uint8]
Packed = bytes | memoryview


@dataclass(frozen=True)
class Packing:
    """How a store is packed.

    Attributes:
        codec: "blosc" or "pcodec".
        level: Effort, within `LEVELS[codec]`.
        fingerprint: `Store.fingerprint` of the mapped form: what unpacking must give.
    """

    codec: str
    level: int
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """The value of the key `packed` (spec 13.2)."""
        return {"codec": self.codec, "level": self.level, "fingerprint": self.fingerprint}


def parse_packing(document: Mapping[str, Any], *, path: object) -> Packing:
    """Read the value of the key `packed` (spec 13.2)."""
    codec, level, fingerprint = (document.get(key) for key in ("codec", "level", "fingerprint"))
    is_known = isinstance(codec, str) and codec in LEVELS and type(level) is int and level in LEVELS[codec]
    is_digest = isinstance(fingerprint, str) and _DIGEST.fullmatch(fingerprint)
    if not is_known or not is_digest or len(document) != 3:
        raise FormatError(
            "attribute 'ups_store', key 'packed'",
            path=path,
            kind="packed_codec",
            clause="13.2",
            expected=f"codec ({', '.join(LEVELS)}), its level, fingerprint",
            found=str(dict(document))[:200],
        )
    return Packing(str(codec), int(level or 0), str(fingerprint))


def check_level(codec: str, level: int | None) -> int:
    """The level to use; `SpecError` if there is no such codec or level."""
    if codec not in LEVELS:
        raise SpecError("codec", kind="codec", expected=f"one of {', '.join(LEVELS)}", found=codec)
    chosen = DEFAULT_LEVELS[codec] if level is None else level
    if chosen not in LEVELS[codec]:
        levels = LEVELS[codec]
        expected = f"{levels.start}..{levels.stop - 1} for {codec}"
        raise SpecError("level", kind="codec", expected=expected, found=chosen)
    return chosen


class Chain(Protocol):
    """A codec chain for chunks of one dtype, its trailing `crc32c` left out. Any thread may use it."""

    def to_json(self) -> list[dict[str, Any]]:
        """The codecs as `zarr.json` names them."""
        ...

    def encode(self, payload: npt.NDArray[Any]) -> bytes:
        """Pack one chunk, C-contiguous."""
        ...

    def decode(self, packed: Packed, out: Bytes) -> None:
        """Unpack one chunk into `out`, which has its size; `ValueError` or `RuntimeError` if it can't be."""
        ...


def chain_of(packing: Packing, dtype: str) -> Chain:
    """The chain for a Zarr data type; what pcodec doesn't know gets Blosc (spec 13.4)."""
    if packing.codec == "pcodec" and dtype in _PCODEC_DTYPES:
        return PcodecChain(dtype, packing.level)
    return BloscChain(dtype, packing.level if packing.codec == "blosc" else DEFAULT_LEVELS["blosc"])


def packed_document(meta: ArrayMeta, packing: Packing) -> dict[str, Any]:
    """An array's `zarr.json` in a packed store: the mapped one with other codecs (spec 13.4)."""
    document = meta.document()
    codecs = [*chain_of(packing, meta.dtype).to_json(), {"name": "crc32c"}]
    if meta.is_sharded:
        document["codecs"][0]["configuration"]["codecs"] = codecs
    else:
        document["codecs"] = codecs
    return document


def words_of(payload: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The elements as unsigned integers, one axis: codecs take their size for what to group."""
    return payload.reshape(-1).view(f"u{payload.itemsize}")


@dataclass(frozen=True)
class _Chain:
    """What every chain knows: the Zarr data type, and the effort of its codec."""

    dtype: str
    level: int

    @property
    def _itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize


class BloscChain(_Chain):
    """Bytes of equal place grouped, then Zstandard, both by Blosc."""

    def to_json(self) -> list[dict[str, Any]]:
        """The codecs as `zarr.json` names them."""
        configuration = {
            "typesize": self._itemsize,
            "cname": "zstd",
            "clevel": self.level,
            "shuffle": "shuffle" if self._itemsize > 1 else "noshuffle",
            "blocksize": 0,
        }
        return [bytes_codec(self.dtype), {"name": "blosc", "configuration": configuration}]

    def encode(self, payload: npt.NDArray[Any]) -> bytes:
        """Pack one chunk."""
        with needs("pack"):
            from numcodecs.blosc import NOSHUFFLE, SHUFFLE, Blosc

        shuffle = SHUFFLE if self._itemsize > 1 else NOSHUFFLE
        return bytes(Blosc(cname="zstd", clevel=self.level, shuffle=shuffle).encode(words_of(payload)))

    def decode(self, packed: Packed, out: Bytes) -> None:
        """Unpack one chunk."""
        sizes = _BLOSC_HEADER.unpack_from(packed)[4::2] if len(packed) >= _BLOSC_HEADER.size else None
        if sizes != (out.nbytes, len(packed)):
            raise ValueError(f"sizes in its header {sizes}, expected {(out.nbytes, len(packed))}")
        _blosc_decompress()(packed, out)


class PcodecChain(_Chain):
    """Pcodec, which models numbers; needs the package `pcodec`."""

    def to_json(self) -> list[dict[str, Any]]:
        """The codecs as `zarr.json` names them."""
        return [{"name": "numcodecs.pcodec", "configuration": {"level": self.level}}]

    def encode(self, payload: npt.NDArray[Any]) -> bytes:
        """Pack one chunk."""
        return bytes(_pcodec().PCodec(level=self.level).encode(payload.reshape(-1)))

    def decode(self, packed: Packed, out: Bytes) -> None:
        """Unpack one chunk."""
        numbers = out.view(dtype_of(self.dtype))
        progress = _pcodec_decompress()(bytes(packed), numbers)
        if (progress.n_processed, progress.finished) != (len(numbers), True):
            raise ValueError(f"{progress.n_processed} numbers or more, expected {len(numbers)}")


@functools.cache  # an import statement takes as long as decoding a small chunk
def _blosc_decompress() -> Callable[..., Any]:
    with needs("pack"):
        from numcodecs.blosc import decompress
    function: Callable[..., Any] = decompress
    return function


@functools.cache
def _pcodec_decompress() -> Callable[..., Any]:
    function: Callable[..., Any] = _pcodec().standalone.simple_decompress_into
    return function


def _pcodec() -> Any:
    with needs("pack"):
        from numcodecs import pcodec
    return pcodec
