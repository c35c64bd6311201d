"""`Store`: a finished file, mapped; views without copying, batches into reused buffers (spec 7)."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store import files
from ups_store.array_spec import ArraySpec
from ups_store.catalog import Catalog, fingerprint_of, read_finished
from ups_store.checksum import Bytes
from ups_store.errors import (
    ArrayNotFoundError,
    NotCommittedError,
    SampleIndexError,
    SpecError,
    StoreClosedError,
    StoreNotFoundError,
    StoreReplacedError,
)
from ups_store.gather import TIME_DIM, gather_array, output_for, window_of
from ups_store.layout import ArrayLayout
from ups_store.metadata import dtype_of
from ups_store.pread import cut, read_bytes, read_constant, read_samples
from ups_store.recovery import (
    BUILDING_SUFFIX,
    Building,
    State,
    building_path,
    read_building_file,
    read_commits,
)
from ups_store.touch import TouchChecks

if TYPE_CHECKING:
    from ups_store.verify import Report

Indices = Sequence[int] | npt.NDArray[np.integer[Any]]
Access: TypeAlias = Literal["auto", "map", "pread"]
Verify: TypeAlias = Literal["touch"]


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
        access: "map", or "pread" where `sample` and `gather` read instead of copying from the mapping.
        network: Name of the network file system that the file lies on, such as "nfs"; None for local ones.
        is_partial: Whether it was opened while it was under construction.
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
    ) -> None:
        self.path = path
        self.identity: Mapping[str, Any] = catalog.root.identity
        self.config_hash = catalog.root.config_hash
        self.attrs: Mapping[str, Any] = catalog.root.attrs
        self.version = catalog.root.version
        self.network = files.network_file_system(fd)
        self.access = access if access != "auto" else "pread" if self.network else "map"
        self.is_partial = building is not None
        self._catalog = catalog
        self._file_nbytes = catalog.layout.file_nbytes
        self._building = building
        self._views: dict[str, npt.NDArray[Any]] = {}
        # A mapping needs no descriptor of ours; commit tables and samples that are read do.
        needs_fd = self.access == "pread" or self.is_partial
        self._mapping: mmap.mmap | None = None if self.access == "pread" else self._new_mapping(fd)
        self._fd = files.duplicate(fd) if needs_fd else -1
        self._closing = weakref.finalize(self, files.close, self._fd) if needs_fd else None
        self._verify = verify
        self._checks = TouchChecks(self._read, path) if verify == "touch" else None

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
        return {name: self[name] for name, a in self._catalog.layout.arrays.items() if a.meta.is_constant}

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Dimension names of every array."""
        return {name: array.meta.dims for name, array in self._catalog.layout.arrays.items()}

    @property
    def nbytes(self) -> int:
        """Length of the finished file in bytes."""
        return self._file_nbytes

    @property
    def committed(self) -> npt.NDArray[np.bool_]:
        """Which samples are there, bool, shape (N,); of a store under construction as of now."""
        if self._building is None or self._building.header is None:
            return np.ones(len(self), bool)
        self._check_open()
        committed, _ = read_commits(self._fd, self._catalog.layout, self._building.header)
        if files.size(self._fd) == self.nbytes:  # finished meanwhile, so all were, and the table is cut off
            committed[:] = True
        return committed

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The whole array as a read-only view of the mapping, shape (N, ...), no copy; a constant likewise.

        Also a store that is read with "pread" is mapped for this; its constants are read. With
        `verify="touch"` an array without slots is checked here, one with slots (samples of 4096 bytes or
        more) is not.

        Raises:
            ArrayNotFoundError: Also a KeyError.
            NotCommittedError: For an array of a store under construction.
            TruncatedError: If another program cut the file.
            CorruptChunkError: If `verify="touch"` finds damage.
        """
        array = self._layout(name)
        self._check_length()
        view = self._view(name)
        if not array.meta.is_constant:
            self._require(np.arange(len(self) if self.is_partial else 0))
        if not array.meta.is_sharded:
            self._check(array, np.arange(0))
        return view

    def sample(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """All arrays of one sample as read-only views, by name; shape () for a number.

        Raises:
            SampleIndexError: Unless 0 <= index < N; also an IndexError.
            NotCommittedError: If the store is under construction and the sample isn't there yet.
            TruncatedError: If another program cut the file.
            CorruptChunkError: If `verify="touch"` finds damage.
        """
        if self.access == "pread":
            read = self.gather([index])
            for batch in read.values():
                batch.flags.writeable = False
            return {name: batch[0, ...] for name, batch in read.items()}
        samples = self._check_indices([index])
        self._check_length()
        self._require(samples)
        values = {}
        for array in self._catalog.layout.per_sample:
            self._check(array, samples)
            values[array.meta.name] = self._view(array.meta.name)[index, ...]
        return values

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
            TruncatedError: If another program cut the file.
            CorruptChunkError: If `verify="touch"` finds damage.
        """
        chosen = list(self.arrays) if names is None else list(names)
        samples = self._check_indices(indices)
        self._check_length()
        is_window = start is not None or length is not None or stride != 1
        self._check_effect(chosen, is_window, out)
        self._require(samples)
        result = {}
        for name in chosen:
            array = self._layout(name)
            if array.meta.is_constant:
                raise SpecError("it has no sample axis", path=self.path, array=name, hint="use store[name]")
            window = window_of(array.meta, len(samples), start=start, length=length, stride=stride)
            target = output_for(array, len(samples), window, None if out is None else out.get(name))
            self._check(array, samples)
            if self.access == "pread":
                read_samples(self._fd, array, samples, window, target, path=self.path)
            else:
                gather_array(array, self._map(), self._view(name), samples, window, target)
            result[name] = target
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

        fingerprint = (
            None if self.is_partial else self.fingerprint
        )  # which is made when the store is finished
        return verify_file(self.path, fingerprint=fingerprint, num_threads=num_threads, progress=progress)

    @property
    def fingerprint(self) -> str:
        """Digest of identity and all entries' checksums: equal for equal content, cheap to compare."""
        return fingerprint_of(self._catalog)

    def close(self) -> None:
        """Let go of the mapping; it goes when its last view does. Closing twice is allowed."""
        self._views.clear()
        self._mapping = None
        self._fd = -1
        if self._closing is not None:
            self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"partial": self.is_partial, "access": self.access, "verify": self._verify}
        return _reopen, (
            str(self.path),
            None if self.is_partial else self.fingerprint,
            self.config_hash,
            options,
        )

    def _check_open(self) -> None:
        if self._mapping is None and self._fd < 0:
            raise StoreClosedError("the store is closed", path=self.path, hint="open it again")

    def _map(self) -> mmap.mmap:
        self._check_open()
        if self._mapping is None:
            self._mapping = self._new_mapping(self._fd)
        return self._mapping

    def _new_mapping(self, fd: int) -> mmap.mmap:
        return files.map_private(fd, self.nbytes)

    def _check_length(self) -> None:
        """Fail if the file was cut: touching what is gone of a mapping would end the process (spec 7.5)."""
        if self._mapping is not None:
            nbytes = files.mapped_file_nbytes(self._mapping)
        else:
            self._check_open()
            nbytes = files.size(self._fd)
        if nbytes < self._file_nbytes:
            raise cut(self.path, self._file_nbytes, nbytes)

    def _check(self, array: ArrayLayout, samples: npt.NDArray[np.int64]) -> None:
        # A small array's checksum is written when the store is finished (spec 6.8).
        is_unwritten = self.is_partial and not (array.meta.is_sharded or array.meta.is_constant)
        if self._checks is not None and not is_unwritten:
            self._checks.check(array, samples)

    def _read(self, first: int, nbytes: int) -> Bytes:
        """Bytes of the file, the way that `gather` gets them."""
        if self.access == "pread":
            return read_bytes(self._fd, first, nbytes, path=self.path)
        return memoryview(self._map())[first : first + nbytes]

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
            array = self._layout(name)
            if self.access == "pread" and array.meta.is_constant and array.entry:
                self._check_open()
                view = read_constant(self._fd, array, path=self.path)
                view.flags.writeable = False
            else:
                view = _make_view(self._map(), array)
            self._views[name] = view
        return view

    def _check_indices(self, indices: Indices) -> npt.NDArray[np.int64]:
        raw = np.asarray(indices)
        if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
            raise SpecError(
                "indices", kind="index", expected="integers, shape (B,)", found=f"{raw.dtype} {raw.shape}"
            )
        samples = raw.astype(np.int64, copy=False)
        # As unsigned numbers the negative ones are huge: one pass instead of two.
        if samples.size and np.maximum.reduce(samples.view(np.uint64)) >= len(self):
            wrong = int(samples[(samples < 0) | (samples >= len(self))][0])
            expected = f"0 <= index < {len(self)}"
            raise SampleIndexError("no such sample", path=self.path, expected=expected, found=wrong)
        return samples

    def _check_effect(self, chosen: Sequence[str], is_window: bool, out: Mapping[str, Any] | None) -> None:
        """Refuse arguments of `gather` that would have no effect: they are mistakes."""
        if is_window and not any(TIME_DIM in self._layout(name).meta.dims for name in chosen):
            raise SpecError(
                "window", kind="window", path=self.path, expected="an array with dimension 'time'"
            )
        unknown = sorted(set(out or ()) - set(chosen))
        if unknown or not (out is None or isinstance(out, Mapping)):
            expected = f"arrays by name, of {', '.join(chosen)}"
            raise SpecError("out", kind="out", path=self.path, expected=expected, found=unknown or type(out))

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


def open_store(
    path: str | os.PathLike[str],
    *,
    partial: bool = False,
    access: Access = "auto",
    verify: Verify | None = None,
) -> Store:
    """Open a store: reads its end, its directory and its metadata, and maps the rest.

    Args:
        path: A finished store, usually `<task>_<split>.zarr.zip`; with `partial` also a building file itself.
        partial: Whether to open what has been committed so far if there is no finished store yet.
        access: "map" copies from a mapping, "pread" reads, "auto" reads on network file systems only. A file
            that another program cuts ends the process with SIGBUS if that happens while mapped memory is
            used; with "pread" it is always a `TruncatedError`, except in views (`store[name]`).
        verify: "touch" checks a sample's CRC-32C when `sample` or `gather` use it for the first time; arrays
            without slots and constants are checked whole, also by `store[name]`. The first use of a sample
            takes about twice as long, a later one 3 µs more per array and batch (docs/performance.md).
    Raises:
        StoreNotFoundError: If there is no file; also a FileNotFoundError.
        FormatError: If it isn't a store, is damaged in its structure, or is newer than this program.
        SpecError: For another `access` or `verify`.
    """
    if access not in ("auto", "map", "pread") or verify not in (None, "touch"):
        found = f"access={access!r}, verify={verify!r}"
        raise SpecError("argument", expected="auto, map or pread; None or touch", found=found)
    target = Path(path).absolute()
    if partial and target.name.endswith(BUILDING_SUFFIX):
        return _open_building(target.with_name(target.name.removesuffix(BUILDING_SUFFIX)), access, verify)
    try:
        fd = files.open_existing(target)
    except StoreNotFoundError as error:
        if not files.exists(building_path(target)):
            raise
        if partial:
            return _open_building(target, access, verify)
        error.hint = "it is being built: run the build again to finish it, or open it with partial=True"
        raise
    try:
        return Store(target, fd, read_finished(fd, target), access=access, verify=verify)
    finally:
        files.close(fd)


def _open_building(path: Path, access: Access, verify: Verify | None) -> Store:
    where = building_path(path)
    fd = files.open_existing(where)
    try:
        found = read_building_file(fd, where)
        building = None if found.state is State.FINISHED else found
        return Store(path, fd, found.catalog, building=building, access=access, verify=verify)
    finally:
        files.close(fd)


def _reopen(path: str, fingerprint: str | None, config_hash: str, options: dict[str, Any]) -> Store:
    store = open_store(path, **options)
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
