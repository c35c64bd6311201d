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

from ups_store import files
from ups_store.array_spec import ArraySpec
from ups_store.checksum import crc32c
from ups_store.errors import (
    ArrayNotFoundError,
    CorruptChunkError,
    SampleIndexError,
    SpecError,
    StoreClosedError,
)
from ups_store.layout import CHECKSUM_BYTES
from ups_store.metadata import dtype_of
from ups_store.packed_catalog import PackedArray, PackedCatalog, read_index, read_packed


class PackedStore:
    """A packed store, read-only: `sample` and `gather` decode; there is no array to map.

    Every chunk's checksum is checked before it is decoded. Safe to read from several threads.

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
        self._fd = fd
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
        indices: Sequence[int] | npt.NDArray[np.integer[Any]],
        names: Sequence[str] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Decode samples into a batch.

        Args:
            indices: Sample numbers, shape (B,), in any order, repeats allowed.
            names: Arrays to take; all with a sample axis by default.
        Returns:
            New arrays of shape (B, ...) by name.
        Raises:
            SampleIndexError: For a sample outside the store.
            CorruptChunkError: If a chunk is damaged.
        """
        samples = self._check_indices(indices)
        return {name: self._gather(self._array(name), samples) for name in names or self.arrays}

    def _gather(self, array: PackedArray, samples: list[int]) -> npt.NDArray[Any]:
        if not array.meta.is_sharded:
            return self._whole(array)[samples]
        out = np.empty((len(samples), *array.meta.sample_shape), dtype_of(array.meta.dtype))
        for row, sample in enumerate(samples):
            self.read_chunk(array, sample, out[row, ...])
        return out

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
        raw = files.read_at(self._open_fd(), first, end - first)
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
            self._edges[name] = read_index(self._open_fd(), array, self.path)
        edges = self._edges[name]
        return int(edges[sample]), int(edges[sample + 1])

    def _check_indices(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> list[int]:
        raw = np.asarray(indices)
        if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
            found = f"{raw.dtype} {raw.shape}"
            raise SpecError("indices", kind="index", expected="integers, shape (B,)", found=found)
        samples: list[int] = raw.astype(np.int64).tolist()
        for sample in samples:
            if not 0 <= sample < len(self):
                expected = f"0 <= index < {len(self)}"
                raise SampleIndexError("no such sample", path=self.path, expected=expected, found=sample)
        return samples

    def _array(self, name: str) -> PackedArray:
        array = self.catalog.arrays.get(name)
        if array is None or array.meta.is_constant:
            expected = f"one of {', '.join(self.arrays)}"
            raise ArrayNotFoundError(f"no array {name!r} of samples", path=self.path, expected=expected)
        return array

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise StoreClosedError("the store is closed", path=self.path, hint="open it again")
        return self._fd

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        if self._fd >= 0:
            files.close(self._fd)
            self._fd = -1

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
        return PackedStore(target, fd, read_packed(fd, target))
    except BaseException:
        files.close(fd)
        raise
