"""Samples handed over one at a time: what is acknowledged when, and that only committed ones are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lossy_disk import Disk, installed
from ragged_stores import check_same, ragged_specs, ragged_values
from small_stores import all_arrays, assert_same_bits, begin, mixed_values, sample_of

import ups_store
from ups_store import CommitError, SpecError, StoreWriter
from ups_store.system import files
from ups_store.writing import writer as writer_module

N = 6
VALUES = mixed_values(N)
SAMPLE_BYTES = sum(value[0].nbytes for value in VALUES.values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds as the test sets them."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(writer_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def as_arrays(sample: dict[str, Any]) -> dict[str, Any]:
    """As there is nothing to convert."""
    return {name: np.asarray(value) for name, value in sample.items()}


def handed_over(
    writer: StoreWriter, samples: list[int], *, num_together: float, convert: Any = as_arrays
) -> list[list[int]]:
    """What each call acknowledged, that of the end last; everything that was is committed."""
    acknowledged = []
    with writer.batched(buffer_bytes=int(num_together * SAMPLE_BYTES), save_every_s=1e9) as batch:
        for sample in samples:
            acknowledged.append(batch.commit(sample, convert(sample_of(VALUES, sample))).tolist())
            assert not set(writer.missing().tolist()) & {i for done in acknowledged for i in done}
        acknowledged.append(batch.flush().tolist())
    return acknowledged


def test_samples_are_acknowledged_together_in_their_order_and_read_back(path: Path, clock: Any) -> None:
    with begin(path, VALUES) as writer:
        found = handed_over(writer, [4, 0, 3, 5, 1, 2], num_together=2.5)
        assert found == [[], [4, 0], [], [3, 5], [], [1, 2], []]
        writer.finish()
    assert_same_bits(all_arrays(path), VALUES)


def as_lists(sample: dict[str, Any]) -> dict[str, Any]:
    """Of the numbers that Python has."""
    return sample | {"nu": float(sample["nu"]), "mask": sample["mask"].tolist()}


def far_apart(sample: dict[str, Any]) -> dict[str, Any]:
    """With gaps, and the bytes the other way round."""
    return sample | {"fields": np.asfortranarray(sample["fields"]), "nu": sample["nu"].astype(">f8")}


@pytest.mark.parametrize("convert", [as_lists, far_apart])
def test_unusual_values_are_taken_too(path: Path, clock: Any, convert: Any) -> None:
    with begin(path, VALUES) as writer:
        assert handed_over(writer, list(range(N)), num_together=4, convert=convert)[3] == [0, 1, 2, 3]
        writer.finish()
    assert_same_bits(all_arrays(path), VALUES)


def test_sample_as_large_as_the_buffer_is_acknowledged_at_once(path: Path, clock: Any) -> None:
    with begin(path, VALUES) as writer:
        assert handed_over(writer, [2, 1], num_together=0.5) == [[2], [1], []]


def test_values_are_copied(path: Path, clock: Any) -> None:
    with begin(path, VALUES) as writer:
        with writer.batched(save_every_s=1e9) as batch:
            for sample in range(N):
                mine = {name: np.array(value) for name, value in sample_of(VALUES, sample).items()}
                batch.commit(np.int64(sample) if sample % 2 else sample, mine)  # type: ignore[arg-type]
                for value in mine.values():
                    value[...] = 1
            assert batch.num_waiting == 0  # that is all there are
        writer.finish()
    assert_same_bits(all_arrays(path), VALUES)


def test_what_waits_too_long_is_committed_by_the_next_call(path: Path, clock: Any) -> None:
    with begin(path, VALUES) as writer, writer.batched(save_every_s=2) as batch:
        clock.now += 50  # nothing waits
        assert not len(batch.commit(3, sample_of(VALUES, 3)))
        clock.now += 1
        assert not len(batch.commit(0, sample_of(VALUES, 0)))
        clock.now += 1
        assert batch.commit(1, sample_of(VALUES, 1)).tolist() == [3, 0, 1]
        assert not len(batch.commit(2, sample_of(VALUES, 2)))


@pytest.mark.parametrize(
    ("index", "change", "kind"),
    [
        (N, {}, "index"),
        (True, {}, "index"),
        (1, {"nu": np.float32(1)}, "dtype"),
        (1, {"mask": np.zeros(3, bool)}, "shape"),
        (1, {"extra": 1}, "arrays"),
    ],
)
def test_wrong_sample_is_refused_when_it_is_handed_over(
    path: Path, clock: Any, index: int, change: dict[str, Any], kind: str
) -> None:
    with begin(path, VALUES) as writer:
        with writer.batched(save_every_s=1e9) as batch:
            batch.commit(0, sample_of(VALUES, 0))
            with pytest.raises(SpecError) as caught:
                batch.commit(index, sample_of(VALUES, 1) | change)
            assert caught.value.kind == kind
            assert batch.num_waiting == 1
        assert writer.missing().tolist() == [1, 2, 3, 4, 5]


def test_error_in_the_block_leaves_what_was_handed_over_committed(path: Path, clock: Any) -> None:
    with begin(path, VALUES) as writer:
        batch = writer.batched(save_every_s=1e9)
        batch.commit(0, sample_of(VALUES, 0))
        with pytest.raises(ZeroDivisionError), batch:
            raise ZeroDivisionError
        assert writer.missing().tolist() == [1, 2, 3, 4, 5]


def test_failed_sync_acknowledges_nothing_and_is_not_tried_again(
    path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(5, "Input/output error")

    with begin(path, VALUES) as writer:
        batch = writer.batched(save_every_s=1e9)
        batch.commit(0, sample_of(VALUES, 0))
        with monkeypatch.context() as patch:
            patch.setattr(files, "sync_data", fail)
            with pytest.raises(CommitError, match="Input/output error"), batch:
                batch.flush()
        assert len(calls) == 1
        assert batch.num_waiting == 1
        with pytest.raises(CommitError, match="earlier commit"):
            batch.flush()
    with begin(path, VALUES) as again:
        assert len(again.missing()) == N


def test_batches_cost_two_syncs_each(path: Path, clock: Any) -> None:
    counts = []
    for num_together in (1, 3):
        disk = Disk()
        with installed(disk), begin(path, VALUES) as writer:
            handed_over(writer, list(range(N)), num_together=num_together)
        counts.append(disk.num_syncs)
    assert counts[0] - counts[1] == 2 * (N - N // 3)


@pytest.mark.parametrize("limits", [{"buffer_bytes": 0}, {"save_every_s": float("nan")}])
def test_limits_that_are_none_are_refused(path: Path, limits: dict[str, Any]) -> None:
    with begin(path, VALUES) as writer, pytest.raises(SpecError) as caught:
        writer.batched(**limits)
    assert caught.value.kind == "argument"


def test_ragged_samples_count_as_they_are(tmp_path: Path, clock: Any) -> None:
    values = ragged_values()
    num = len(values["label"])
    target = tmp_path / "ragged.zarr.zip"
    with ups_store.create(target, ragged_specs(values), identity={}) as writer:
        with writer.batched(buffer_bytes=100, save_every_s=1e9) as batch:
            samples = [{name: value[i] for name, value in values.items()} for i in range(num)]
            acknowledged = [batch.commit(i, sample) for i, sample in enumerate(samples)]
            acknowledged.append(batch.flush())
        writer.finish()
    assert np.concatenate(acknowledged).tolist() == list(range(num))
    assert sum(map(len, acknowledged)) > max(map(len, acknowledged)), "more than one batch"
    with ups_store.open(target) as store:
        check_same(store.gather(range(num)), values, range(num))
