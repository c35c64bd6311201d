"""`ChunkedStore`: a store that brings its chunks into memory one by one, packed or at a URL."""

from __future__ import annotations

import os
import threading
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError
from ups_store.format.layout import ArrayLayout, Layout
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.format.ragged import Offsets
from ups_store.format.root import RootMeta
from ups_store.read.base import AnyStore
from ups_store.read.gather import (
    BatchArguments,
    Samples,
    TimeWindow,
    batch_memory,
    batch_shape,
    pick,
    window_of,
)
from ups_store.read.ragged import check_offsets, decoded
from ups_store.read.store_file import Chunk, chunk_of, rows_chunk
from ups_store.system.runs import cast_into

KEPT_BYTES = 256 << 20  # of all stores of the process: the samples of a window of blocks, see `read.order`

Wholes: TypeAlias = dict[str, npt.NDArray[Any]]


class ChunkRead(NamedTuple):
    """A chunk that a batch needs, and where its values go."""

    chunk: Chunk
    shape: tuple[int, ...]  # shape of its values, and `dtype` theirs
    dtype: np.dtype[Any]
    target: npt.NDArray[Any] | None = None  # memory that they go to, C-contiguous; None for new memory
    use: Callable[[npt.NDArray[Any]], None] | None = None  # what is done with them then, if anything
    is_object: bool = False  # whether new memory is an object of its own, of which tensors are made

    def take(self, fill: Callable[[npt.NDArray[Any]], object]) -> None:
        """Have the payload, which was checked or is about to be, written to its memory, and use it.

        New memory is made here, once the bytes have come: what a server claims to have takes none.
        """
        target = self.target
        if target is None:
            memory = bytearray(self.chunk.nbytes) if self.is_object else None
            target = np.ndarray(self.shape, self.dtype, memory)
        fill(target)
        if self.use is not None:
            self.use(target)


class ChunkedStore(AnyStore):
    """A store that reads a chunk when it is first needed, and checks every one.

    An array without slots is read whole with its first sample and kept; of another a sample is read whole,
    once a batch, also for a window of it, and for windows those read last are kept for a while. Kinds of it
    differ in `_read_chunks`.
    """

    _why_no_array: tuple[str, str]  # what `store[name]` says of an array of samples, and what to do

    def __init__(self, path: Path, root: RootMeta, layout: Layout) -> None:
        metas = [array.meta for array in layout.arrays.values()]
        super().__init__(path, root, metas, layout.num_samples)
        self._layout = layout
        self._wholes: Wholes = {}
        self._key = object()  # of its samples among those that are kept
        weakref.finalize(self, SHARED.forget, self._key)

    @abstractmethod
    def _read_chunks(self, reads: Sequence[ChunkRead], num_threads: int | None) -> None:
        """Have every chunk taken once it is checked; in any order, from several threads."""

    def whole(self, name: str) -> npt.NDArray[Any]:
        """Give a constant, read once, read-only; also another array where it was preloaded as a copy."""
        meta = self._meta(name)
        self.check_open()
        if meta.is_constant or (name in self._wholes and self._is_copy()):
            return self._whole(self._layout.arrays[name])
        problem, hint = self._why_no_array
        raise self._unsupported(problem, hint, array=name)

    def _is_copy(self) -> bool:
        """Tell whether all samples are in memory."""
        return False

    def _gather(self, samples: Samples, metas: list[ArrayMeta], arguments: BatchArguments) -> dict[str, Any]:
        batch: dict[str, npt.NDArray[Any]] = {}
        reads: list[ChunkRead] = []
        picked: list[tuple[str, TimeWindow | None]] = []
        wholes = self._wholes  # which `close` in another thread replaces
        for meta in metas:
            array, times = self._layout.arrays[meta.name], window_of(meta, len(samples), arguments)
            target = batch_memory(meta, batch_shape(meta, len(samples), times), arguments.out)
            batch[meta.name] = target
            if not target.size:
                continue
            if meta.is_sharded and meta.name not in wholes:
                reads += self._slots(array, samples, times, target)
            else:
                reads += self._missing(array, wholes)
                picked.append((meta.name, times))
        self._read_chunks(reads, arguments.num_threads)
        for name, times in picked:
            pick(wholes[name], samples, times, batch[name])
        return batch

    def _slots(
        self, array: ArrayLayout, samples: Samples, window: TimeWindow | None, out: npt.NDArray[Any]
    ) -> list[ChunkRead]:
        """List the samples that a batch needs; those that are kept in memory are copied at once."""
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(samples.tolist()):
            rows.setdefault(number, []).append(row)
        name, shape, dtype = array.meta.name, array.meta.sample_shape, dtype_of(array.meta.dtype)
        is_direct = window is None and out.dtype == dtype and out[0, ...].flags.c_contiguous

        def copy(values: npt.NDArray[Any], sample: int) -> None:
            for row in rows[sample]:
                cast_into(values if window is None else values[window.steps(row)], out[row, ...])

        def keep(values: npt.NDArray[Any], sample: int) -> None:
            if window is not None:
                SHARED.put((self._key, name, sample), values)
            copy(values, sample)

        def repeat(values: npt.NDArray[Any], sample: int) -> None:
            for row in rows[sample][1:]:
                out[row, ...] = values

        reads: list[ChunkRead] = []
        for sample in sorted(rows):
            cached = None if window is None else SHARED.get((self._key, name, sample))
            if cached is not None:
                copy(cached, sample)
                continue
            target, use = (out[rows[sample][0], ...], repeat) if is_direct else (None, keep)
            is_used = not is_direct or len(rows[sample]) > 1
            reads.append(
                ChunkRead(
                    Chunk(name, sample, array.offset + sample * array.stride, array.meta.sample_nbytes),
                    shape,
                    dtype,
                    target,
                    partial(use, sample=sample) if is_used else None,
                )
            )
        return reads

    def _missing(self, array: ArrayLayout, wholes: Wholes) -> list[ChunkRead]:
        """List the chunk of an array without slots, which is kept, unless it is there."""
        meta = array.meta
        if meta.name in wholes:
            return []

        def keep(values: npt.NDArray[Any]) -> None:
            values.flags.writeable = False
            wholes[meta.name] = values

        read = ChunkRead(chunk_of(array), meta.shape, dtype_of(meta.dtype), use=keep, is_object=True)
        if array.entry is None:
            read.take(lambda values: None)
            return []
        return [read]

    def _whole(self, array: ArrayLayout) -> npt.NDArray[Any]:
        wholes = self._wholes
        self._read_chunks(self._missing(array, wholes), None)
        return wholes[array.meta.name]

    def _views_of(
        self, name: str, samples: Samples, *, decode: bool, num_threads: int | None = None
    ) -> list[Any]:
        layout = self._layout.ragged[name]
        meta, offsets, checks = layout.rows.meta, self._offsets(name), self._whole(layout.checks)
        values: dict[int, npt.NDArray[Any]] = {}
        reads: list[ChunkRead] = []
        for sample in set(samples.tolist()):
            rows = int(offsets[sample]), int(offsets[sample + 1])
            values[sample] = target = np.empty((rows[1] - rows[0], *meta.sample_shape), dtype_of(meta.dtype))
            if target.size:
                chunk = rows_chunk(layout, sample, rows, int(checks[sample]))
                reads.append(ChunkRead(chunk, target.shape, target.dtype, target))
        self._read_chunks(reads, num_threads)
        for target in values.values():
            target.flags.writeable = False
        if meta.encoding is None or not decode:
            return [values[sample] for sample in samples.tolist()]
        return [decoded(values[sample], meta, sample, path=self.path) for sample in samples.tolist()]

    def _offsets(self, name: str) -> Offsets:
        """Read the offsets of a ragged array, checked when they come."""
        layout, wholes = self._layout.ragged[name], self._wholes
        is_new = layout.offsets.meta.name not in wholes
        offsets: Offsets = self._whole(layout.offsets)
        if is_new:
            try:
                check_offsets(offsets, layout, path=self.path)
            except CorruptChunkError:
                del wholes[layout.offsets.meta.name]
                raise
        return offsets

    def _lengths_of(self, name: str) -> Samples:
        return np.diff(self._offsets(name))

    def close(self) -> None:
        """Let go of file and memory; a read under way ends. Closing twice is allowed."""
        self._wholes = {}
        SHARED.forget(self._key)


class KeptSamples:
    """Samples by store, array and number; the ones that weren't used for longest go first. For any thread.

    With `shuffle="block"` the windows of a sample come soon after one another, so most find it here.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """Forget all; also in a forked child, where a thread that is gone may have held the lock."""
        self._samples: OrderedDict[tuple[object, str, int], npt.NDArray[Any]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[object, str, int]) -> npt.NDArray[Any] | None:
        """Find a sample, not to be written to."""
        with self._lock:
            values = self._samples.get(key)
            if values is not None:
                self._samples.move_to_end(key)
            return values

    def put(self, key: tuple[object, str, int], values: npt.NDArray[Any]) -> None:
        """Keep a sample, unless it takes more than all may."""
        if values.nbytes > self.limit:
            return
        with self._lock:
            if key in self._samples:  # another thread read it, too
                return
            self._samples[key] = values
            self._nbytes += values.nbytes
            while self._nbytes > self.limit:
                self._nbytes -= self._samples.popitem(last=False)[1].nbytes

    def forget(self, store: object) -> None:
        """Let go of a store's samples."""
        with self._lock:
            for key in [key for key in self._samples if key[0] is store]:
                self._nbytes -= self._samples.pop(key).nbytes


SHARED = KeptSamples()
os.register_at_fork(after_in_child=SHARED.clear)
