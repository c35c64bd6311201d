"""Committing and finishing: what is accepted, what lies in the file afterwards, what others see when."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from small_stores import (
    all_arrays,
    assert_same_bits,
    begin,
    build,
    flip,
    mixed_constants,
    mixed_values,
    names_in,
    sample_of,
    samples_of,
)

import ups_store
from ups_store import CorruptChunkError, NotCommittedError, SpecError, StoreClosedError
from ups_store.system import files, runs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


# --- round trips --------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["durable", "lazy"])
def test_commit_of_each_sample_reads_back_the_same_bits(path: Path, durability: str) -> None:
    values = mixed_values()
    with begin(path, values, constants=mixed_constants(), durability=durability) as writer:
        assert all(writer.commit(i, sample_of(values, i)) for i in (2, 0, 3, 1))
        assert writer.finish() == path
    assert_same_bits(all_arrays(path), values)
    with ups_store.open(path) as store:
        assert_same_bits(store.constants, mixed_constants())


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 3, 0, 2]])
def test_commit_many_in_any_order_reads_back_the_same_bits(path: Path, order: list[int]) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        written = writer.commit_many(order, samples_of(values, order))
        assert written.tolist() == [True] * 4
        writer.finish()
    assert_same_bits(all_arrays(path), values)


def test_store_without_arrays_holds_its_constants(path: Path) -> None:
    with begin(path, {}, constants=mixed_constants()) as writer:
        assert writer.num_samples == 0
        assert writer.missing().tolist() == []
        writer.finish()
    with ups_store.open(path) as store:
        assert len(store) == 0
        assert store.arrays == {}
        assert_same_bits(store.constants, mixed_constants())
        assert store.verify().ok


def test_sparse_batch_reads_back(path: Path) -> None:
    values = {"nu": np.arange(64.0)}
    with begin(path, values) as writer:
        assert writer.commit_many([63, 0], samples_of(values, [63, 0])).all()
        assert not writer.commit_many([0, 63], samples_of(values, [0, 63])).any()
        rest = writer.missing()
        assert rest.tolist() == list(range(1, 63))
        writer.commit_many(rest, samples_of(values, rest))
        writer.finish()
    assert_same_bits(all_arrays(path), values)


# --- committing twice, and what is missing ------------------------------------------------------------


def test_commit_of_a_committed_sample_writes_nothing(path: Path) -> None:
    values, others = mixed_values(seed=0), mixed_values(seed=1)
    with begin(path, values) as writer:
        assert writer.commit(1, sample_of(values, 1)) is True
        before = writer.building.building_path.read_bytes()
        assert writer.commit(1, sample_of(values, 1)) is False
        with pytest.raises(SpecError, match="committed with other values"):
            writer.commit(1, sample_of(others, 1))
        assert writer.building.building_path.read_bytes() == before


def test_commit_many_writes_only_what_is_missing(path: Path) -> None:
    values = mixed_values(seed=0)
    with begin(path, values) as writer:
        writer.commit_many([2, 0], samples_of(values, [2, 0]))
        assert writer.missing().tolist() == [1, 3]
        written = writer.commit_many([3, 2, 1, 0], samples_of(values, [3, 2, 1, 0]))
        assert written.tolist() == [True, False, True, False]
        assert writer.missing().tolist() == []
        writer.finish()
    assert_same_bits(all_arrays(path), values)


def test_commits_from_many_threads_write_each_sample_once(path: Path) -> None:
    values = mixed_values(24)
    written: list[int] = []

    def work(order: npt.NDArray[np.int64]) -> None:
        written.extend(i for i in order.tolist() if writer.commit(i, sample_of(values, i)))

    with begin(path, values, durability="lazy") as writer:
        orders = [np.random.default_rng(seed).permutation(24) for seed in range(4)]
        threads = [threading.Thread(target=work, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.finish()
    assert sorted(written) == list(range(24))
    assert_same_bits(all_arrays(path), values)


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "array", "expected", "found"),
    [
        ({"nu": np.zeros(2)}, "shape", "nu", (1,), (1, 2)),
        ({"fields": np.zeros((5, 64), np.float32)}, "shape", "fields", (1, 5, 64, 4), (1, 5, 64)),
        ({"nu": np.float32(1)}, "dtype", "nu", "float64", np.float32),
        ({"mask": np.zeros(64, np.uint8)}, "dtype", "mask", "bool", np.uint8),
        ({"latent": np.zeros((5, 3, 2), np.uint16)}, "dtype", "latent", "bfloat16", np.uint16),
        ({"beta": np.zeros(2)}, "arrays", None, sorted(mixed_values()), sorted([*mixed_values(), "beta"])),
    ],
)
def test_commit_refuses_what_was_not_declared(
    path: Path, change: dict[str, Any], kind: str, array: str | None, expected: Any, found: Any
) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        with pytest.raises(SpecError) as caught:
            writer.commit(0, {**sample_of(values, 0), **change})
        error = caught.value
        assert (error.kind, error.array) == (kind, array)
        assert (error.expected, error.found) == (expected, found)
        assert len(writer.missing()) == 4


def test_commit_refuses_a_sample_without_one_of_its_arrays(path: Path) -> None:
    values = mixed_values()
    sample = sample_of(values, 0)
    del sample["nu"]
    with begin(path, values) as writer, pytest.raises(SpecError, match="committed together") as caught:
        writer.commit(0, sample)
    assert caught.value.found == ["fields", "latent", "mask", "nothing"]


@pytest.mark.parametrize(
    ("indices", "found"),
    [
        ([0, 4], 4),
        ([-1, 0], -1),
        (np.array([0, 2**63], np.uint64), 2**63),
        ([0, 0], [0, 0]),
        ([0.0, 1.0], [0.0, 1.0]),
        ([[0, 1]], [[0, 1]]),
        (["0", "1"], ["0", "1"]),
        ([True, False], [True, False]),
    ],
)
def test_commit_many_refuses_wrong_indices(path: Path, indices: Any, found: Any) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        with pytest.raises(SpecError) as caught:
            writer.commit_many(indices, samples_of(values, [0, 1]))
        assert (caught.value.kind, caught.value.found) == ("index", found)
        assert len(writer.missing()) == 4


# --- finishing ----------------------------------------------------------------------------------------


def test_finish_with_missing_samples_names_the_first_and_leaves_the_writer_usable(path: Path) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit_many([0, 3], samples_of(values, [0, 3]))
        with pytest.raises(NotCommittedError, match="2 of 4 samples") as caught:
            writer.finish()
        assert (caught.value.sample, caught.value.kind) == (1, "not_committed")
        assert not path.exists()
        writer.commit_many([1, 2], samples_of(values, [1, 2]))
        writer.finish()
    assert_same_bits(all_arrays(path), values)


def test_finish_leaves_one_file_and_a_closed_writer(path: Path) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        assert names_in(path.parent) == [f"{path.name}.building"]
        writer.commit_many(range(4), values)
        writer.finish()
        assert names_in(path.parent) == [path.name]
        for call in (writer.missing, writer.finish, lambda: writer.commit(0, sample_of(values, 0))):
            with pytest.raises(StoreClosedError):
                call()


def test_published_file_stays_until_the_next_one_is_finished(path: Path) -> None:
    old, new = mixed_values(seed=0), mixed_values(seed=1)
    before = build(path, old).read_bytes()
    with ups_store.open(path) as store, begin(path, new) as writer:
        writer.commit_many(range(4), new)
        assert path.read_bytes() == before
        writer.finish()
        assert_same_bits({name: store[name] for name in store.arrays}, old)
    assert_same_bits(all_arrays(path), new)


def test_finish_after_a_change_of_folder_publishes_at_the_same_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = mixed_values()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with begin(Path("relative.zarr.zip"), values) as writer:
        monkeypatch.chdir("elsewhere")
        writer.commit_many(range(4), values)
        assert writer.finish() == tmp_path / "relative.zarr.zip"
    assert_same_bits(all_arrays(tmp_path / "relative.zarr.zip"), values)


@pytest.mark.parametrize("name", ["nu", "x"])
def test_finish_refuses_plain_chunks_that_changed_since_they_were_written(path: Path, name: str) -> None:
    values = mixed_values()
    with begin(path, values, constants=mixed_constants()) as writer:
        writer.commit_many(range(4), values)
        array = writer.building.layout.arrays[name]
        flip(writer.building.building_path, array.offset)
        with pytest.raises(CorruptChunkError) as caught:
            writer.finish()
    assert array.entry is not None
    assert (caught.value.array, caught.value.byte_range) == (name, (array.offset, array.entry.end))
    assert not path.exists()


def test_slot_that_changed_before_finish_is_found_by_verify(path: Path) -> None:
    """Finishing combines the recorded checksums and doesn't read large arrays again: damage shows."""
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit_many(range(4), values)
        flip(writer.building.building_path, writer.building.layout.arrays["fields"].slot(2)[0])
        writer.finish()
    with ups_store.open(path) as store:
        assert store.verify().damaged == {"fields": [2]}


# --- the same arguments give the same bytes -----------------------------------------------------------


def test_file_is_a_function_of_the_values_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no order, batches, durability, boot, and neither of the compiled module."""
    values = mixed_values(6)
    expected = build(path, values, constants=mixed_constants()).read_bytes()
    monkeypatch.setattr(files, "boot_id", lambda: bytes(range(16)))
    for seed, batch in [(0, 1), (1, 4), (2, 2)]:
        monkeypatch.setattr(runs, "compiled", runs.compiled if seed < 2 else None)
        order = np.random.default_rng(seed).permutation(6)
        lazy = "lazy" if seed else "durable"
        reordered = dict(reversed(values.items()))
        with begin(path, reordered, constants=mixed_constants(), durability=lazy) as writer:
            for first in range(0, 6, batch):
                chosen = order[first : first + batch]
                writer.commit_many(chosen, samples_of(values, chosen))
            writer.finish()
        assert path.read_bytes() == expected


# --- a lazy build after another boot ------------------------------------------------------------------


@pytest.mark.parametrize("boot", [bytes(range(16)), bytes(16)], ids=["another boot", "unknown boot"])
def test_lazy_build_after_another_boot_drops_samples_whose_bytes_do_not_check(
    path: Path, monkeypatch: pytest.MonkeyPatch, boot: bytes
) -> None:
    values = mixed_values()
    with begin(path, values, durability="lazy") as writer:
        writer.commit_many([0, 1, 2], samples_of(values, [0, 1, 2]))
        layout, where = writer.building.layout, writer.building.building_path
    for offset in (layout.arrays["fields"].slot(0)[0], layout.arrays["nu"].slot(2)[0]):
        flip(where, offset)
    monkeypatch.setattr(files, "boot_id", lambda: boot)
    with begin(path, values, durability="lazy") as writer:
        assert writer.missing().tolist() == [0, 2, 3]
        assert writer.commit_many([0, 1, 2, 3], values).tolist() == [True, False, True, True]
        writer.finish()
    assert_same_bits(all_arrays(path), values)


def test_lazy_build_in_the_same_boot_trusts_its_records(path: Path) -> None:
    values = mixed_values()
    with begin(path, values, durability="lazy") as writer:
        writer.commit_many(range(4), values)
        flip(writer.building.building_path, writer.building.layout.arrays["fields"].slot(1)[0])
        assert writer.missing().tolist() == []


def test_record_that_does_not_check_means_not_committed(path: Path) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit_many(range(4), values)
        layout, fd = writer.building.layout, writer.building.fd
        for sample, byte in [(1, 0), (2, 4), (3, layout.record_nbytes - 1)]:
            at = layout.table_offset + sample * layout.record_nbytes + byte
            os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
        assert writer.missing().tolist() == [1, 2, 3]
