"""How packed stores are decoded: by threads, each sample once a batch, into memory; what loaders say."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import MakeStore, assert_same_bits, build

import ups_store
from ups_store.errors import AccessError, MemoryLimitError, SpecError
from ups_store.packed import store as packed_store
from ups_store.packed.pack import pack, pack_store
from ups_store.packed.store import PackedStore
from ups_store.read import chunked, preload
from ups_store.read.chunked import SHARED, KeptSamples

N, T = 12, 9
VALUES = {
    "latent": np.random.default_rng(0).standard_normal((N, T, 32, 8)).round(1).astype(np.float16),
    "nu": np.linspace(0, 1, N),
}
DIMS = {"latent": ("sample", "time", "token", "width"), "t": ("time",)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    constants = {"t": np.arange(T, dtype=np.float64)}
    mapped = build(tmp_path / "a_train.zarr.zip", VALUES, constants=constants, dims=DIMS)
    with ups_store.open(mapped) as store:
        return pack_store(store, tmp_path / "a_train.packed.zarr.zip").path


@pytest.fixture
def packed(path: Path) -> Iterator[ups_store.PackedStore]:
    with ups_store.open(path) as store:
        assert isinstance(store, ups_store.PackedStore)
        yield store


class Decoded(list[tuple[str, int | None]]):
    """Array and sample of every chunk that is decoded from here on."""

    def __init__(self, patch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> None:
        read = PackedStore.read_chunk

        def counting(reader: PackedStore, name: str, sample: int | None, out: Any) -> bytes:
            before()
            self.append((name, sample))
            return read(reader, name, sample, out)

        patch.setattr(PackedStore, "read_chunk", counting)


def test_gather_decodes_by_as_many_threads_as_there_are_processors(
    packed: ups_store.PackedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_store, "BYTES_PER_THREAD", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    together = threading.Barrier(3, timeout=60)  # broken unless three threads decode at a time
    Decoded(monkeypatch, together.wait)
    assert_same_bits(packed.gather([5, 1, 9], ["latent"]), {"latent": VALUES["latent"][[5, 1, 9]]})


def test_samples_that_were_decoded_last_are_kept_up_to_a_limit() -> None:
    kept, store, other = KeptSamples(limit=30), object(), object()
    for number in range(3):
        kept.put((store, "u", number), np.full(10, number, np.uint8))
    assert kept.get((store, "u", 0)) is not None  # now 1 is the one that wasn't used for longest
    kept.put((other, "u", 0), np.zeros(10, np.uint8))
    kept.put((other, "u", 1), np.zeros(31, np.uint8))
    found = [kept.get((store, "u", number)) is not None for number in range(3)]
    assert found == [True, False, True]
    assert kept.get((other, "u", 1)) is None
    kept.forget(store)
    assert kept.get((store, "u", 0)) is None
    assert kept.get((other, "u", 0)) is not None


def test_preload_as_a_copy_decodes_everything_once(
    packed: ups_store.PackedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    with pytest.raises(SpecError):
        packed["latent"]
    report = packed.preload("copy", progress=steps.append)
    assert (report.mode, report.nbytes) == ("copy", sum(v.nbytes for v in VALUES.values()) + T * 8)
    assert sum(steps) == VALUES["latent"].nbytes
    assert packed.residency() == 1
    decoded = Decoded(monkeypatch)
    assert_same_bits(packed.gather([7, 0, 7]), {name: value[[7, 0, 7]] for name, value in VALUES.items()})
    window = packed.gather([7, 0], ["latent"], start=[1, 5], length=2, stride=2)["latent"]
    assert np.array_equal(window, np.stack([VALUES["latent"][7, 1:4:2], VALUES["latent"][0, 5:8:2]]))
    out = {"latent": np.empty((2, T, 32, 8), np.float32)}
    assert np.array_equal(packed.gather([3, 4], ["latent"], out=out)["latent"], VALUES["latent"][[3, 4]])
    assert np.array_equal(packed["latent"], VALUES["latent"])
    assert not packed["latent"].flags.writeable
    assert decoded == []
    assert packed.preload().mode == "copy"  # nothing is left to do


def test_preload_takes_the_page_cache_where_a_copy_does_not_fit(
    packed: ups_store.PackedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = packed.nbytes + 5000
    monkeypatch.setattr(preload, "available_bytes", lambda: room)
    payload = sum(value.nbytes for value in VALUES.values())
    assert payload > room  # the packed file fits, its samples don't
    with pytest.raises(MemoryLimitError):
        packed.preload("copy")
    report = packed.preload("auto", margin=0)
    assert report.mode == "page-cache"
    assert report.why.startswith("copy refused")


# --- in its own place


def test_file_is_packed_and_unpacked_in_its_own_place(path: Path) -> None:
    mapped = path.with_name("a_train.zarr.zip")
    before = mapped.read_bytes()
    for codec in ("pcodec", "blosc"):
        assert pack(mapped, mapped, codec) == mapped
        assert pack(mapped, mapped, codec) == mapped  # nothing to do
        with ups_store.open(mapped) as store:
            assert store.codec == codec
            assert store.verify().ok
            assert_same_bits(store.gather([3, 1]), {name: value[[3, 1]] for name, value in VALUES.items()})
        with pytest.raises(SpecError, match="unpack it first") as caught:
            pack(mapped, mapped, "pcodec" if codec == "blosc" else "blosc")
        assert caught.value.kind == "packed"
        pack(mapped, mapped, "none")
        assert mapped.read_bytes() == before
    out = pack(mapped, mapped.with_name("b.packed.zarr.zip"))
    assert out.read_bytes() == path.read_bytes()
    assert pack(out, mapped.with_name("b.zarr.zip"), "none").read_bytes() == before


def test_read_only_file_is_packed_in_its_place_by_force_only_and_keeps_its_mode(path: Path) -> None:
    path.chmod(0o444)
    with pytest.raises(AccessError):
        pack(path, path, "none")
    pack(path, path, "none", force=True)
    assert path.stat().st_mode & 0o777 == 0o444
    with pytest.raises(AccessError):
        pack(path, path, "pcodec")
    pack(path, path, "pcodec", force=True)
    assert path.stat().st_mode & 0o777 == 0o444


def test_store_in_partitions_is_not_packed_as_one(tmp_path: Path) -> None:
    place = partitions_of(tmp_path)
    with pytest.raises(SpecError, match="pack each of its"):
        pack(place, tmp_path / "b.zarr.zip", "pcodec")


# --- loaders


def partitions_of(folder: Path) -> Path:
    """The values in three packed partitions; their pattern."""
    for number in range(3):
        values = {name: value[4 * number : 4 * number + 4] for name, value in VALUES.items()}
        part = build(
            folder / f"p_train-0000{number}-of-00003.zarr.zip",
            values,
            dims=DIMS,
            identity={"task": "p"},
            partition=(number, 3),
        )
        pack(part, part)
    return folder / "p_train-*-of-00003.zarr.zip"


@pytest.fixture
def torch_room() -> Any:
    pytest.importorskip("torch")
    from ups_store import torch

    return torch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_of_packed_stores_gives_the_batches_of_mapped_ones(
    path: Path, torch_room: Any, num_workers: int
) -> None:
    window = torch_room.Window(horizon=2, stride=2)
    batches = []
    for given in (path, path.with_name("a_train.zarr.zip")):
        dataset = torch_room.StoreDataset(given, window=window)
        loader = torch_room.make_loader(dataset, batch_size=5, shuffle="block", num_workers=num_workers)
        batches.append(list(loader))
        assert loader.report().access == ("decode" if given is path else "map")
        assert str(loader.report()).endswith("resident, decoded" if given is path else "resident")
        assert (", decoded" in repr(dataset)) == (given is path)
    assert len(batches[0]) == len(batches[1]) > 0
    for found, expected in zip(*batches, strict=True):
        assert found.keys() == expected.keys()
        for key in ("z0", "z1", "t", "dt", "index"):
            assert np.array_equal(found[key], expected[key]), key


def test_batch_of_windows_decodes_each_sample_once_for_all_its_tensors(
    path: Path, torch_room: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    dataset = torch_room.StoreDataset(
        path, window=torch_room.Window(horizon=2), names=["nu"], dtype=torch.float32
    )
    monkeypatch.setattr(chunked, "SHARED", KeptSamples(0))  # nothing is kept from call to call
    decoded = Decoded(monkeypatch)
    batch = dataset.batch([0, 1, 2, 20])
    assert [pair for pair in decoded if pair[0] == "latent"] == [("latent", 0), ("latent", 2)]
    assert np.array_equal(batch["z0"][1], VALUES["latent"][0, 1].astype(np.float32))
    assert np.array_equal(batch["z1"][3], VALUES["latent"][2, 7:9].astype(np.float32))


def test_auto_shuffle_takes_blocks_for_windows_of_packed_samples_unless_they_are_in_memory(
    path: Path, torch_room: Any
) -> None:
    window = torch_room.Window(horizon=1)
    with ups_store.open(path) as store:
        whole = torch_room.StoreDataset(store)
        assert torch_room.make_loader(whole, batch_size=2, shuffle="auto").order.shuffle is True
        dataset = torch_room.StoreDataset(store, window=window)
        assert torch_room.make_loader(dataset, batch_size=2, shuffle="auto").order.shuffle == "block"
        store.preload("copy")
        assert torch_room.make_loader(dataset, batch_size=2, shuffle="auto").order.shuffle is True


@pytest.mark.parametrize(("available", "rung"), [(10**9, "preloaded"), (40_000, "decoded")])
def test_packed_store_is_opened_as_a_dataset_decoded_into_memory_if_it_fits(
    path: Path, torch_room: Any, monkeypatch: pytest.MonkeyPatch, available: int, rung: str
) -> None:
    monkeypatch.setattr(preload, "available_bytes", lambda: available)
    opened = torch_room.open_dataset(path)
    assert opened.rung == rung
    assert np.array_equal(opened.dataset[5]["latent"], VALUES["latent"][5])


def test_forked_process_decodes_with_samples_kept_by_its_parent(packed: ups_store.PackedStore) -> None:
    expected = packed.gather([1], ["latent"], length=2)
    with SHARED._lock:  # as if another thread were in the middle of it
        child = os.fork()
        if not child:
            found = packed.gather([1], ["latent"], length=2)
            os._exit(0 if np.array_equal(found["latent"], expected["latent"]) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_pattern_of_packed_partitions_tells_its_codec(tmp_path: Path, make_store: MakeStore) -> None:
    with ups_store.open(partitions_of(tmp_path)) as store:
        assert (store.codec, store.access) == ("blosc", "decode")
    part = tmp_path / "p_train-00001-of-00003.zarr.zip"
    pack(part, part, "none")
    with ups_store.open(tmp_path / "p_train-*-of-00003.zarr.zip") as store:
        assert (store.codec, store.access) == ("mixed", "mixed")
        assert np.array_equal(store.gather(slice(None))["latent"], VALUES["latent"])
    assert ups_store.open(make_store()).codec == "none"


def test_samples_of_a_closed_store_are_let_go_of(path: Path) -> None:
    for close in (True, False):
        store = ups_store.open(path)
        before = len(SHARED._samples)
        store.gather([0, 1], ["latent"], length=1)
        assert len(SHARED._samples) == before + 2
        if close:
            store.close()
        del store
        assert len(SHARED._samples) == before
