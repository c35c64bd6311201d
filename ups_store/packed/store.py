"""`PackedStore`: samples of a packed file, each decoded when it is asked for (spec 13)."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import ArrayNotFoundError, CorruptChunkError, SpecError, StoreClosedError
from ups_store.format.array_spec import ArraySpec
from ups_store.format.checksum import crc32c
from ups_store.format.layout import CHECKSUM_BYTES
from ups_store.format.metadata import dtype_of
from ups_store.packed.catalog import PackedArray, PackedCatalog, read_index, read_packed
from ups_store.read.gather import (
    Indices,
    Samples,
    TimeWindow,
    batch_shape,
    check_effect,
    check_indices,
    check_output,
    names_of,
    window_of,
)
from ups_store.read.store_file import Descriptor
from ups_store.system import files
from ups_store.system.runs import cast_into


class PackedStore:
    """A packed store, read-only: `sample` and `gather` decode; there is no array to map.

    Every chunk's checksum is checked before it is decoded. Safe to read from several threads.

    Args:
        path: Absolute path of the file.
        fd: Its descriptor, which belongs to the store from now on.
        catalog: What it holds and where.

    Attributes:
        path: Absolute path of the file.
        catalog: What it holds and where.
        identity: The identity document: what the content was made from.
        config_hash: sha256 of the identity, that of the mapped form too.
        attrs: Attributes of the root group.
    """

    def __init__(self, path: Path, fd: int, catalog: PackedCatalog) -> None:
        self.path = path
        self.catalog = catalog
        self.identity: Mapping[str, Any] = catalog.root.identity
        self.config_hash = catalog.root.config_hash
        self.attrs: Mapping[str, Any] = catalog.root.attrs
        self._descriptor: Descriptor | None = Descriptor(fd)
        self._edges: dict[str, npt.NDArray[np.int64]] = {}
        self._plain: dict[str, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        """N, the number of samples."""
        return self.catalog.layout.num_samples

    def __repr__(self) -> str:
        codec = f"{self.catalog.packing.codec} {self.catalog.packing.level}"
        return f"<ups_store PackedStore {self.path.name}: {len(self)} samples, {codec}>"

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays with a sample axis."""
        metas = (array.meta for array in self.catalog.arrays.values() if not array.meta.is_constant)
        return {m.name: ArraySpec(m.shape, dtype_of(m.dtype), dims=m.dims, attrs=m.attrs) for m in metas}

    @property
    def constants(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays without a sample axis, decoded, read-only."""
        return {name: self._whole(a) for name, a in self.catalog.arrays.items() if a.meta.is_constant}

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Dimension names of every array."""
        return {name: array.meta.dims for name, array in self.catalog.arrays.items()}

    def __getitem__(self, name: str) -> NoReturn:
        """Refused: a packed array isn't in memory; see `gather`, or unpack the store."""
        hint = "use gather or sample, or unpack it with `ups-store unpack`"
        raise SpecError(
            "a packed array can't be mapped", kind="packed", path=self.path, array=name, hint=hint
        )

    def sample(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """All arrays of one sample by name, new memory; shape () for a number.

        Raises:
            SampleIndexError: Unless 0 <= index < N; also an IndexError.
            CorruptChunkError: If a chunk is damaged.
        """
        return {name: batch[0, ...] for name, batch in self.gather([index]).items()}

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
        """Decode samples, or windows of them, into a batch; arguments as of `Store.gather`.

        A sample is decoded whole, once a batch, also for windows.

        Returns:
            Arrays of shape (B, ...) by name: those of `out`, else new ones that the caller owns.
        Raises:
            SampleIndexError: For a sample or window outside the store.
            SpecError: For an `out` of another shape, or of a dtype that loses what the array holds.
            CorruptChunkError: If a chunk is damaged.
        """
        samples = check_indices(indices, len(self), path=self.path)
        arrays = [self._array(name) for name in (self.arrays if names is None else names_of(names))]
        is_window = start is not None or length is not None or stride != 1
        check_effect([array.meta for array in arrays], is_window, out, path=self.path)
        batch: dict[str, npt.NDArray[Any]] = {}
        for array in arrays:
            meta, dtype = array.meta, dtype_of(array.meta.dtype)
            window = window_of(meta, len(samples), start=start, length=length, stride=stride)
            shape = batch_shape(meta, len(samples), window)
            target = None if out is None else out.get(meta.name)
            if target is None:
                target = np.empty(shape, dtype)
            check_output(meta.name, dtype, shape, target)
            self._decode(array, samples, window, target)
            batch[meta.name] = target
        return batch

    def _decode(
        self, array: PackedArray, samples: Samples, window: TimeWindow | None, out: npt.NDArray[Any]
    ) -> None:
        if not array.meta.is_sharded and window is None:
            out[...] = self._whole(array)[samples]
            return
        decoded = np.empty(array.meta.sample_shape, dtype_of(array.meta.dtype))
        for sample in np.unique(samples).tolist():
            if array.meta.is_sharded:
                self.read_chunk(array, sample, decoded)
            else:
                decoded = self._whole(array)[sample]
            for row in np.flatnonzero(samples == sample).tolist():
                cast_into(decoded if window is None else decoded[window.steps(row)], out[row, ...])

    def _whole(self, array: PackedArray) -> npt.NDArray[Any]:
        """A plain chunk, decoded once."""
        name = array.meta.name
        if name not in self._plain:
            whole = np.empty(array.meta.shape, dtype_of(array.meta.dtype))
            if array.entry:
                self.read_chunk(array, None, whole)
            whole.flags.writeable = False
            self._plain[name] = whole
        return self._plain[name]

    def read_chunk(self, array: PackedArray, sample: int | None, out: npt.NDArray[Any]) -> None:
        """Decode one chunk into `out`, C-contiguous memory of its shape and dtype.

        Args:
            array: The array.
            sample: Sample number; None for a plain chunk.
            out: Where the payload goes.
        Raises:
            CorruptChunkError: If it is damaged.
        """
        first, end = self._extent(array, sample)
        descriptor = self._open_descriptor()
        raw = files.read_at(descriptor.fd, first, end - first)
        packed, stored = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
        if len(raw) < end - first or stored != struct.pack("<I", crc32c(packed)):
            raise self._damaged(array, sample, (first, end), "its crc32c doesn't match")
        try:
            array.chain.decode(packed, out.reshape(-1).view(np.uint8))
        except (ValueError, RuntimeError, TypeError) as error:
            raise self._damaged(array, sample, (first, end), f"it can't be decoded ({error})") from error

    def _damaged(
        self, array: PackedArray, sample: int | None, where: tuple[int, int], problem: str
    ) -> CorruptChunkError:
        return CorruptChunkError(
            f"damaged chunk: {problem}",
            path=self.path,
            array=array.meta.name,
            sample=sample,
            byte_range=where,
            clause="13.5",
            hint="copy the file again",
        )

    def _extent(self, array: PackedArray, sample: int | None) -> tuple[int, int]:
        assert array.entry is not None
        if sample is None:
            return array.entry.data_offset, array.entry.end
        name = array.meta.name
        if name not in self._edges:
            descriptor = self._open_descriptor()
            self._edges[name] = read_index(descriptor.fd, array, self.path)
        edges = self._edges[name]
        return int(edges[sample]), int(edges[sample + 1])

    def _array(self, name: str) -> PackedArray:
        array = self.catalog.arrays.get(name)
        if array is None or array.meta.is_constant:
            expected = f"one of {', '.join(self.arrays)}"
            raise ArrayNotFoundError(f"no array {name!r} of samples", path=self.path, expected=expected)
        return array

    def _open_descriptor(self) -> Descriptor:
        """To be held as long as the reading takes: another thread may close the store."""
        descriptor = self._descriptor
        if descriptor is None:
            raise StoreClosedError("the store is closed", path=self.path, hint="open it again")
        return descriptor

    def close(self) -> None:
        """Close the file; a read under way ends. Closing twice is allowed."""
        self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_packed(path: str | os.PathLike[str]) -> PackedStore:
    """Open a packed store: reads its end, its directory and its metadata, the rest when it is asked for.

    Args:
        path: What `pack` wrote, usually `<task>_<split>.packed.zarr.zip`.
    Raises:
        StoreNotFoundError: If there is no file; also a FileNotFoundError.
        FormatError: If it isn't a packed store (kind "not_packed" for a mapped one), or is damaged.
    """
    target = Path(path).absolute()
    fd = files.open_existing(target)
    try:
        catalog = read_packed(fd, target)
    except BaseException:
        files.close(fd)
        raise
    return PackedStore(target, fd, catalog)
