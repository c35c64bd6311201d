"""`Store`: an open store; views without copying, batches into reused buffers (spec 7)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store import files
from ups_store.array_spec import ArraySpec
from ups_store.catalog import Catalog, fingerprint_of
from ups_store.errors import ArrayNotFoundError, NotCommittedError, SpecError
from ups_store.gather import TIME_DIM, gather_array, output_for, window_of
from ups_store.indices import Indices, check_indices
from ups_store.layout import ArrayLayout
from ups_store.metadata import dtype_of
from ups_store.pread import read_samples
from ups_store.recovery import Building, read_commits
from ups_store.store_file import Access, StoreFile
from ups_store.touch import TouchChecks

if TYPE_CHECKING:
    from ups_store.verify import Report

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
    ) -> None:
        self.path = path
        self.identity: Mapping[str, Any] = catalog.root.identity
        self.config_hash = catalog.root.config_hash
        self.attrs: Mapping[str, Any] = catalog.root.attrs
        self.version = catalog.root.version
        self.is_partial = building is not None
        self._catalog = catalog
        self._building = building
        nbytes = catalog.layout.file_nbytes
        self._file = StoreFile(path, fd, nbytes, access=access, keeps_fd=self.is_partial)
        self.network = self._file.network
        self.access = self._file.access
        self._views: dict[str, npt.NDArray[Any]] = {}
        self.verify_on_touch = verify == "touch"
        self._checks = TouchChecks(self._file.read, path) if self.verify_on_touch else None

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
        return self._file.nbytes

    @property
    def committed(self) -> npt.NDArray[np.bool_]:
        """Which samples are there, bool, shape (N,); of a store under construction as of now."""
        if self._building is None or self._building.header is None:
            return np.ones(len(self), bool)
        fd = self._file.fd
        committed, _ = read_commits(fd, self._catalog.layout, self._building.header)
        if files.size(fd) == self.nbytes:  # finished meanwhile, so all were, and the table is cut off
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
        self.check_length()
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
        samples = check_indices([index], len(self), path=self.path)
        self.check_length()
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
        samples = check_indices(indices, len(self), path=self.path)
        self.check_length()
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
                read_samples(self._file.fd, array, samples, window, target, path=self.path)
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
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        from ups_store.reader import reopen

        verify = "touch" if self.verify_on_touch else None
        options = {"partial": self.is_partial, "access": self.access, "verify": verify}
        fingerprint = None if self.is_partial else self.fingerprint
        return reopen, (str(self.path), fingerprint, self.config_hash, options)

    def check_length(self) -> None:
        """Fail if the file was cut: touching what is gone of a mapping would end the process (spec 7.5).

        Raises:
            TruncatedError: If it is shorter than the store.
            StoreClosedError: If the store is closed.
        """
        self._file.check_length()

    _check_length = check_length  # of ups_store.torch, until it uses the public names

    @property
    def _verify(self) -> Verify | None:
        return "touch" if self.verify_on_touch else None

    def _map(self) -> mmap.mmap:
        return self._file.mapping()

    def _check(self, array: ArrayLayout, samples: npt.NDArray[np.int64]) -> None:
        # A small array's checksum is written when the store is finished (spec 6.8).
        is_unwritten = self.is_partial and not (array.meta.is_sharded or array.meta.is_constant)
        if self._checks is not None and not is_unwritten:
            self._checks.check(array, samples)

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
            view = self._views[name] = self._file.view(self._layout(name))
        return view

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


def _spec(array: ArrayLayout) -> ArraySpec:
    meta = array.meta
    return ArraySpec(meta.shape, dtype_of(meta.dtype), dims=meta.dims, attrs=meta.attrs)
