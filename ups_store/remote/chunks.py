"""Chunks of a remote store: fetched together where they lie together, each checked before it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.format.layout import Layout
from ups_store.read.chunked import Use
from ups_store.read.chunks import Chunk
from ups_store.remote.client import RemoteObject
from ups_store.remote.slot_cache import Places, SlotCache
from ups_store.system.parallel import for_each

REQUESTS_IN_FLIGHT = 16  # of one batch
_MAX_GAP_BYTES = 64 << 10  # between chunks: less is fetched along, sooner than another request is answered
_REQUEST_BYTES = 8 << 20  # of neighbours together, and of a large chunk at a time


class Numbering:
    """Numbers of a store's chunks, in the order of its arrays, by which the slot cache knows them.

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

    def of(self, chunk: Chunk) -> int:
        """The number of a chunk."""
        return self._bases[chunk.array] + (chunk.sample or 0)


class ChunkReader:
    """Gives checked chunks of one object, from the cache or by requests. Safe to use from several threads.

    Args:
        remote: The object.
        cache: Where fetched chunks are kept; None keeps none.
        numbering: Numbers of its chunks.
        path: For messages.
    """

    def __init__(
        self, remote: RemoteObject, cache: SlotCache | None, numbering: Numbering, path: Path
    ) -> None:
        self._remote, self._cache, self._numbering, self._path = remote, cache, numbering, path

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
        ranges = [piece for block in _blocks(missing) for piece in block.ranges()]
        for_each(self._fetch, ranges, num_threads=num_threads or REQUESTS_IN_FLIGHT)

    def _is_cached(self, chunk: Chunk, use: Use) -> bool:
        """Use what the cache has, if that is right."""
        if self._cache is None:
            return False
        number = self._numbering.of(chunk)
        raw = self._cache.get(number, chunk.first, chunk.end - chunk.first)
        if raw is None:
            return False
        payload = chunk.payload_of(raw)
        if payload is None:
            self._cache.drop(number)
            return False
        use(partial(_copy, payload))
        return True

    def _fetch(self, piece: _Range) -> None:
        block = piece.block
        raw = block.add(piece, self._remote.read(piece.first, piece.nbytes))
        if raw is None:  # other threads have the rest
            return
        for chunk, use in block.wanted:
            begin = chunk.first - block.first
            use(partial(_copy, self._checked(chunk, raw[begin : begin + chunk.end - chunk.first])))

    def _checked(self, chunk: Chunk, raw: memoryview) -> memoryview:
        """Check a fetched chunk; it is fetched once more if it doesn't match its checksum."""
        payload = chunk.payload_of(raw)
        if payload is None:
            raw = self._remote.read(chunk.first, chunk.end - chunk.first)
            payload = chunk.payload_of(raw)
        if payload is None:
            hint = "`ups-store verify` shows all damage; put a sound copy in its place"
            raise chunk.damaged(self._path, "the bytes don't match their checksum, twice", hint=hint)
        if self._cache is not None:
            self._cache.put(self._numbering.of(chunk), chunk.first, raw)
        return payload


def _copy(payload: memoryview, out: npt.NDArray[Any]) -> None:
    out.reshape(-1).view(np.uint8)[:] = np.frombuffer(payload, np.uint8)


@dataclass
class _Block:
    """Neighbouring chunks, by their first byte, and what takes them; fetched together."""

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

    def ranges(self) -> Iterator[_Range]:
        """Cut it into the requests that it takes."""
        firsts = range(self.first, self.first + self.nbytes, _REQUEST_BYTES)
        self._left = len(firsts)
        for first in firsts:
            yield _Range(self, first, min(_REQUEST_BYTES, self.first + self.nbytes - first))

    def add(self, piece: _Range, raw: memoryview) -> memoryview | None:
        """Take a range; returns all bytes to whichever thread has brought the last of them."""
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
class _Range:
    """One request."""

    block: _Block
    first: int
    nbytes: int


def _blocks(wanted: Sequence[tuple[Chunk, Use]]) -> Iterator[_Block]:
    """Group neighbours of sorted chunks, up to the bytes of a request."""
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
