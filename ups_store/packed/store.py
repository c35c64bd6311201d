"""`PackedStore`: samples of a packed file, each decoded when it is asked for (spec 13)."""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import MemoryLimitError, StoreReplacedError
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.packed.catalog import PackedArray, PackedCatalog, read_packed
from ups_store.packed.chunks import ChunkReader
from ups_store.packed.decoded import SHARED
from ups_store.read.base import AnyStore, check_unpickled
from ups_store.read.catalog import fingerprint_of
from ups_store.read.gather import Samples, TimeWindow, WindowArguments, batch_shape, window_of
from ups_store.read.picking import pick, target_of
from ups_store.read.preload import PreloadReport, Request, preload, ram_budget
from ups_store.read.store_file import StoreFile
from ups_store.read.verify import Report
from ups_store.system import files, mappings
from ups_store.system.memory import num_cores
from ups_store.system.parallel import for_each
from ups_store.system.paths import check_one_file, path_of
from ups_store.system.runs import cast_into

MAX_THREADS = 8
BYTES_PER_THREAD = 1 << 20  # less is decoded sooner than another thread begins
PRELOAD_BYTES = 64 << 20  # between two calls of `progress`


class PackedStore(AnyStore):
    """A packed store, read-only: `sample` and `gather` decode; there is no array of samples to map.

    Opened by `ups_store.open`. Every chunk's checksum is checked before it is decoded. Picklable, usable
    after fork, safe to read from several threads.

    Args:
        path: Absolute path of the file.
        fd: Its descriptor, which stays the caller's.
        catalog: What it holds and where.

    Attributes:
        catalog: What it holds and where.
        config_hash: sha256 of the identity document, that of the mapped form too.
    """

    access: Literal["decode"] = "decode"

    def __init__(self, path: Path, fd: int, catalog: PackedCatalog) -> None:
        metas = [array.meta for array in catalog.arrays.values()]
        super().__init__(path, catalog.root, metas, catalog.layout.num_samples)
        self.catalog, self.codec, self.nbytes = catalog, catalog.packing.codec, catalog.nbytes
        self._file = StoreFile(path, fd, self.nbytes, access="pread", keeps_fd=True)
        self.network = self._file.network
        self._chunks = ChunkReader(self._file)
        self._plain: dict[str, npt.NDArray[Any]] = {}
        self._is_copy = False  # all of it in memory
        self._key = object()  # of its samples among those that are kept
        weakref.finalize(self, SHARED.forget, self._key)

    def _summary(self) -> list[str]:
        packing = self.catalog.packing
        return [f"{self.nbytes:,} bytes", f"packed by {packing.codec} {packing.level}"]

    @property
    def fingerprint(self) -> str:
        """Digest of the content, that of the mapped form: see `Store.fingerprint`."""
        return self.catalog.packing.fingerprint

    def whole(self, name: str) -> npt.NDArray[Any]:
        """A constant, decoded once, read-only.

        Raises:
            ArrayNotFoundError: Also a KeyError.
            SpecError: For an array with a sample axis, kind "unsupported", unless it was preloaded as a copy.
            CorruptChunkError: If the chunk is damaged.
        """
        meta = self._meta(name)
        self.check_open()
        if meta.is_constant or self._is_copy:
            return self._decoded(self.catalog.arrays[name])
        hint = 'use gather or sample, preload("copy"), or unpack it with `ups-store unpack`'
        raise self._unsupported("a packed array can't be mapped", hint, array=name)

    def _gather(
        self,
        samples: Samples,
        metas: list[ArrayMeta],
        window: WindowArguments,
        out: Mapping[str, npt.NDArray[Any]] | None,
        num_threads: int | None,
    ) -> dict[str, npt.NDArray[Any]]:
        """A sample is decoded whole, once a batch; for windows those decoded last are kept for a while."""
        if not self._is_copy:
            self._file.check_length()
        batch: dict[str, npt.NDArray[Any]] = {}
        for meta in metas:
            times = window_of(meta, len(samples), window)
            target = target_of(meta, batch_shape(meta, len(samples), times), out)
            self._decode(self.catalog.arrays[meta.name], samples, times, target, num_threads)
            batch[meta.name] = target
        return batch

    def _decode(
        self,
        array: PackedArray,
        samples: Samples,
        window: TimeWindow | None,
        out: npt.NDArray[Any],
        num_threads: int | None,
    ) -> None:
        whole = self._whole_of(array)
        if whole is not None:
            pick(whole, samples, window, out)
            return
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(samples.tolist()):
            rows.setdefault(number, []).append(row)
        is_direct = window is None and out.dtype == dtype_of(array.meta.dtype) and out[:1].flags.c_contiguous

        def decode(sample: int) -> None:
            first, *others = rows[sample]
            if is_direct:
                self._chunks.read(array, sample, out[first, ...])
                for row in others:
                    out[row, ...] = out[first, ...]
                return
            values = self._sample(array, sample, is_kept=window is not None)
            for row in (first, *others):
                cast_into(values if window is None else values[window.steps(row)], out[row, ...])

        if num_threads is None:
            num_threads = _num_threads(len(rows) * array.meta.sample_nbytes)
        for_each(decode, sorted(rows), num_threads=num_threads)

    def _sample(self, array: PackedArray, sample: int, *, is_kept: bool) -> npt.NDArray[Any]:
        key = self._key, array.meta.name, sample
        values = SHARED.get(key) if is_kept else None
        if values is None:
            values = np.empty(array.meta.sample_shape, dtype_of(array.meta.dtype))
            self._chunks.read(array, sample, values)
            if is_kept:
                SHARED.put(key, values)
        return values

    def _whole_of(self, array: PackedArray) -> npt.NDArray[Any] | None:
        """All samples of an array, where they are in memory: small ones are decoded together."""
        return self._plain.get(array.meta.name) if array.meta.is_sharded else self._decoded(array)

    def _decoded(self, array: PackedArray) -> npt.NDArray[Any]:
        """A plain chunk, decoded once."""
        name = array.meta.name
        if name not in self._plain:
            memory = bytearray(array.meta.nbytes)
            whole = np.ndarray(array.meta.shape, dtype_of(array.meta.dtype), memory)
            if array.entry:
                self._chunks.read(array, None, whole)
            whole.flags.writeable = False
            self._plain[name] = whole
        return self._plain[name]

    def _preload(self, request: Request) -> PreloadReport:
        mode = request.mode
        is_other = request.device is not None or request.samples is not None or request.shared
        if is_other or mode not in ("auto", "copy", "page-cache"):
            hint = 'use mode="copy" or "page-cache" alone, or unpack it with `ups-store unpack`'
            raise self._unsupported(f"a packed store has no samples to preload by mode {mode!r}", hint)
        refused = ""
        if mode in ("auto", "copy"):
            try:
                return self._preload_decoded(request)
            except MemoryLimitError as error:
                if mode == "copy":
                    raise
                refused = f"copy refused ({error.problem}: {error.found}); "
        report = preload(self._file, self.catalog, request, read_catalog=read_packed)
        return replace(report, why=refused + report.why)

    def _preload_decoded(self, request: Request) -> PreloadReport:
        """Decode every array that isn't yet; then nothing is read from the file any more."""
        began = time.perf_counter()
        arrays = [array for array in self.catalog.arrays.values() if array.meta.name not in self._plain]
        budget = ram_budget(sum(array.meta.nbytes for array in arrays), is_new=True)
        budget.check("copy", margin=request.margin, path=self.path)
        for array in arrays:
            self._decode_all(array, request)
        nbytes = sum(values.nbytes for values in self._plain.values())
        self._is_copy = True
        seconds = time.perf_counter() - began
        return PreloadReport(self.path, "copy", f"copy: {budget}", nbytes, seconds)

    def _decode_all(self, array: PackedArray, request: Request) -> None:
        if not array.meta.is_sharded:
            self._decoded(array)
            return
        memory = mappings.new_memory(array.meta.nbytes, kind=mmap.mmap)
        values = np.ndarray(array.meta.shape, dtype_of(array.meta.dtype), memory)
        step = max(1, PRELOAD_BYTES // array.meta.sample_nbytes)
        for first in range(0, len(self), step):
            block = range(first, min(first + step, len(self)))
            for_each(
                lambda sample: self._chunks.read(array, sample, values[sample, ...]),
                block,
                num_threads=request.num_threads or _num_threads(len(block) * array.meta.sample_nbytes),
            )
            if request.progress is not None:
                request.progress(len(block) * array.meta.sample_nbytes)
        values.flags.writeable = False
        self._plain[array.meta.name] = values

    def residency(self) -> float:
        """Share of the file that lies in the page cache, 0 to 1; 1 once all is decoded in memory."""
        if self._is_copy:
            self.check_open()
            return 1.0
        self._file.check_length()
        return mappings.resident_nbytes(self._file.mapping(), self.nbytes) / self.nbytes

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Check every byte of the file, and decode every chunk; see `AnyStore.verify`."""
        from ups_store.packed.verify import verify_packed

        self.check_open()
        with files.opened(self.path) as fd:
            if not self._is_same(read_packed(fd, self.path)):
                raise StoreReplacedError("another file took the path", path=self.path, hint="open it again")
            return verify_packed(fd, self.path, self.catalog, num_threads=num_threads, progress=progress)

    def _is_same(self, other: PackedCatalog) -> bool:
        return fingerprint_of(other) == fingerprint_of(self.catalog)

    def check_open(self) -> None:
        """Fail after `close`, with `StoreClosedError`."""
        self._file.check_open()

    def close(self) -> None:
        """Close the file; a read under way ends. Closing twice is allowed."""
        self._plain, self._is_copy = {}, False
        SHARED.forget(self._key)
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.path), fingerprint_of(self.catalog))


def _num_threads(nbytes: int) -> int:
    """Threads that decode so many bytes: one for each MiB, as many as there are processors, at most 8."""
    return max(1, min(MAX_THREADS, num_cores(), nbytes // BYTES_PER_THREAD))


def open_packed(path: str | os.PathLike[str]) -> PackedStore:
    """Open a packed store: reads its end, its directory and its metadata, the rest when it is asked for.

    `ups_store.open` does it for what it finds to be packed.

    Args:
        path: What `pack` wrote, usually `<task>_<split>.packed.zarr.zip`.
    Raises:
        StoreNotFoundError: If there is no file; also a FileNotFoundError.
        FormatError: If it isn't a packed store (kind "not_packed" for a mapped one), or is damaged.
        SpecError: For a pattern of several files, kind "partitions".
    """
    target = path_of(path)
    check_one_file(target)
    with files.opened(target) as fd:
        return open_descriptor(target, fd)


def open_descriptor(path: Path, fd: int) -> PackedStore:
    """Open a packed store by its descriptor, which stays the caller's; raises as `open_packed`."""
    return PackedStore(path, fd, read_packed(fd, path))


def _reopen(path: str, fingerprint: str) -> PackedStore:
    """What a pickled store becomes."""
    store = open_packed(path)
    check_unpickled(store, fingerprint, fingerprint_of(store.catalog))
    return store
