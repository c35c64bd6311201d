"""Chunks of a remote store: fetched together where they lie together, each checked before it is used.

A chunk is what has a checksum: a sample of an array with slots, a whole array without, a sample of a ragged
array. Every chunk has a number of its own in its store, under which the slot cache knows it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ups_store.errors import CorruptChunkError
from ups_store.format.checksum import crc32c
from ups_store.format.layout import CHECKSUM_BYTES, ArrayLayout, Layout
from ups_store.remote.client import RemoteObject
from ups_store.remote.slot_cache import Places, SlotCache
from ups_store.system.parallel import for_each

REQUESTS_IN_FLIGHT = 16  # of one batch
_MAX_GAP_BYTES = 64 << 10  # between chunks: less is fetched along, sooner than another request is answered
_REQUEST_BYTES = 8 << 20  # of neighbours together, and of a large chunk at a time

Use: TypeAlias = Callable[[memoryview], object]  # takes a chunk's payload, which it must not keep


@dataclass(frozen=True)
class Chunk:
    """A chunk.

    Attributes:
        array: Its array.
        sample: Its sample; None for a whole array.
        number: Its own in the store.
        first: First byte in the object.
        nbytes: Bytes of its payload.
        crc: CRC-32C of the payload; None where that follows it.
    """

    array: str
    sample: int | None
    number: int
    first: int
    nbytes: int
    crc: int | None = None

    @property
    def end(self) -> int:
        """First byte past it, its checksum included."""
        return self.first + self.nbytes + (CHECKSUM_BYTES if self.crc is None else 0)

    def payload_of(self, raw: memoryview) -> memoryview | None:
        """The payload out of the chunk's bytes; None unless they match the checksum."""
        payload, wanted = raw[: self.nbytes], self.crc
        if wanted is None:
            (wanted,) = struct.unpack("<I", raw[self.nbytes :])
        return payload if crc32c(payload) == wanted else None


class Numbering:
    """Numbers of a store's chunks, in the order of its arrays, and where the chunks lie.

    Attributes:
        num_chunks: How many there are.
        places: Where those with slots lie, for the cache.
    """

    def __init__(self, layout: Layout) -> None:
        self._bases: dict[str, int] = {}
        places, base = [], 0
        for name, array in layout.arrays.items():
            self._bases[name] = base
            is_whole = not (array.meta.is_sharded or array.meta.is_ragged)
            count = 1 if is_whole else layout.num_samples
            if array.meta.is_sharded and array.entry:
                places.append(Places(base, count, array.offset, array.stride))
            base += count
        self.num_chunks, self.places = base, tuple(places)

    def whole(self, array: ArrayLayout) -> Chunk:
        """The chunk that an array without slots is."""
        return Chunk(array.meta.name, None, self._bases[array.meta.name], array.offset, array.meta.nbytes)

    def slot(self, array: ArrayLayout, sample: int) -> Chunk:
        """A sample of an array with slots."""
        name, first = array.meta.name, array.slot(sample)[0]
        return Chunk(name, sample, self._bases[name] + sample, first, array.meta.sample_nbytes)

    def rows(self, name: str, sample: int, extent: tuple[int, int], crc: int) -> Chunk:
        """A sample of a ragged array, which has this extent."""
        return Chunk(name, sample, self._bases[name] + sample, extent[0], extent[1] - extent[0], crc)


class ChunkReader:
    """Gives checked chunks of one object, from the cache or by requests. Safe to use from several threads.

    Args:
        remote: The object.
        cache: Where fetched chunks are kept; None keeps none.
        path: For messages.
    """

    def __init__(self, remote: RemoteObject, cache: SlotCache | None, path: Path) -> None:
        self._remote, self._cache, self._path = remote, cache, path

    def read(self, wanted: Sequence[tuple[Chunk, Use]], *, num_threads: int | None = None) -> None:
        """Give every chunk to its use, in any order, in several threads.

        Args:
            wanted: Chunks, each once, and what takes their payload.
            num_threads: Requests under way at once; 16 by default.
        Raises:
            CorruptChunkError: If a chunk doesn't match its checksum, also when it was fetched again.
            StoreReplacedError: If the object isn't the one that was opened; what else the client raises.
        """
        missing = [pair for pair in wanted if not self._is_cached(*pair)]
        missing.sort(key=lambda pair: pair[0].first)
        pieces = [piece for block in _blocks(missing) for piece in block.pieces()]
        for_each(self._fetch, pieces, num_threads=num_threads or REQUESTS_IN_FLIGHT)

    def _is_cached(self, chunk: Chunk, use: Use) -> bool:
        """Use what the cache has, if that is right."""
        if self._cache is None:
            return False
        raw = self._cache.get(chunk.number, chunk.first, chunk.end - chunk.first)
        if raw is None:
            return False
        payload = chunk.payload_of(memoryview(raw))
        if payload is None:
            self._cache.drop(chunk.number)
            return False
        use(payload)
        return True

    def _fetch(self, piece: _Piece) -> None:
        block = piece.block
        raw = block.add(piece, self._remote.read(piece.first, piece.nbytes))
        if raw is None:  # other threads have the rest
            return
        for chunk, use in block.wanted:
            begin = chunk.first - block.first
            use(self._checked(chunk, raw[begin : begin + chunk.end - chunk.first]))

    def _checked(self, chunk: Chunk, raw: memoryview) -> memoryview:
        """The payload of a fetched chunk; fetched once more if it doesn't match its checksum."""
        payload = chunk.payload_of(raw)
        if payload is None:
            raw = self._remote.read(chunk.first, chunk.end - chunk.first)
            payload = chunk.payload_of(raw)
        if payload is None:
            raise CorruptChunkError(
                "the bytes don't match their checksum, twice",
                path=self._path,
                array=chunk.array,
                sample=chunk.sample,
                byte_range=(chunk.first, chunk.end),
                clause="5.2" if chunk.crc is None else "14.5",
                hint="`ups-store verify` shows all damage; put a sound copy in its place",
            )
        if self._cache is not None:
            self._cache.put(chunk.number, chunk.first, raw)
        return payload


@dataclass
class _Block:
    """Neighbouring chunks that are fetched together, or a part at a time if they are large.

    Attributes:
        wanted: The chunks, by their place, and what takes them.
    """

    wanted: list[tuple[Chunk, Use]]
    _left: int = 0
    _memory: memoryview | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def first(self) -> int:
        """First byte."""
        return self.wanted[0][0].first

    @property
    def nbytes(self) -> int:
        """Bytes from the first chunk to the end of the last."""
        return self.wanted[-1][0].end - self.first

    def pieces(self) -> Iterator[_Piece]:
        """The requests that it takes."""
        firsts = range(self.first, self.first + self.nbytes, _REQUEST_BYTES)
        self._left = len(firsts)
        for first in firsts:
            yield _Piece(self, first, min(_REQUEST_BYTES, self.first + self.nbytes - first))

    def add(self, piece: _Piece, raw: memoryview) -> memoryview | None:
        """Take a piece; returns all bytes to whichever thread has brought the last of them."""
        if piece.nbytes == self.nbytes:
            return raw
        with self._lock:
            memory = self._memory = self._memory or np.empty(self.nbytes, np.uint8).data
        memory[piece.first - self.first :][: piece.nbytes] = raw
        with self._lock:
            self._left -= 1
            if self._left:
                return None
            self._memory = None  # freed as soon as it is used, not with the last of the batch
            return memory


@dataclass(frozen=True)
class _Piece:
    """One request."""

    block: _Block
    first: int
    nbytes: int


def _blocks(wanted: Sequence[tuple[Chunk, Use]]) -> Iterator[_Block]:
    """Neighbours of sorted chunks together, up to the bytes of a request."""
    block: list[tuple[Chunk, Use]] = []
    for pair in wanted:
        chunk = pair[0]
        is_far = block and chunk.first - block[-1][0].end > _MAX_GAP_BYTES
        if block and (is_far or chunk.end - block[0][0].first > _REQUEST_BYTES):
            yield _Block(block)
            block = []
        block.append(pair)
    if block:
        yield _Block(block)
