"""A store as one HDF5 file: a dataset per array, dimension names as labels."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.convert.export import array_attrs, blocks_of, json_text
from ups_store.errors import needs
from ups_store.format.metadata import dtype_of
from ups_store.read.base import AnyStore
from ups_store.system import files
from ups_store.write.target import new_file, payload_nbytes

with needs("hdf5"):
    import h5py


def write(store: AnyStore, target: Path, *, force: bool, progress: Callable[[int], None]) -> None:
    """Write the file; attributes that HDF5 has types for become its own, all of them one JSON text.

    bfloat16 becomes an HDF5 floating-point type of 16 bits with 8 of exponent: the bits are the same, and
    readers without bfloat16 get float32.
    """
    with new_file(target, force=force, needed_bytes=payload_nbytes(store)) as fd:
        sink = _Sink(fd)
        with h5py.File(sink, "w") as file:
            _set_attrs(file.attrs, store.attrs)
            file.attrs["ups_store.config_hash"] = store.config_hash
            file.attrs["ups_store.identity"] = json_text(dict(store.identity_document))
            for name in store.dims:
                _write_array(file, name, store, sink.checked(progress))
        sink.check()  # closing writes, too


class _Sink(io.RawIOBase):
    """A file that seems to take everything once one write has failed, of which `check` speaks.

    The HDF5 library can't close a file that it can't write, and ends the process at its exit; and whatever is
    raised through it, such as a Ctrl-C, fails in what it calls next.

    Args:
        fd: The file, empty; stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._at = fd, 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what the first write that failed did."""
        if self._error is not None:
            raise self._error

    def checked(self, progress: Callable[[int], None]) -> Callable[[int], None]:
        """The function, which raises that, too."""

        def call(nbytes: int) -> None:
            self.check()
            progress(nbytes)

        return call

    def write(self, data: Any) -> int:
        """Write at the position."""
        if self._error is None:
            try:
                files.write_at(self._fd, self._at, data)
            except BaseException as error:
                self._error = error
        self._at += len(data)
        return len(data)

    def readinto(self, target: Any) -> int:
        """Read at the position; what isn't there is zeros."""
        memory = memoryview(target).cast("B")
        got = files.read_into(self._fd, self._at, memory)
        memory[got:] = bytes(len(memory) - got)
        self._at += len(memory)
        return len(memory)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: files.size(self._fd)}[whence]
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def truncate(self, size: int | None = None) -> int:
        """Give the file its length."""
        length = self._at if size is None else size
        if self._error is None:
            try:
                files.truncate(self._fd, length)
            except BaseException as error:
                self._error = error
        return length


def _write_array(file: h5py.File, name: str, store: AnyStore, progress: Callable[[int], None]) -> None:
    meta = store.metas[name]
    dtype = h5py.Datatype(_bfloat16()) if meta.dtype == "bfloat16" else dtype_of(meta.dtype)
    dataset = file.create_dataset(name, shape=meta.shape, dtype=dtype)
    _set_attrs(dataset.attrs, array_attrs(store, name))
    for axis, dim in enumerate(store.dims[name]):
        dataset.dims[axis].label = dim
    first = 0
    for block in blocks_of(store, name):
        if block.size:
            _write_block(dataset, first, block)
        first += len(block) if block.ndim else 0
        progress(block.nbytes)


def _write_block(dataset: h5py.Dataset, first: int, block: npt.NDArray[Any]) -> None:
    """By the low-level call, with the file's own type in memory too: HDF5 converts nothing."""
    file_space = dataset.id.get_space()
    if block.ndim:
        start = (first, *[0] * (block.ndim - 1))
        file_space.select_hyperslab(start, block.shape)
    memory_space = h5py.h5s.create_simple(block.shape) if block.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
    raw = block.view(f"u{block.itemsize}") if block.dtype.name == "bfloat16" else block
    dataset.id.write(memory_space, file_space, raw, dataset.id.get_type())


def _bfloat16() -> h5py.h5t.TypeID:
    """1 bit of sign, 8 of exponent (bias 127), 7 of mantissa, little-endian."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def _set_attrs(target: h5py.AttributeManager, attrs: Mapping[str, Any]) -> None:
    for key, value in attrs.items():
        has_type = isinstance(value, str | bool | int | float)
        if key and has_type and "\0" not in f"{key}{value}":
            target[key] = np.bool_(value) if isinstance(value, bool) else value
    target["ups_store.attrs"] = json_text(dict(attrs))
