"""The fuzzer's HDF5 files, read as a build reads them: by a reader process with deadlines.

What hangs or ends HDF5 itself is then an error like any other.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tools.fuzz.changes import Chance, flip_bits
from tools.fuzz.kind import Arrays, Input, Kind
from ups_store.errors import StoreError
from ups_store.sources.contents import EVERYTHING
from ups_store.sources.reader_pool import Patience, ReaderPool
from ups_store.sources.reader_process import ALIGN, Reader, ReadRequest, describe_request

MAX_SAMPLE_BYTES = 1 << 20  # of HDF5; a file of a few kB may rightly hold terabytes of one value
PATIENCE = Patience(timeout_s=5.0, open_timeout_s=5.0, retries=0)


class CheckedRead(ReadRequest):
    """Compares what was read with what h5py gives for the same samples, where that is one dataset."""

    def run(self, reader: Reader) -> Any:
        """As `ReadRequest.run`."""
        read: Arrays = {}
        place = reader.place

        def noted(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            read[name] = place(name, shape, dtype)
            return read[name]

        reader.place = noted  # type: ignore[method-assign]
        try:
            ranges = super().run(reader)
        finally:
            del reader.place
        plain = _plain(self.path, self.indices)
        if plain is not None and plain.size == read["fields"].size:
            expected = plain.astype(read["fields"].dtype).reshape(read["fields"].shape)
            assert np.array_equal(read["fields"], expected, equal_nan=True), "other values than h5py reads"
        return ranges


def _plain(path: Path, indices: np.ndarray) -> np.ndarray | None:
    """Samples as h5py reads them: of `tensor` (n, t, x), or of groups with a `data` (t, x, c) each."""
    try:
        with h5py.File(path) as file:
            if isinstance(dataset := file.get("tensor"), h5py.Dataset):
                return np.stack([dataset[i] for i in indices.tolist()]) if dataset.ndim == 3 else None
            groups = sorted(name for name in file if name.isdecimal())
            return np.stack([file[groups[i]]["data"][...] for i in indices.tolist()])
    except Exception:  # whatever it doesn't read we needn't
        return None


def _write_tensor(file: h5py.File) -> None:
    file["tensor"] = np.random.default_rng(0).random((4, 5, 10), np.float32)
    file["x-coordinate"] = np.linspace(0, 1, 10, dtype="<f4")
    file["t-coordinate"] = np.linspace(0, 1, 6, dtype="<f4")
    file.attrs["Nu"] = 0.01


def _write_groups(file: h5py.File) -> None:
    for sample in range(3):
        group = _timeless_group(file, f"{sample:04d}")
        data = np.random.default_rng(sample).random((5, 10, 1), np.float32)
        group.create_dataset("data", data=data, chunks=(3, 4, 1), compression="lzf")
        group.attrs["config"] = "sim: {}\n"
        grid = _timeless_group(group, "grid")
        for axis, length in (("t", 5), ("x", 10)):
            grid[axis] = np.linspace(0, 1, length, dtype="<f4")


def _timeless_group(parent: h5py.Group, name: str) -> h5py.Group:
    """Make a group that doesn't note when: an input is a function of seed and number alone."""
    creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    return h5py.Group(h5py.h5g.create(parent.id, name.encode(), gcpl=creation))


def _write_converted(file: h5py.File) -> None:
    data = np.random.default_rng(1).random((5, 7, 10, 1)).astype(">f4")
    file.create_dataset("data", data=data, chunks=(2, 3, 4, 1), compression="gzip", shuffle=True)
    file["x"], file["t-coordinate"] = np.linspace(-1, 1, 10), np.linspace(0, 1, 7)
    file.attrs.update({"nu": np.array([0.02]), "comment": "made at home", "version": 3})


_TENSOR = np.zeros((4, 5, 10), np.float32)
ODD_VALUES: tuple[Any, ...] = (
    0, -1, 1 << 40, np.nan, np.inf, "", "x", b"\xff", np.zeros(0), np.zeros((0, 3)), np.zeros((2, 3, 4, 5)),
    h5py.Empty("f4"), np.array(["a", "b"], "S3"), np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    np.zeros(3, complex), _TENSOR, _TENSOR.astype(">f8"), _TENSOR.astype(np.int16), _TENSOR.astype(bool),
    np.full(10, np.nan, "f4"), np.full((4, 5, 10), np.inf, "f2"), [1, "two"], h5py.SoftLink("/tensor"),
    h5py.SoftLink("/nowhere"), h5py.SoftLink("/"), h5py.ExternalLink("/etc/passwd", "/x"),
    np.dtype("f4"), np.array(["text", "more"], h5py.string_dtype()), 2**63, "\u202e",
)  # fmt: skip


def odd_object(good: bytes, chance: Chance) -> bytes:
    """Datasets, groups and attributes replaced by what isn't expected there."""
    file = io.BytesIO(good)
    with h5py.File(file, "r+") as opened:
        names: list[str] = []
        opened.visit(names.append)
        for _ in range(chance.choice((1, 1, 2))):
            with suppress(Exception):  # not everything can be an attribute, or be replaced twice
                _make_odd(opened, chance.choice([*names, "/"]), chance)
    return file.getvalue()


def _make_odd(file: h5py.File, name: str, chance: Chance) -> None:
    value = chance.choice(ODD_VALUES)
    holder = file[name]
    if chance.random() < 0.3 or name == "/":
        key = chance.choice([*holder.attrs, "Nu", "config"])
        holder.attrs[key] = value
    elif chance.random() < 0.3:
        parent, _, old = name.rpartition("/")
        new = chance.choice(("data", "tensor", "x", "\u202e", "a" * 300, f"{old} "))
        file.move(name, f"{parent}/{new}")
    else:
        del file[name]
        if isinstance(value, np.dtype):  # which notes when it was made: all inputs have a copy of one
            file.copy(_named_type(), file, name)
        else:
            file[name] = value


@cache
def _named_type() -> h5py.Datatype:
    file = h5py.File(io.BytesIO(), "w")
    file["type"] = np.dtype("f4")  # as that of `ODD_VALUES`
    return file["type"]


class Hdf5Kind(Kind):
    """Sources, as a build opens and reads them."""

    aware = (odd_object, odd_object, flip_bits)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = tuple(
            _hdf5(write, libver)
            for write in (_write_tensor, _write_groups, _write_converted)
            for libver in ("earliest", "latest")
        )
        self._pool = ReaderPool(1, slot_nbytes=4 * MAX_SAMPLE_BYTES, patience=PATIENCE)
        self._numbers = itertools.count()

    def read(self, made: Input) -> bool:
        """Describe the file and read two samples of it."""
        path = self.folder / f"{next(self._numbers)}.h5"  # a reader keeps files open
        path.write_bytes(made.content)
        try:
            info = self._pool.ask(describe_request(path))
            nbytes = sum(int(np.prod(array.shape)) * 4 + ALIGN for array in info.arrays.values())
            if nbytes > MAX_SAMPLE_BYTES:
                return True
            samples = np.unique([0, info.num_samples - 1])
            dtypes = dict.fromkeys(info.arrays, "float32")
            for batch in self._pool.read([CheckedRead(path, None, EVERYTHING, samples, samples, dtypes)]):
                shapes = {name: array.shape[1:] for name, array in batch.arrays.items()}
                assert shapes == {name: array.shape for name, array in info.arrays.items()}
        except StoreError as error:
            if error.kind == "reader_failed":  # what it stands for is an exception that nobody thought of
                raise AssertionError(str(error)) from error
            raise
        finally:
            path.unlink()
        return True

    def close(self) -> None:
        """End the reader."""
        self._pool.close()


def _hdf5(write: Callable[[h5py.File], None], libver: str) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w", libver=libver) as opened:
        write(opened)
    return file.getvalue()
