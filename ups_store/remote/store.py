"""`RemoteStore`: a store in an object store or behind https, read in place by ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError, StoreClosedError
from ups_store.format.layout import ArrayLayout
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.format.ragged import Offsets
from ups_store.packed.decoded import DecodedSamples
from ups_store.read.base import AnyStore
from ups_store.read.catalog import Catalog, fingerprint_of
from ups_store.read.gather import Samples, TimeWindow, WindowArguments, batch_shape, window_of
from ups_store.read.offsets import check_offsets
from ups_store.read.picking import pick, target_of
from ups_store.read.preload import PreloadReport, Request
from ups_store.read.ragged import decoded
from ups_store.read.verify import Report
from ups_store.remote.chunks import REQUESTS_IN_FLIGHT, Chunk, ChunkReader, Numbering, Use
from ups_store.remote.client import RemoteObject
from ups_store.remote.slot_cache import SlotCache
from ups_store.system.runs import cast_into

KEPT_BYTES = 256 << 20  # of samples that windows were cut out of, in memory
PRELOAD_BYTES = 64 << 20  # between two calls of `progress`

Reopen = Callable[..., "RemoteStore"]


class RemoteStore(AnyStore):
    """A store that is read where it is: `sample` and `gather` fetch chunks, and check every one of them.

    Opened by `ups_store.open(url)`. An array of small samples is one chunk, fetched whole with its first
    sample and kept in memory; of others a sample is fetched whole, also for a window of it. Picklable, safe
    to read from several threads; after a fork see `RemoteObject`.

    Args:
        remote: The object, pinned to the version that the catalog was read from.
        catalog: What it holds and where.
        cache: Chunks of it on this machine; None for none.
        reopen: What a pickled store becomes, given its fingerprint and `options`.
        options: Arguments for that.

    Attributes:
        path: The URL, without what is secret; `str` of it is the URL again.
        remote: The object.
        cache: Chunks of it on this machine, or None.
    """

    access: Literal["remote"] = "remote"

    def __init__(
        self,
        remote: RemoteObject,
        catalog: Catalog,
        *,
        cache: SlotCache | None,
        reopen: Reopen,
        options: Mapping[str, Any],
    ) -> None:
        metas = [array.meta for array in catalog.layout.arrays.values()]
        super().__init__(remote.url.path, catalog.root, metas, catalog.layout.num_samples)
        self.remote, self.cache, self._catalog = remote, cache, catalog
        self.network, self.nbytes = remote.url.scheme, catalog.layout.file_nbytes
        self._numbering = Numbering(catalog.layout)
        self._chunks = ChunkReader(remote, cache, self.path)
        self._wholes: dict[str, npt.NDArray[Any]] = {}
        self._kept = DecodedSamples(KEPT_BYTES)
        self._reopen, self._options = reopen, dict(options)
        self._is_closed = False

    def _summary(self) -> list[str]:
        return [f"{self.nbytes:,} bytes", f"read from {self.network}"]

    @property
    def modified_s(self) -> float:
        """When the object was written, seconds since the epoch."""
        return self.remote.version.modified_s

    @property
    def fingerprint(self) -> str:
        """Digest of the content: see `Store.fingerprint`."""
        return fingerprint_of(self._catalog)

    def whole(self, name: str) -> npt.NDArray[Any]:
        """A constant, fetched once, read-only.

        Raises:
            ArrayNotFoundError: Also a KeyError.
            SpecError: For an array with a sample axis, kind "unsupported".
            CorruptChunkError: If the chunk is damaged.
        """
        meta = self._meta(name)
        self.check_open()
        if meta.is_constant:
            return self._whole(self._catalog.layout.arrays[name])
        hint = "use gather or sample, or copy the store here"
        raise self._unsupported("its samples are fetched when they are asked for", hint, array=name)

    def _gather(
        self,
        samples: Samples,
        metas: list[ArrayMeta],
        window: WindowArguments,
        out: Mapping[str, npt.NDArray[Any]] | None,
        num_threads: int | None,
    ) -> dict[str, Any]:
        """Neighbouring samples are fetched together."""
        batch: dict[str, npt.NDArray[Any]] = {}
        wanted: list[tuple[Chunk, Use]] = []
        whole: list[tuple[ArrayLayout, TimeWindow | None]] = []
        for meta in metas:
            array = self._catalog.layout.arrays[meta.name]
            times = window_of(meta, len(samples), window)
            shape = batch_shape(meta, len(samples), times)
            target = batch[meta.name] = target_of(meta, shape, out)
            if not target.size:
                continue
            if meta.is_sharded:
                wanted += self._slots(array, samples, times, target)
            else:
                wanted += self._missing(array)
                whole.append((array, times))
        self._chunks.read(wanted, num_threads=num_threads)
        for array, times in whole:
            pick(self._whole(array), samples, times, batch[array.meta.name])
        return batch

    def _slots(
        self, array: ArrayLayout, samples: Samples, window: TimeWindow | None, out: npt.NDArray[Any]
    ) -> list[tuple[Chunk, Use]]:
        """The slots that a batch needs, and what copies each into its rows; those in memory are copied."""
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(samples.tolist()):
            rows.setdefault(number, []).append(row)
        shape, dtype, name = array.meta.sample_shape, dtype_of(array.meta.dtype), array.meta.name

        def copy(sample: int, values: npt.NDArray[Any]) -> None:
            for row in rows[sample]:
                cast_into(values if window is None else values[window.steps(row)], out[row, ...])

        def user(sample: int) -> Use:
            def use(payload: memoryview) -> None:
                values = np.ndarray(shape, dtype, payload)
                if window is not None:
                    values = values.copy()
                    self._kept.put((self, name, sample), values)
                copy(sample, values)

            return use

        wanted = []
        for sample in sorted(rows):
            kept = None if window is None else self._kept.get((self, name, sample))
            if kept is None:
                wanted.append((self._numbering.slot(array, sample), user(sample)))
            else:
                copy(sample, kept)
        return wanted

    def _missing(self, array: ArrayLayout) -> list[tuple[Chunk, Use]]:
        """The chunk of an array without slots, and what keeps it in memory, unless it is there."""
        meta = array.meta
        if meta.name in self._wholes:
            return []

        def keep(payload: memoryview) -> None:
            values = np.ndarray(meta.shape, dtype_of(meta.dtype), bytearray(payload))
            values.flags.writeable = False
            self._wholes[meta.name] = values

        if array.entry is None:
            keep(memoryview(b""))
            return []
        return [(self._numbering.whole(array), keep)]

    def _whole(self, array: ArrayLayout) -> npt.NDArray[Any]:
        self._chunks.read(self._missing(array))
        return self._wholes[array.meta.name]

    def _views_of(
        self, name: str, samples: Samples, *, decode: bool, num_threads: int | None = None
    ) -> list[Any]:
        layout = self._catalog.layout.ragged[name]
        meta, offsets = layout.rows.meta, self._offsets(name)
        checks, dtype = self._whole(layout.checks), dtype_of(meta.dtype)
        values: dict[int, npt.NDArray[Any]] = {}
        wanted: list[tuple[Chunk, Use]] = []

        def user(target: npt.NDArray[Any]) -> Use:
            def use(payload: memoryview) -> None:
                target[...] = np.ndarray(target.shape, dtype, payload)
                target.flags.writeable = False

            return use

        for sample in set(samples.tolist()):
            start, end = int(offsets[sample]), int(offsets[sample + 1])
            values[sample] = np.empty((end - start, *meta.sample_shape), dtype)
            if values[sample].size:
                chunk = self._numbering.rows(name, sample, layout.extent(start, end), int(checks[sample]))
                wanted.append((chunk, user(values[sample])))
        self._chunks.read(wanted, num_threads=num_threads)
        found = [(sample, values[sample]) for sample in samples.tolist()]
        if meta.encoding is None or not decode:
            return [value for _, value in found]
        return [decoded(value, meta, sample, path=self.path) for sample, value in found]

    def _offsets(self, name: str) -> Offsets:
        """All offsets of a ragged array, checked when they come."""
        layout = self._catalog.layout.ragged[name]
        is_new = layout.offsets.meta.name not in self._wholes
        offsets: Offsets = self._whole(layout.offsets)
        if is_new:
            try:
                check_offsets(offsets, layout, path=self.path)
            except CorruptChunkError:
                del self._wholes[layout.offsets.meta.name]
                raise
        return offsets

    def _lengths_of(self, name: str) -> Samples:
        return np.diff(self._offsets(name))

    def _preload(self, request: Request) -> PreloadReport:
        """Refused for every mode but "auto", which leaves the store as it is."""
        if request.mode != "auto":
            hint = "open it with a cache, which an epoch fills, or copy it here"
            raise self._unsupported(f"a remote store can't be preloaded by mode {request.mode!r}", hint)
        where = "without a cache" if self.cache is None else f"chunks are kept in {self.cache.path.parent}"
        return PreloadReport(self.path, "mapped", f"remote, {where}", 0, 0.0)

    def residency(self) -> float:
        """Share of the store that lies in the local cache, 0 to 1."""
        self.check_open()
        return 0.0 if self.cache is None else min(1.0, self.cache.nbytes / self.nbytes)

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Fetch and check every byte of the object; the cache isn't asked. See `AnyStore.verify`."""
        from ups_store.read.verify import verify_catalog

        self.check_open()
        num_threads = num_threads or REQUESTS_IN_FLIGHT
        read = self._read
        return verify_catalog(read, self.path, self._catalog, num_threads=num_threads, progress=progress)

    def _read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.remote.read(offset, nbytes))

    def check_open(self) -> None:
        """Fail after `close`, with `StoreClosedError`."""
        if self._is_closed:
            raise StoreClosedError("the store is closed", path=self.path, hint="open it again")

    def close(self) -> None:
        """Let go of memory and cache; a read under way ends. Closing twice is allowed."""
        self._is_closed = True
        self._wholes = {}
        self._kept.forget(self)
        if self.cache is not None:
            self.cache.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, (self.remote.url.text, self.fingerprint, self._options)
