"""How samples get out of a file: straight, where they lie as in a store; else chunk by chunk, each once."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
from build_helpers import BURGERS, Recorder, build, settings
from reader_faults import call, modules

from ups_store.building import read
from ups_store.building.config import ReadingConfig
from ups_store.building.plan import plan_store
from ups_store.errors import SourceError
from ups_store.sources import regions
from ups_store.sources.contents import EVERYTHING, Selection
from ups_store.sources.reader_pool import ReaderPool, ReaderProcess
from ups_store.sources.reader_process import digest_request
from ups_store.sources.regions import DatasetExtent, read_hyperslabs
from ups_store.sources.source import open_source
from ups_store.sources.values import ValueRange
from ups_store.system import files, memory

SHAPE = (7, 6, 10)
VALUES = np.random.default_rng(3).random(SHAPE, dtype=np.float32)


def dataset_of(path: Path, *, dtype: str = "<f4", data: bool = True, **options: Any) -> h5py.Dataset:
    """An open dataset (sample, time, x); its file is closed with it."""
    user_block = options.pop("userblock_size", 0)
    with h5py.File(path, "w", userblock_size=user_block) as file:
        file.create_dataset("u", SHAPE, dtype, data=VALUES if data else None, **options)
    return h5py.File(path)["u"]


def read_all(dataset: h5py.Dataset, *, dtype: str = "<f4", selection: Selection = EVERYTHING) -> np.ndarray:
    """Samples 1..5 as a store has them."""
    shape = (5, *(-(-SHAPE[i] // selection.step(axis)) for i, axis in ((1, "t"), (2, "x"))), 1)
    out = np.full(shape, np.nan, dtype)
    extent = DatasetExtent.of(dataset)
    read_hyperslabs(out, dataset, axes="stx", to_axes="stxc", first=1, selection=selection, extent=extent)
    return out


def is_straight(dataset: h5py.Dataset, *, dtype: str = "<f4", **options: Any) -> bool:
    out = np.empty((*SHAPE, 1), dtype)
    options = {"axes": "stx", "to_axes": "stxc", "selection": EVERYTHING, **options}
    extent = DatasetExtent.of(dataset)
    return extent is not None and extent.fits(out, **options)


# --- straight -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("user_block", [0, 512])
def test_contiguous_dataset_is_read_straight_wherever_it_lies(tmp_path: Path, user_block: int) -> None:
    dataset = dataset_of(tmp_path / "a.h5", userblock_size=user_block)
    with dataset.file:
        assert is_straight(dataset)
        np.testing.assert_array_equal(read_all(dataset)[..., 0], VALUES[1:6])


@pytest.mark.parametrize(
    ("options", "dtype", "selection"),
    [
        ({"chunks": (2, 3, 10)}, "<f4", EVERYTHING),
        ({"chunks": (7, 6, 10), "compression": "lzf", "shuffle": True}, "<f4", EVERYTHING),
        ({"dtype": ">f4"}, "<f4", EVERYTHING),
        ({"dtype": "<f8"}, "<f4", EVERYTHING),
        ({}, "<f2", EVERYTHING),
        ({}, "<f4", Selection(reduce_space=3)),
        ({}, "<f4", Selection(reduce_time=2)),
        ({"data": False, "fillvalue": 4.0}, "<f4", EVERYTHING),
        ({"external": "outside.bin"}, "<f4", EVERYTHING),
    ],
    ids=["chunks", "lzf", "big_endian", "wider", "narrower", "space", "time", "never_written", "external"],
)
def test_dataset_that_hdf5_has_to_work_on_is_left_to_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    dtype: str,
    selection: Selection,
) -> None:
    monkeypatch.chdir(tmp_path)
    with (dataset := dataset_of(tmp_path / "a.h5", **options)).file:
        assert not is_straight(dataset, dtype=dtype, selection=selection)
        stored = dataset[1:6, :: selection.reduce_time, :: selection.reduce_space]
        found = read_all(dataset, dtype=dtype, selection=selection)
        np.testing.assert_array_equal(found[..., 0], stored.astype(dtype))


def test_axes_in_another_order_are_left_to_hdf5(tmp_path: Path) -> None:
    with (dataset := dataset_of(tmp_path / "a.h5")).file:
        assert not is_straight(dataset, axes="sxt")
        part = np.empty((*SHAPE, 2), np.float32)[..., :1]  # one channel of two
        extent = DatasetExtent.of(dataset)
        assert extent
        assert not extent.fits(part, axes="stx", to_axes="stxc", selection=EVERYTHING)


def test_straight_reading_says_after_each_piece_that_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "_READ_AT_ONCE", 100)
    told: list[str] = []
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = VALUES
    with open_source(path) as source:
        out = {"fields": np.empty((7, 6, 10, 1), np.float32)}
        source.read_into(out, range(7), note=told.append)
    np.testing.assert_array_equal(out["fields"][..., 0], VALUES)
    assert told == ["data"] * (1 + math.ceil(VALUES.nbytes / 100))


def test_straight_reading_past_the_end_of_a_cut_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = VALUES
        offset = file["data"].id.get_offset()
    with open_source(path) as source:
        with path.open("r+b") as file:
            file.truncate(offset + 100)
        with pytest.raises(SourceError, match="the file ends before its data does") as caught:
            source.read([2])
    assert (caught.value.kind, caught.value.dataset, caught.value.sample) == ("read_failed", "data", 2)


# --- mapped -------------------------------------------------------------------------------------------


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what was mapped, here however short it is."""
    lengths: list[int] = []
    real = memory.map_read_only

    def spy(fd: int, nbytes: int, *, first: int = 0) -> mmap.mmap:
        lengths.append(nbytes)
        return real(fd, nbytes, first=first)

    monkeypatch.setattr(memory, "map_read_only", spy)
    monkeypatch.setattr(regions, "_MAPPED_FROM", 1)
    return lengths


def read_mapped(path: Path, samples: Sequence[int]) -> np.ndarray:
    with open_source(path, is_mapped=True) as source:
        return source.read(samples)["fields"][..., 0]


def never_cached(fd: int, offset: int, nbytes: int) -> bool:
    return False


def no_space(fd: int, nbytes: int, *, first: int = 0) -> mmap.mmap:
    raise OSError(errno.ENOMEM, "no address space")


@pytest.mark.parametrize("user_block", [0, 512])
@pytest.mark.parametrize("at_once", [64 << 20, 100])
def test_contiguous_data_in_the_page_cache_are_copied_out_of_a_mapping(
    tmp_path: Path, mapped: list[int], monkeypatch: pytest.MonkeyPatch, user_block: int, at_once: int
) -> None:
    monkeypatch.setattr(regions, "_MAPPED_AT_ONCE", at_once)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", userblock_size=user_block) as file:
        file["data"] = VALUES
    np.testing.assert_array_equal(read_mapped(path, [1, 2, 3, 6]), VALUES[[1, 2, 3, 6]])
    assert len(mapped) == math.ceil(3 * 240 / at_once) + math.ceil(240 / at_once)


@pytest.mark.parametrize("why", ["cold", "no_address_space", "short", "in_this_process"])
def test_what_is_not_mapped_is_read(
    tmp_path: Path, mapped: list[int], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "cold":
        monkeypatch.setattr(files, "in_page_cache", never_cached)
    if why == "no_address_space":
        monkeypatch.setattr(memory, "map_read_only", no_space)
    if why == "short":
        monkeypatch.setattr(regions, "_MAPPED_FROM", 241)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = VALUES
    with open_source(path, is_mapped=why != "in_this_process") as source:
        np.testing.assert_array_equal(source.read([4])["fields"][0, ..., 0], VALUES[4])
    assert mapped == []


def test_cut_file_is_not_mapped(tmp_path: Path, mapped: list[int]) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = VALUES
        offset = file["data"].id.get_offset()
    with open_source(path, is_mapped=True) as source:
        with path.open("r+b") as file:
            file.truncate(offset + 600)
        with pytest.raises(SourceError, match="the file ends before its data does"):
            source.read([2])
        np.testing.assert_array_equal(source.read([1])["fields"][0, ..., 0], VALUES[1])
    assert len(mapped) == 1


def test_page_cache_is_asked_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    nbytes = 9 << 20
    path.write_bytes(bytes(nbytes))
    fd = files.open_existing(path)
    asked: list[int] = []
    real = os.preadv

    def spy(fd: int, to: list[bytearray], offset: int, flags: int = 0) -> int:
        asked.append(offset)
        if asked[-1] >= cold_from:
            raise BlockingIOError(errno.EAGAIN, "not there")
        return real(fd, to, offset, flags)

    monkeypatch.setattr(os, "preadv", spy)
    try:
        cold_from = nbytes
        assert files.in_page_cache(fd, 5, nbytes - 5)
        assert asked == [5, 5 + (4 << 20), 5 + (8 << 20), nbytes - 1]
        assert not files.in_page_cache(fd, 5, nbytes - 4)  # the file ends before
        cold_from = nbytes - 1
        assert not files.in_page_cache(fd, 0, nbytes)
        assert files.in_page_cache(fd, 0, cold_from)
    finally:
        files.close(fd)


# --- chunk by chunk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 1000])
@pytest.mark.parametrize("chunks", [(1, 6, 10), (3, 1, 10), (4, 4, 4)])
@pytest.mark.parametrize("reduce_time", [1, 5])
def test_each_chunk_is_decoded_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunks: tuple[int, ...],
    block_bytes: int,
    reduce_time: int,
) -> None:
    monkeypatch.setattr(regions, "BLOCK_BYTES", block_bytes)
    touched: Counter[tuple[int, int]] = Counter()
    getitem = h5py.Dataset.__getitem__

    def spy(dataset: h5py.Dataset, key: tuple[slice, ...]) -> np.ndarray:
        samples, times = (range(s.start, s.stop) for s in key[:2])
        touched.update({(s // chunks[0], t // chunks[1]) for s in samples for t in times})
        return getitem(dataset, key)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    dataset = dataset_of(tmp_path / "a.h5", chunks=chunks, compression="gzip", shuffle=True)
    out = np.empty((7, -(-6 // reduce_time), 10, 1), np.float32)
    selection = Selection(reduce_time=reduce_time)
    with dataset.file:
        read_hyperslabs(out, dataset, axes="stx", to_axes="stxc", first=0, selection=selection)
    np.testing.assert_array_equal(out[..., 0], VALUES[:, ::reduce_time])
    assert set(touched.values()) == {1}


@pytest.mark.parametrize(
    ("missing", "per_chunk", "sample_nbytes", "lengths"),
    [
        (range(20), 1, 8 << 20, [4, 4, 4, 4, 4]),
        (range(20), 3, 8 << 20, [3, 3, 3, 3, 3, 3, 2]),  # 4 would part a chunk
        (range(20), 8, 8 << 20, [8, 8, 4]),  # more than 32 MiB, so that a chunk is decoded once
        (range(20), 9, 8 << 20, [4, 4, 4, 4, 4]),  # more than 64 MiB: a chunk has to be parted
        ([0, 1, 5, 6, 7, 19], 3, 8 << 20, [3, 3]),  # samples that an earlier run left
        ([], 3, 1, []),
    ],
)
def test_batches_hold_whole_chunks(
    missing: list[int], per_chunk: int, sample_nbytes: int, lengths: list[int]
) -> None:
    in_file = np.array(missing, np.int64)
    batches = list(read._batches_of_units(in_file, per_chunk, sample_nbytes, read._batch_size(sample_nbytes)))
    assert [batch.stop - batch.start for batch in batches] == lengths
    assert np.concatenate([in_file[batch] for batch in batches] or [in_file]).tolist() == list(missing)


def test_build_asks_for_whole_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    with h5py.File(tmp_path / "source" / BURGERS, "w") as file:
        file.create_dataset("tensor", data=VALUES.repeat(3, axis=0), chunks=(4, 6, 10), compression="gzip")
    monkeypatch.setattr(read, "BATCH_BYTES", 5 * 240)
    config = settings(tmp_path, split="train", split_fractions=(0.9, 0.05, 0.05))
    plan = plan_store(config, "burgers1d", "train")
    assert plan.infos[0].samples_per_chunk == 4
    batches = read.read_batches(plan, np.arange(plan.num_samples), on_nan="fail")
    firsts = [int(batch.samples[0]) + plan.parts[0].indices.start for batch in batches]
    assert all(first % 4 == 0 for first in firsts[1:])


# --- memory, and what readers are ---------------------------------------------------------------------


@pytest.mark.multi_process
def test_memory_of_a_reader_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReaderPool, "process_class", ReaderProcess)
    # 384 MiB of holes in samples of 64 MiB.
    (tmp_path / "source").mkdir()
    shape = (6, 64, 1 << 18)
    with h5py.File(tmp_path / "source" / BURGERS, "w") as file:
        holes = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        holes.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        holes.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        h5py.h5d.create(file.id, b"tensor", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(shape), holes)
        file["x-coordinate"] = np.linspace(0, 1, shape[2], dtype="f4")
        file["t-coordinate"] = np.linspace(0, 1, shape[1] + 1, dtype="f4")
    peaks: list[int] = []

    def look(watcher: Recorder) -> None:
        for reader in watcher.pool.status().readers:
            status = Path(f"/proc/{reader.pid}/status").read_text()
            peaks.append(int(status.partition("VmHWM:")[2].split()[0]) << 10)

    config = settings(tmp_path, reduce_space=1 << 12, split_fractions=(1, 0, 0), split="train")
    config = config.model_copy(update={"reading": ReadingConfig(num_workers=1)})
    before = psutil.Process().memory_info().rss
    build(config, Recorder(on_advance=look))
    assert max(peaks) < 256 << 20  # Python, NumPy, HDF5, two slots of 32 MiB and a block of 24 MiB
    assert psutil.Process().memory_info().rss - before < 128 << 20


@pytest.mark.multi_process
def test_digest_by_a_reader_imports_nothing_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReaderPool, "process_class", ReaderProcess)
    path = tmp_path / "a.h5"
    dataset_of(path).file.close()
    with ReaderPool(1, slot_nbytes=4096) as pool:
        pool.ask(digest_request(path, "full", path.stat().st_size))
        imported = pool.ask(call(modules))
    assert not {name for name in imported if name.startswith("ups_store.build")}
    assert imported.isdisjoint({"yaml", "pydantic", "typer", "rich", "torch"})


# --- ranges -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_range_of_many_blocks_is_that_of_numpy(monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    monkeypatch.setattr("ups_store.sources.values._BLOCK_BYTES", 64)
    values = np.random.default_rng(0).normal(size=(50, 7)).astype(dtype)
    found = ValueRange.of(values)
    assert (found.minimum, found.maximum, found.is_finite) == (values.min(), values.max(), True)
    values[3, 3], values[40, 2], values[41, 0] = np.nan, np.inf, -np.inf
    finite = values[np.isfinite(values)]
    assert ValueRange.of(values) == ValueRange(float(finite.min()), float(finite.max()), 1, 2)
