"""`Store`: an open mapped store; views without copying, batches into reused buffers (spec 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import NotCommittedError
from ups_store.format.layout import ArrayLayout, RaggedLayout
from ups_store.format.metadata import ArrayMeta
from ups_store.format.ragged import Offsets
from ups_store.read.base import AnyStore
from ups_store.read.catalog import Catalog, fingerprint_of
from ups_store.read.gather import (
    TIME_DIM,
    BatchArguments,
    SampledArray,
    Samples,
    check_indices,
    window_of,
)
from ups_store.read.ragged import RaggedArray, RaggedReader, check_not_ragged
from ups_store.read.recovery import Building, read_commits, read_committed
from ups_store.read.store_file import Access, StoreFile, TouchChecks, read_bytes
from ups_store.system import files, memory

if TYPE_CHECKING:
    from ups_store.read.preload import PreloadReport, Request
    from ups_store.read.verify import Report

Verify: TypeAlias = Literal["touch"]


class Store(AnyStore):
    """A store, mapped read-only: `store[name]` is an array, `store[i]` a sample, `len(store)` their number.

    Views stay valid as long as anybody holds them, also after `close` and after the file was replaced or
    removed: they keep the mapping alive. Picklable (the copy opens the file again and checks that it holds
    the same content), usable after fork, safe to read from several threads.

    Attributes:
        verify_on_touch: Whether samples are checked when they are first used.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        catalog: Catalog,
        *,
        building: Building | None = None,
        access: Access = "auto",
        verify: Verify | None = None,
        is_copy: bool = False,  # whether `fd` is a copy of the file in memory, sealed
    ) -> None:
        metas = [array.meta for array in catalog.layout.arrays.values()]
        super().__init__(path, catalog.root, metas, catalog.layout.num_samples)
        self.is_partial = building is not None
        self._catalog = catalog
        self._building = building
        self.nbytes = catalog.layout.file_nbytes
        self._file = StoreFile(path, fd, self.nbytes, access=access, keeps_fd=self.is_partial)
        if is_copy:
            self._file.use_copy(self._file.mapping(), fd=fd)
        self.network = self._file.network
        self._views: dict[str, npt.NDArray[Any]] = {}
        self._sampled: dict[str, SampledArray] = {}
        self._readers: dict[str, RaggedReader] = {}
        self._timed = {meta.name for meta in metas if TIME_DIM in meta.dims and not meta.is_constant}
        self.verify_on_touch = verify == "touch"
        self._checks = TouchChecks(self._file.read, path) if self.verify_on_touch else None

    def _summary(self) -> list[str]:
        size = f"{self.nbytes:,} bytes"
        return [size, "under construction"] if self.is_partial else [size]

    @property
    def access(self) -> Access:
        """Tell how samples are got: "map", or "pread" where `sample` and `gather` read the file."""
        return self._file.access

    @property
    def has_views(self) -> bool:
        """Tell whether `store[name]` is a view of the mapped file, without a check that would read it."""
        return self.access == "map" and not self.verify_on_touch

    @property
    def committed(self) -> npt.NDArray[np.bool_]:
        """Tell which samples are there, bool, shape (N,); of a store under construction as of now."""
        if self._building is None or self._building.header is None:
            return super().committed
        fd = self._file.descriptor.fd
        committed, _ = read_commits(fd, self._catalog.layout, self._building.header)
        if files.size(fd) == self.nbytes:  # finished meanwhile, so all were, and the table is cut off
            committed[:] = True
        return committed

    def whole(self, name: str) -> Any:
        """The whole array as a read-only view of the mapping, shape (N, ...), no copy; a constant likewise.

        A ragged array is a `RaggedArray`: a sequence of N samples, `str` where they are text.
        Also a store that is read with "pread" is mapped for this; its constants are read. With
        `verify="touch"` an array without slots is checked here, one with slots (samples of 4096 bytes or
        more) is not. Raises as `AnyStore.whole`.
        """
        array = self._layout(name)
        self.check_length()
        if self.is_partial and not array.meta.is_constant:
            self._require(np.arange(len(self)))
        if array.meta.is_ragged:
            return RaggedArray(self._reader(name))
        view = self._view(name)
        if not array.meta.is_sharded:
            self._check(array, np.arange(0))
        return view

    def sample(self, index: int) -> dict[str, Any]:
        """Give all arrays of one sample by name, as views of the mapped file; see `AnyStore.sample`."""
        if self.access == "pread":
            return super().sample(index)
        self.check_length()
        samples = check_indices([index], len(self), path=self.path)
        self._require(samples)
        number, values = int(samples[0]), {}
        for name in self._per_sample:
            if name in self._ragged:
                values[name] = self._views_of(name, samples, decode=True)[0]
                continue
            self._check(self._layout(name), samples)
            values[name] = self._view(name)[number, ...]
        return values

    def _gather(self, samples: Samples, metas: list[ArrayMeta], arguments: BatchArguments) -> dict[str, Any]:
        if self.is_partial:
            self._require(samples)
        batch, sampled = {}, self._sampled  # which `close` or `preload` in another thread replaces
        for meta in metas:
            array = sampled.get(meta.name)
            if array is None:
                layout = self._catalog.layout.arrays[meta.name]
                array = sampled[meta.name] = SampledArray(layout, self._file)
            times = window_of(meta, len(samples), arguments)
            if self._checks is not None:
                self._check(array.layout, samples)
            batch[meta.name] = array.gather(samples, times, arguments)
        return batch

    def _views_of(
        self, name: str, samples: Samples, *, decode: bool, num_threads: int | None = None
    ) -> list[Any]:
        self.check_length()
        reader = self._reader(name)
        if self.is_partial:
            self._require(samples)
        if self._checks is not None:
            layout = reader.layout
            for companion in (layout.offsets, layout.checks):
                self._check(companion, samples)
            self._checks.check_rows(layout, samples, *reader.extents(samples))
        return reader.views(samples, num_threads=num_threads, decode=decode)

    def _lengths_of(self, name: str) -> Samples:
        self.check_length()
        return np.diff(self._reader(name).all_offsets())

    def _reader(self, name: str) -> RaggedReader:
        readers = self._readers
        reader = readers.get(name)
        if reader is None:
            layout = self._catalog.layout.ragged[name]
            reader = readers[name] = RaggedReader(layout, self._file)
        return reader

    def _gather_usual(
        self, indices: Any, names: Sequence[str], start: Any, length: Any, stride: Any, out: Any, threads: Any
    ) -> dict[str, Any]:
        """See `SampledArray.gather_usual`."""
        self._file.check_length()
        batch: dict[str, npt.NDArray[Any]] = {}
        if type(indices) is list:
            indices = np.asarray(indices)
        if type(start) is int and type(indices) is np.ndarray:
            start = np.full(indices.shape, start)
        is_whole = start is None and length is None and stride == 1
        is_window = type(start) is np.ndarray and type(length) is int and type(stride) is int
        if self.is_partial or not (is_whole or is_window) or not (threads is None or threads == 1):
            return batch
        if is_window and self._timed.isdisjoint(names):
            return batch
        if out is not None and not (type(out) is dict and out.keys() <= set(names)):
            return batch
        for name in names:
            array, target = self._sampled.get(name), None if out is None else out.get(name)
            if array is None:
                break
            checked = None if self._checks is None else self._checks.flags(array.layout)
            copied = array.gather_usual(indices, start, length, stride, target, checked)
            if copied is None:
                break
            batch[name] = copied
        return batch

    def _preload(self, request: Request) -> PreloadReport:
        from ups_store.read.preload import preload

        if self.is_partial:
            raise NotCommittedError(
                "the store is under construction", path=self.path, hint="finish it, then open it again"
            )
        if request.mode == "device" or request.device is not None:
            hint = 'preload with mode="page-cache" or "copy"'
            check_not_ragged(self.metas.values(), "memory of a device", hint, path=self.path)
        report = preload(self._file, self._catalog, request)
        self._forget_views()
        return report

    def residency(self) -> float:
        """Share of the store that lies in RAM, as page cache or as a copy; see `AnyStore.residency`."""
        self.check_length()
        return memory.resident_nbytes(self._file.mapping(), self.nbytes) / self.nbytes

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Check every byte of the file; see `AnyStore.verify`."""
        from ups_store.read.verify import verify_file

        if self.is_partial and files.size(self._file.descriptor.fd) != self.nbytes:
            hint = "finish it first; `ups-store doctor` says which committed samples are intact"
            raise NotCommittedError("it is under construction", path=self.path, kind="building", hint=hint)
        # of a store under construction it is made when that is finished
        fingerprint = None if self.is_partial else self.fingerprint
        return verify_file(self.path, fingerprint=fingerprint, num_threads=num_threads, progress=progress)

    @property
    def fingerprint(self) -> str:
        """Digest of identity and all entries' checksums."""
        return fingerprint_of(self._catalog)

    def close(self) -> None:
        """Let go of the mapping; it goes when its last view does. Closing twice is allowed."""
        self._forget_views()
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        verify = "touch" if self.verify_on_touch else None
        options = {"partial": self.is_partial, "access": self._file.file_access, "verify": verify}
        return self._reopened(str(self.path), options | {"copy_path": self._file.copy_path})

    def check_open(self) -> None:
        """Fail after `close`, with `StoreClosedError`."""
        self._file.check_open()

    def check_length(self) -> None:
        """Raise `TruncatedError` if the file was cut: touching what is gone ends the process (spec 7.5)."""
        self._file.check_length()

    def _check(self, array: ArrayLayout, samples: Samples) -> None:
        # A small array's checksum is written when the store is finished (spec 6.8).
        is_unwritten = self.is_partial and array.meta.is_committed and not array.meta.is_sharded
        if self._checks is not None and not is_unwritten:
            self._checks.check(array, samples)

    def _forget_views(self) -> None:
        # What another thread is about to keep goes with the old ones.
        self._views, self._sampled, self._readers = {}, {}, {}

    def _layout(self, name: str) -> ArrayLayout:
        return self._catalog.layout.arrays[self._meta(name).name]

    def _view(self, name: str) -> npt.NDArray[Any]:
        views = self._views
        view = views.get(name)
        if view is None:
            view = views[name] = self._file.view(self._layout(name))
        return view

    def _require(self, samples: Samples) -> None:
        if self._building is None or self._building.header is None or not len(samples):
            return
        fd = self._file.descriptor.fd
        unique, rows = np.unique(samples, return_inverse=True)
        committed = read_committed(fd, self._catalog.layout, self._building.header, unique)
        missing = samples[~committed[rows]]
        if len(missing) and files.size(fd) != self.nbytes:  # else finished meanwhile, as for `committed`
            raise NotCommittedError(
                f"{len(missing)} of the samples are not committed yet, the first of them",
                path=self.path,
                sample=int(missing[0]),
                hint="`store.committed` says which are there",
            )


class SpoolStore(Store):
    """What is committed of a store whose number of samples isn't known yet (spec 6.13).

    The first samples, as many as were committed when this was opened; open it again to see more.

    Attributes:
        nbytes: What the file took on the disk then.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_samples = int(np.argmin(np.append(super().committed, False)))
        self.nbytes = files.allocated_bytes(self._file.descriptor.fd)
        num_rows = {name: int(self._offsets(name)[-1]) for name in self._ragged}
        for name, meta in self.metas.items():
            if not meta.is_constant:
                shape = (num_rows.get(name, len(self)), *meta.shape[1:])
                self.metas[name] = replace(meta, shape=shape)

    @property
    def committed(self) -> npt.NDArray[np.bool_]:
        """Tell which samples are there: all."""
        return np.ones(len(self), bool)

    def whole(self, name: str) -> Any:
        """Give the array as a view, of the samples that are there; see `Store.whole`."""
        array, meta = super().whole(name), self._meta(name)
        return array if meta.is_constant or meta.is_ragged else array[: len(self)]

    def _lengths_of(self, name: str) -> Samples:
        self.check_length()
        return np.diff(self._offsets(name))

    def _offsets(self, name: str) -> Offsets:
        layout = self._catalog.layout.ragged[name]
        return read_offsets_of_spool(self._file.descriptor.fd, layout, path=self.path)[: len(self) + 1]

    def _reader(self, name: str) -> RaggedReader:
        reader = super()._reader(name)
        reader.num_samples = len(self)
        return reader

    def _summary(self) -> list[str]:
        return [f"{self.nbytes:,} bytes", "under construction, its number of samples not known yet"]


def read_offsets_of_spool(fd: int, layout: RaggedLayout, *, path: Path) -> Offsets:
    """All offsets of a ragged array of a spool, as they stand there: they grow, and have no checksum yet."""
    return np.frombuffer(read_bytes(fd, layout.offsets.offset, layout.offsets.meta.nbytes, path=path), "<i8")
