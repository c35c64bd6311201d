"""`Store`: a finished file, mapped; views without copying, batches into reused buffers (spec 7)."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from ups_store import files
from ups_store.array_spec import ArraySpec
from ups_store.catalog import Catalog, fingerprint_of, read_finished
from ups_store.errors import (
    ArrayNotFoundError,
    NotCommittedError,
    SampleIndexError,
    SpecError,
    StoreClosedError,
    StoreNotFoundError,
    StoreReplacedError,
)
from ups_store.gather import gather_array, window_of
from ups_store.layout import ArrayLayout
from ups_store.metadata import dtype_of
from ups_store.recovery import (
    BUILDING_SUFFIX,
    Building,
    State,
    building_path,
    read_building_file,
    read_commits,
)

if TYPE_CHECKING:
    from ups_store.verify import Report

Indices = Sequence[int] | npt.NDArray[np.integer[Any]]


class Store:
    """A store, mapped read-only: `store[name]` is a whole array, `len(store)` the number of samples.

    Views stay valid as long as anybody holds them, also after `close` and after the file was replaced or
    removed: they keep the mapping alive. Picklable (the copy opens the file again and checks that it holds
    the same content), usable after fork, safe to read from several threads.

    Attributes:
        path: Absolute path of the file.
        identity: The identity document: what the content was made from.
        config_hash: sha256 of the identity, 64 hexadecimal digits.
        attrs: Attributes of the root group.
        version: Format version of the file, `(major, minor)`.
    """

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        catalog: Catalog,
        *,
        building: Building | None = None,
        fd: int = -1,
    ) -> None:
        self.path = path
        self.identity: Mapping[str, Any] = catalog.root.identity
        self.config_hash = catalog.root.config_hash
        self.attrs: Mapping[str, Any] = catalog.root.attrs
        self.version = catalog.root.version
        self._catalog = catalog
        self._mapping: mmap.mmap | None = mapping
        self._building = building
        self.fd = fd  # of a partial store only, to read its commit table again
        self._views: dict[str, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        """N, the number of samples."""
        return self._catalog.layout.num_samples

    __iter__ = None  # over samples or over names? `range(len(store))` and `store.arrays` say which

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.layout.arrays

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name} {tuple(spec.shape)} {spec.dtype}" for name, spec in self.arrays.items())
        return f"<ups_store.Store {self.path.name}: {len(self)} samples; {arrays}>"

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays with a sample axis; `create` takes them as they are."""
        return {a.meta.name: _spec(a) for a in self._catalog.layout.per_sample}

    @property
    def constants(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays without a sample axis, as views; `create` takes them as they are."""
        return {
            name: self._view(name) for name, a in self._catalog.layout.arrays.items() if a.meta.is_constant
        }

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Dimension names of every array."""
        return {name: array.meta.dims for name, array in self._catalog.layout.arrays.items()}

    @property
    def nbytes(self) -> int:
        """Length of the finished file in bytes."""
        return self._catalog.layout.file_nbytes

    @property
    def committed(self) -> npt.NDArray[np.bool_]:
        """Which samples are there, bool, shape (N,); of a store under construction as of now."""
        if self._building is None or self._building.header is None:
            return np.ones(len(self), bool)
        self._map()
        committed, _ = read_commits(self.fd, self._catalog.layout, self._building.header)
        if files.size(self.fd) == self.nbytes:  # finished meanwhile, so all were, and the table is cut off
            committed[:] = True
        return committed

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The whole array as a read-only view, shape (N, ...), no copy; a constant likewise.

        Raises:
            ArrayNotFoundError: Also a KeyError.
            NotCommittedError: For an array of a store under construction.
        """
        view = self._view(name)
        if self._building is not None and not self._catalog.layout.arrays[name].meta.is_constant:
            self._require(np.arange(len(self)))
        return view

    def sample(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """All arrays of one sample as read-only views, by name; shape () for a number.

        Raises:
            SampleIndexError: Unless 0 <= index < N; also an IndexError.
            NotCommittedError: If the store is under construction and the sample isn't there yet.
        """
        self._require(self._check_indices([index]))
        return {
            array.meta.name: self._view(array.meta.name)[index, ...]
            for array in self._catalog.layout.per_sample
        }

    def gather(
        self,
        indices: Indices,
        names: Sequence[str] | None = None,
        *,
        start: int | Indices | None = None,
        length: int | None = None,
        stride: int = 1,
        out: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Copy samples, or windows of them, into a batch.

        Args:
            indices: Sample numbers, shape (B,), in any order, repeats allowed.
            names: Arrays to take; all with a sample axis by default.
            start: First time step of the window, one number or one per sample; 0 by default.
            length: Number of time steps of the window; as many as there are by default. Arrays without a
                dimension "time" are taken whole.
            stride: Time steps from one to the next.
            out: Arrays to write to, by name, shape (B, ...), C-contiguous samples; new memory costs more than
                the copy, so reuse what an earlier call returned.
        Returns:
            Arrays of shape (B, ...) by name: those of `out`, else new ones that the caller owns.
        Raises:
            SampleIndexError: For a sample or window outside the store.
            SpecError: For an `out` of another shape or dtype.
        """
        chosen = list(self.arrays) if names is None else list(names)
        samples = self._check_indices(indices)
        self._require(samples)
        result = {}
        for name in chosen:
            array = self._layout(name)
            if array.meta.is_constant:
                raise SpecError("it has no sample axis", path=self.path, array=name, hint="use store[name]")
            window = window_of(array.meta, len(samples), start=start, length=length, stride=stride)
            target = None if out is None else out.get(name)
            result[name] = gather_array(array, self._map(), self._view(name), samples, window, target)
        return result

    def residency(self) -> float:
        """Share of the file that lies in RAM (page cache), 0 to 1."""
        return files.resident_nbytes(self._map(), self.nbytes) / self.nbytes

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Check every byte of the file: payloads by checksum, all others by making them again.

        Args:
            num_threads: Threads that read and check; one per processor by default.
            progress: Called with the number of bytes that were checked since the last call.
        Returns:
            A report with `.ok` and `.problems`.
        Raises:
            StoreReplacedError: If another file took the path.
        """
        from ups_store.verify import verify_file

        fingerprint = None if self._building else self.fingerprint  # which is made when the store is finished
        return verify_file(self.path, fingerprint=fingerprint, num_threads=num_threads, progress=progress)

    @property
    def fingerprint(self) -> str:
        """Digest of identity and all entries' checksums: equal for equal content, cheap to compare."""
        return fingerprint_of(self._catalog)

    def close(self) -> None:
        """Let go of the mapping; it goes when its last view does. Closing twice is allowed."""
        self._views.clear()
        self._mapping = None
        if self.fd >= 0:
            files.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        is_partial = self._building is not None
        return _reopen, (
            str(self.path),
            is_partial,
            None if is_partial else self.fingerprint,
            self.config_hash,
        )

    def _map(self) -> mmap.mmap:
        if self._mapping is None:
            raise StoreClosedError("the store is closed", path=self.path, hint="open it again")
        return self._mapping

    def _layout(self, name: str) -> ArrayLayout:
        try:
            return self._catalog.layout.arrays[name]
        except KeyError:
            names = ", ".join(self._catalog.layout.arrays)
            raise ArrayNotFoundError(
                f"no array {name!r}", path=self.path, expected=f"one of {names}"
            ) from None

    def _view(self, name: str) -> npt.NDArray[Any]:
        view = self._views.get(name)
        if view is None:
            view = _make_view(self._map(), self._layout(name))
            self._views[name] = view
        return view

    def _check_indices(self, indices: Indices) -> npt.NDArray[np.int64]:
        raw = np.asarray(indices)
        if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
            raise SpecError(
                "indices", kind="index", expected="integers, shape (B,)", found=f"{raw.dtype} {raw.shape}"
            )
        samples = raw.astype(np.int64, copy=False)
        if samples.size and (samples.min() < 0 or samples.max() >= len(self)):
            wrong = int(samples[(samples < 0) | (samples >= len(self))][0])
            expected = f"0 <= index < {len(self)}"
            raise SampleIndexError("no such sample", path=self.path, expected=expected, found=wrong)
        return samples

    def _require(self, samples: npt.NDArray[np.int64]) -> None:
        if self._building is None:
            return
        missing = samples[~self.committed[samples]]
        if len(missing):
            raise NotCommittedError(
                f"{len(missing)} of the samples are not committed yet, the first of them",
                path=self.path,
                sample=int(missing[0]),
                hint="`store.committed` tells which are there",
            )


def open_store(path: str | os.PathLike[str], *, partial: bool = False) -> Store:
    """Open a store: reads its end, its directory and its metadata, and maps the rest.

    Args:
        path: A finished store, usually `<task>_<split>.zarr.zip`; with `partial` also a building file itself.
        partial: Whether to open what has been committed so far if there is no finished store yet.
    Raises:
        StoreNotFoundError: If there is no file; also a FileNotFoundError.
        FormatError: If it isn't a store, is damaged in its structure, or is newer than this program.
    """
    target = Path(path).absolute()
    if partial and target.name.endswith(BUILDING_SUFFIX):
        return _open_building(target.with_name(target.name.removesuffix(BUILDING_SUFFIX)))
    try:
        fd = files.open_existing(target)
    except StoreNotFoundError as error:
        if not files.exists(building_path(target)):
            raise
        if partial:
            return _open_building(target)
        error.hint = "it is being built: run the build again to finish it, or open it with partial=True"
        raise
    try:
        catalog = read_finished(fd, target)
        return Store(target, files.map_private(fd, catalog.layout.file_nbytes), catalog)
    finally:
        files.close(fd)


def _open_building(path: Path) -> Store:
    where = building_path(path)
    fd = files.open_existing(where)
    try:
        building = read_building_file(fd, where)
        mapping = files.map_private(fd, building.catalog.layout.file_nbytes)
    except BaseException:
        files.close(fd)
        raise
    if building.state is State.FINISHED:
        files.close(fd)
        return Store(path, mapping, building.catalog)
    return Store(path, mapping, building.catalog, building=building, fd=fd)


def _reopen(path: str, partial: bool, fingerprint: str | None, config_hash: str) -> Store:
    store = open_store(path, partial=partial)
    same = store.config_hash == config_hash and fingerprint in (None, store.fingerprint)
    if not same:
        store.close()
        raise StoreReplacedError(
            "the file was replaced since this object was pickled",
            path=path,
            expected=f"content {fingerprint or config_hash}",
            found=store.fingerprint,
            hint="open it again",
        )
    return store


def _spec(array: ArrayLayout) -> ArraySpec:
    meta = array.meta
    return ArraySpec(meta.shape, dtype_of(meta.dtype), dims=meta.dims, attrs=meta.attrs)


def _make_view(mapping: mmap.mmap, array: ArrayLayout) -> npt.NDArray[Any]:
    """The array over the mapping: one strided array where there are slots (spec 5.5)."""
    meta, dtype = array.meta, dtype_of(array.meta.dtype)
    if array.entry is None:
        view = np.zeros(meta.shape, dtype)
    else:
        view = np.ndarray(meta.shape, dtype, mapping, array.offset, _strides(array, dtype.itemsize))
    view.flags.writeable = False
    return view


def _strides(array: ArrayLayout, itemsize: int) -> tuple[int, ...]:
    shape = array.meta.sample_shape
    inner = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return inner if array.meta.is_constant else (array.stride, *inner)
