"""What a chunk of a packed store is: its codecs as `zarr.json` names them, and its bytes (spec 13.4, 13.5).

A chunk is decoded only into memory of its known size, and only if its header says what its document says.
"""

from __future__ import annotations

import functools
import importlib
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
_BLOSC_VERSION, _ZSTD = 2, 4
_SHUFFLED, _BITS_SHUFFLED = 0b1, 0b100  # of the flags


@dataclass(frozen=True)
class Packing:
    """How a store is packed."""

    codec: str  # "blosc" or "pcodec"
    level: int  # effort, within `LEVELS[codec]`
    fingerprint: str  # `Store.fingerprint` of the mapped form: what unpacking must give

    @classmethod
    def of(cls, codec: str, level: int | None, fingerprint: str) -> Packing:
        """Check a codec and its level, by default a measured one; `SpecError` if there is no such."""
        if codec not in LEVELS:
            raise SpecError("codec", kind="codec", expected=f"one of {', '.join(LEVELS)}", found=codec)
        chosen, levels = DEFAULT_LEVELS[codec] if level is None else level, LEVELS[codec]
        if chosen not in levels:
            expected = f"{levels.start}..{levels.stop - 1} for {codec}"
            raise SpecError("level", kind="codec", expected=expected, found=chosen)
        return cls(codec, chosen, fingerprint)

    @classmethod
    def parse(cls, document: Mapping[str, Any], *, path: object) -> Packing:
        """Read the value of the key `packed` (spec 13.2)."""
        codec, level, fingerprint = (document.get(key) for key in ("codec", "level", "fingerprint"))
        levels = LEVELS.get(codec, ()) if isinstance(codec, str) else ()
        is_known = type(level) is int and level in levels
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
        return cls(**document)

    def to_json(self) -> dict[str, Any]:
        """Make the value of the key `packed`."""
        return {"codec": self.codec, "level": self.level, "fingerprint": self.fingerprint}

    def codec_of(self, dtype: str) -> ChunkCodec:
        """Choose the codec for a Zarr data type; what pcodec doesn't know gets Blosc."""
        if self.codec == "pcodec" and dtype in _PCODEC_DTYPES:
            return ChunkCodec("pcodec", dtype, self.level)
        return ChunkCodec("blosc", dtype, self.level if self.codec == "blosc" else DEFAULT_LEVELS["blosc"])

    def document_of(self, meta: ArrayMeta) -> dict[str, Any]:
        """Make an array's `zarr.json`: that of the mapped form with other codecs."""
        document = meta.document()
        codecs = [*self.codec_of(meta.dtype).to_json(), {"name": "crc32c"}]
        if meta.is_sharded:
            document["codecs"][0]["configuration"]["codecs"] = codecs
        else:
            document["codecs"] = codecs
        return document


@dataclass(frozen=True)
class ChunkCodec:
    """The codecs of chunks of one data type, without the trailing `crc32c`. For any thread.

    Blosc groups bytes of equal place and compresses them with Zstandard; pcodec models numbers.
    """

    name: str
    dtype: str
    level: int

    @functools.cached_property
    def _itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize

    @functools.cached_property
    def _blosc_header(self) -> tuple[int, int, int, int]:
        """Version, codec, shuffle and type size."""
        return _BLOSC_VERSION, _ZSTD, _SHUFFLED if self._itemsize > 1 else 0, self._itemsize

    def to_json(self) -> list[dict[str, Any]]:
        """List the codecs as `zarr.json` names them."""
        if self.name == "pcodec":
            return [{"name": "numcodecs.pcodec", "configuration": {"level": self.level}}]
        configuration = {
            "typesize": self._itemsize,
            "cname": "zstd",
            "clevel": self.level,
            "shuffle": "shuffle" if self._itemsize > 1 else "noshuffle",
            "blocksize": 0,
        }
        return [bytes_codec(self.dtype), {"name": "blosc", "configuration": configuration}]

    def encode(self, payload: npt.NDArray[Any]) -> bytes:
        """Pack one chunk, C-contiguous."""
        if self.name == "pcodec":
            return bytes(_numcodecs("pcodec").PCodec(level=self.level).encode(payload.reshape(-1)))
        blosc = _numcodecs("blosc")
        shuffle = blosc.SHUFFLE if self._itemsize > 1 else blosc.NOSHUFFLE
        words = payload.reshape(-1).view(f"u{payload.itemsize}")  # Blosc takes their size for what to group
        return bytes(blosc.Blosc(cname="zstd", clevel=self.level, shuffle=shuffle).encode(words))

    def decode(self, packed: bytes | memoryview, out: npt.NDArray[np.uint8]) -> None:
        """Unpack one chunk into `out`, which has its size; `ValueError` or `RuntimeError` if it can't be."""
        if self.name == "pcodec":
            numbers = out.view(dtype_of(self.dtype))  # whose type is compared with the chunk's
            progress = _numcodecs("pcodec").standalone.simple_decompress_into(bytes(packed), numbers)
            if (progress.n_processed, progress.finished) != (len(numbers), True):
                raise ValueError(f"{progress.n_processed} numbers or more, expected {len(numbers)}")
            return
        if len(packed) < _BLOSC_HEADER.size:
            raise ValueError(f"{len(packed)} bytes, less than a header")
        version, _, flags, size, num_payload, _, num_packed = _BLOSC_HEADER.unpack_from(packed)
        header = version, flags >> 5, flags & (_SHUFFLED | _BITS_SHUFFLED), size, num_payload, num_packed
        expected = (*self._blosc_header, out.nbytes, len(packed))
        if header != expected:
            raise ValueError(f"version, codec, shuffle, sizes in its header {header}, expected {expected}")
        _numcodecs("blosc").decompress(packed, out)


@functools.cache  # an import statement takes as long as decoding a small chunk
def _numcodecs(name: str) -> Any:
    with needs("pack"):
        return importlib.import_module(f"numcodecs.{name}")
