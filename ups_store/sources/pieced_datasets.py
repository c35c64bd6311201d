"""Datasets whose data lies elsewhere, read piece by piece: every piece is there, or reading fails.

HDF5 itself takes a source of a virtual dataset that it can't open for fill values, and bytes beyond the end
of an external file for zeros.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SourceError
from ups_store.sources.hdf5 import check_written, h5py, source_error
from ups_store.sources.outer_files import OuterFiles
from ups_store.system import files

_Box = tuple[range, ...]  # of step 1, one for each axis


class _PiecedDataset(h5py.Dataset):  # type: ignore[misc]  # h5py has no types
    """A dataset that has its name, dtype and attributes of HDF5, and its values from `read_box`."""

    def __getitem__(self, key: Any) -> Any:
        box, cut = _box(key, self.shape)
        return self.read_box(box)[cut]

    @abstractmethod
    def read_box(self, box: _Box) -> npt.NDArray[Any]:
        """Values of a box, in new memory."""


def _box(key: Any, shape: tuple[int, ...]) -> tuple[_Box, tuple[Any, ...]]:
    """The smallest box that holds what a key of integers and slices selects, and the key within the box."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    where = keys.index(Ellipsis)
    keys[where : where + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
    box, cut = list[range](), list[Any]()
    for each, length in zip(keys, shape, strict=True):
        if isinstance(each, slice):
            chosen = range(length)[each]
            assert chosen.step > 0, each
            box.append(range(chosen.start, max(chosen.start, chosen.stop)))
            cut.append(slice(None, None, chosen.step))
        else:
            first = range(length)[each]
            box.append(range(first, first + 1))
            cut.append(0)
    return tuple(box), tuple(cut)


class ExternalDataset(_PiecedDataset):
    """A dataset whose bytes lie in one piece after the other of other files.

    Args:
        dataset: As HDF5 has it.
        outer: Opens those files.
        locate: Gives the path of one by its name.
        path: The source, for messages.
        asked: What the dataset was asked for as, for messages.

    Raises:
        ExternalDataError: As `OuterFiles.locate`.
        SourceError: Kind "truncated" or "wrong_dtype".
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        outer: OuterFiles,
        locate: Callable[[str], Path],
        *,
        path: Path,
        asked: str,
    ) -> None:
        super().__init__(dataset.id)
        self._outer = outer
        self._bad = partial(source_error, path=path, dataset=asked)
        self._segments: list[tuple[Path, int, range]] = []  # path, first byte there, bytes of the dataset
        if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)):
            raise self._bad("numbers in another file that NumPy has no dtype for", kind="wrong_dtype")
        done, total = 0, math.prod(dataset.shape) * dataset.dtype.itemsize
        for name, offset, size in dataset.external:
            if done < total:
                length = min(size, total - done)
                self._segments.append((locate(name), offset, range(done, done + length)))
                done += length
                self._check_length(*self._segments[-1])
        if done < total:
            raise self._truncated(total, done)

    def _check_length(self, path: Path, offset: int, part: range) -> None:
        with self._outer.opened(path) as fd:
            found = files.size(fd)
        if found < offset + len(part):
            raise self._truncated(f"{offset + len(part)} bytes in {path}", found)

    def _truncated(self, expected: object, found: object) -> SourceError:
        hint = "copy the file again"
        return self._bad(
            "data in another file ends too early", kind="truncated", expected=expected, found=found, hint=hint
        )

    def read_box(self, box: _Box) -> npt.NDArray[Any]:
        """As `_PiecedDataset`; no more is read than rows along the first axis that is longer than 1."""
        shape, itemsize = self.shape, self.dtype.itemsize
        if not all(box):
            return np.empty([len(each) for each in box], self.dtype)
        axis = next((axis for axis, each in enumerate(box) if len(each) > 1), len(box))
        row = math.prod(shape[axis + 1 :])
        first = sum(each.start * math.prod(shape[i + 1 :]) for i, each in enumerate(box[: axis + 1]))
        num_rows = len(box[axis]) if axis < len(box) else 1
        flat = np.empty(num_rows * row, self.dtype)
        self._read_bytes(first * itemsize, flat.view(np.uint8).data)
        rest = tuple(slice(each.start, each.stop) for each in box[axis + 1 :])
        rows = flat.reshape(num_rows, *shape[axis + 1 :])[(slice(None), *rest)]
        return rows.reshape([len(each) for each in box])

    def _read_bytes(self, first: int, out: memoryview) -> None:
        wanted = range(first, first + len(out))
        for path, offset, part in self._segments:
            common = range(max(part.start, wanted.start), min(part.stop, wanted.stop))
            if common:
                piece = out[common.start - first : common.stop - first]
                with self._outer.opened(path) as fd:
                    num_read = files.read_into(fd, offset + common.start - part.start, piece)
                if num_read < len(piece):
                    raise self._truncated(f"{len(piece)} bytes in {path}", num_read)


@dataclass(frozen=True)
class Mapping:
    """One entry of a virtual dataset: names of a file, "." for its own, and of a dataset there."""

    file: str
    dataset: str


@dataclass(frozen=True)
class _Selected:
    """What a mapping selects along one axis; without an end where that is left to the source."""

    start: int
    stop: int | None
    step: int

    def of(self, length: int) -> range:
        """The indices along an axis of so many points."""
        return range(self.start, length if self.stop is None else self.stop, self.step)


@dataclass(frozen=True)
class _Piece:
    """A part of a virtual dataset: indices along its axes, along those of the source, and which belong."""

    mapping: Mapping
    target: tuple[range, ...]
    source: tuple[range, ...]
    axes: dict[int, int]  # of the source by those of the virtual dataset; the others have length 1


class VirtualDataset(_PiecedDataset):
    """A dataset that is put together of others.

    Args:
        dataset: As HDF5 has it.
        source_of: Opens the source of a mapping.
        path: The file, for messages.
        asked: What the dataset was asked for as, for messages.

    Raises:
        ExternalDataError: If a source isn't there, or may not be read.
        SourceError: Kind "virtual_unsupported" or "shapes_differ".
    """

    def __init__(
        self, dataset: h5py.Dataset, source_of: Callable[[Mapping], Any], *, path: Path, asked: str
    ) -> None:
        super().__init__(dataset.id)
        self._source_of = source_of
        self._bad = partial(source_error, path=path, dataset=asked)
        plist, self._pieces = dataset.id.get_create_plist(), list[_Piece]()
        open_axes, chunks = set[int](), None
        for i in range(plist.get_virtual_count()):
            mapping = self._mapping(plist, i)
            source = source_of(mapping)  # before HDF5 looks for it
            space = plist.get_virtual_vspace(i)
            target = self._selected(space, space.shape)
            open_axes |= {axis for axis, each in enumerate(target) if each.stop is None}
            self._pieces.append(self._piece(mapping, target, source, plist.get_virtual_srcspace(i)))
            chunks = chunks or _chunks(self._pieces[0], source.chunks)
        self._shape = tuple(dataset.shape) if not open_axes else self._grown(space.shape, open_axes)
        self._chunks = chunks or (1,) * len(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; along an axis without end, as far as the sources go."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self._shape)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of the first source along the axes that it fills."""
        return self._chunks

    def read_box(self, box: _Box) -> npt.NDArray[Any]:
        """As `_PiecedDataset`.

        Raises:
            SourceError: Kind "not_written", of what no source fills, or a source lacks.
        """
        out = np.full([len(each) for each in box], self.fillvalue, self.dtype)
        num_filled = 0
        for piece in self._pieces:
            where, from_ = _overlap(piece, box)
            if all(map(len, where)):
                source, wanted = self._source_of(piece.mapping), tuple(map(_slice, from_))
                check_written(source, piece.mapping.dataset, wanted, path=source.file.filename)
                to = tuple(_slice(each, box[axis].start) for axis, each in enumerate(where))
                out[to] = source[wanted].reshape([len(each) for each in where])
                num_filled += out[to].size
        if num_filled < out.size and not np.isnan(self.fillvalue):
            raise self._bad(
                "a virtual dataset with parts that no source fills",
                kind="not_written",
                expected=f"{out.size} values",
                found=f"{num_filled}; HDF5 reads the others as {self.fillvalue}",
                hint="make it again with all of its sources",
            )
        return out

    def _mapping(self, plist: Any, index: int) -> Mapping:
        names = plist.get_virtual_filename(index), plist.get_virtual_dsetname(index)
        if any("%b" in name.replace("%%", "") for name in names):
            raise self._unsupported(
                "virtual dataset of numbered sources, of which a missing last one couldn't be noticed",
                expected="names without %b",
                found=f"{names[1]} of {names[0]}",
            )
        return Mapping(*(name.replace("%%", "%") for name in names))

    def _unsupported(self, what: str, **details: Any) -> SourceError:
        hint = "make it again, of blocks of its sources, all by their names"
        return self._bad(what, kind="virtual_unsupported", hint=hint, **details)

    def _selected(self, space: Any, shape: tuple[int, ...]) -> list[_Selected]:
        """What a dataspace selects of a dataset of this shape, by axis."""
        if space.get_select_type() == h5py.h5s.SEL_ALL:
            return [_Selected(0, length, 1) for length in shape]
        if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
            raise self._unsupported("virtual dataset of single points or irregular parts")
        selected = []
        for start, stride, count, block in zip(*space.get_regular_hyperslab(), strict=True):
            step = stride if block == 1 and count > 1 else 1
            if count > 1 and block not in (1, stride):
                raise self._unsupported("virtual dataset of blocks with gaps between them")
            is_open = h5py.h5s.UNLIMITED in (count, block)
            num = count if step > 1 else count * block
            selected.append(_Selected(start, None if is_open else start + num * step, step))
        if len(selected) != len(shape):
            raise self._bad("a source of a virtual dataset has another rank", kind="shapes_differ")
        return selected

    def _piece(self, mapping: Mapping, target: list[_Selected], source: Any, space: Any) -> _Piece:
        selected = self._selected(space, source.shape)
        from_ = tuple(each.of(length) for each, length in zip(selected, source.shape, strict=True))
        grown = next((len(each) for each, how in zip(from_, selected, strict=True) if how.stop is None), None)
        if grown is None and any(each.stop is None for each in target):
            raise self._unsupported("virtual dataset without end, of sources that have one")
        to = tuple(each.of(each.start + (grown or 0) * each.step) for each in target)
        long_to, long_from = ([i for i, each in enumerate(some) if len(each) != 1] for some in (to, from_))
        is_whole = space.get_select_type() == h5py.h5s.SEL_ALL
        is_within = all(not each or each[-1] < n for each, n in zip(from_, source.shape, strict=True))
        if is_within and [len(to[i]) for i in long_to] == [len(from_[i]) for i in long_from]:
            return _Piece(mapping, to, from_, dict(zip(long_to, long_from, strict=True)))
        if is_within and not is_whole:
            raise self._unsupported("virtual dataset of parts that are reshaped")
        raise self._bad(
            f"dataset {mapping.dataset!r} of {mapping.file!r} isn't what its virtual dataset is made of",
            kind="shapes_differ",
            expected=f"room for {tuple(len(each) for each in (to if is_whole else from_))}",
            found=f"shape {source.shape}",
        )

    def _grown(self, shape: tuple[int, ...], axes: set[int]) -> tuple[int, ...]:
        stops = [max(piece.target[axis].stop for piece in self._pieces) for axis in range(len(shape))]
        return tuple(stops[axis] if axis in axes else length for axis, length in enumerate(shape))


def _chunks(piece: _Piece, chunks: tuple[int, ...] | None) -> tuple[int, ...]:
    """Chunks along the axes of a virtual dataset by those of a source; 1 where it has none."""
    axes = {to: from_ for to, from_ in piece.axes.items() if piece.source[from_].step == 1}
    return tuple(chunks[axes[i]] if chunks and i in axes else 1 for i in range(len(piece.target)))


def _overlap(piece: _Piece, box: _Box) -> tuple[list[range], list[range]]:
    """Where a piece lies within a box, by the axes of the virtual dataset, and what that is of the source."""
    where, from_ = list[range](), list(piece.source)
    for axis, (indices, wanted) in enumerate(zip(piece.target, box, strict=True)):
        first, last = (
            max(0, -(-(end - indices.start) // indices.step)) for end in (wanted.start, wanted.stop)
        )
        where.append(indices[first:last])
        if axis in piece.axes:
            from_[piece.axes[axis]] = from_[piece.axes[axis]][first:last]
    return where, from_


def _slice(indices: range, base: int = 0) -> slice:
    return slice(indices.start - base, indices[-1] + 1 - base, indices.step)
