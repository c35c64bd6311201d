"""A power loss at every point of a build, and everything that it may leave: no committed sample is ever lost.

The disk is `ups_store.testing.disk.Disk`, which tells written from durable bytes. Each test runs a build once
to count its changing operations, then once per operation with the power lost just before it, and resumes from
every image that may be found afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import ups_store
from ups_store.read.recovery import State, building_path, intact_parts, read_building_file, read_commits
from ups_store.read.verify import verify_file
from ups_store.system import files
from ups_store.testing.disk import Disk, PowerLoss, installed
from ups_store.write import writer as writer_module

N = 5
IDENTITY = {"seed": 0}
ARRAYS = {
    "fields": ups_store.ArraySpec((N, 2, 600), "float32"),  # large: a slot per sample
    "label": ups_store.ArraySpec((N, 3), "int16"),  # small: one plain chunk
    "nu": ups_store.ArraySpec((N,), "float64"),
}
CONSTANTS = {"x": np.linspace(0, 1, 300, dtype="float32")}
_RANDOM = np.random.default_rng(0)
VALUES = {
    "fields": _RANDOM.standard_normal((N, 2, 600)).astype("float32"),
    "label": _RANDOM.integers(-9, 9, (N, 3)).astype("int16"),
    "nu": _RANDOM.random(N),
}


@dataclass
class Run:
    """A build on a disk, and the samples of which it was told that they are committed."""

    path: Path
    acknowledged: set[int] = field(default_factory=set)

    def create(self, **options: object) -> ups_store.StoreWriter:
        return ups_store.create(self.path, ARRAYS, constants=CONSTANTS, identity=IDENTITY, **options)

    def commit(self, writer: ups_store.Committer, samples: list[int]) -> None:
        writer.commit_many(samples, {name: value[samples] for name, value in VALUES.items()})
        self.acknowledged |= set(samples)

    def to_the_end(self, **options: object) -> None:
        with self.create(**options) as writer:
            for sample in writer.missing().tolist():
                self.commit(writer, [sample])
            writer.finish()


def in_three_batches(run: Run) -> None:
    with run.create() as writer:
        run.commit(writer, [3])
        run.commit(writer, [0, 1, 4])
        run.commit(writer, [2])
        writer.finish()


def committing_twice(run: Run) -> None:
    with run.create() as writer:
        run.commit(writer, [1, 2])
        run.commit(writer, [2, 3])
        run.commit(writer, [0, 1, 2, 3, 4])
        writer.finish()


def by_two_committers(run: Run) -> None:
    with run.create() as writer, ups_store.join(run.path, identity=IDENTITY) as other:
        run.commit(writer, [0])
        run.commit(other, [0, 1])
        run.commit(writer, [1, 2])
        run.commit(other, [3, 4])
        writer.finish()


def in_pieces(run: Run) -> None:
    """Each sample of a batch is encoded and written by itself; one pair of syncs commits all of them."""
    with mock.patch.object(writer_module, "DURABLE_PIECE_BYTES", 1), run.create() as writer:
        run.commit(writer, [1, 3, 4])
        run.commit(writer, [0, 2])
        writer.finish()


def interrupted_and_resumed(run: Run) -> None:
    with run.create() as writer:
        run.commit(writer, [4, 2])
    run.to_the_end()


def replacing_another_build(run: Run) -> None:
    with ups_store.create(run.path, {"old": ups_store.ArraySpec((2,), "int8")}, identity={}) as old:
        old.commit(0, {"old": 1})
    run.to_the_end(on_mismatch="restart")


WORKLOADS = [
    in_three_batches,
    committing_twice,
    by_two_committers,
    in_pieces,
    interrupted_and_resumed,
    replacing_another_build,
]


def _undisturbed(path: Path) -> bytes:
    disk = Disk()
    with installed(disk):
        Run(path).to_the_end()
    finished = disk.read(path)
    assert finished is not None
    return finished


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> int:
    """Every point of power loss with --run-slow, every fifth without."""
    return 1 if request.config.getoption("--run-slow") else 5


def _images(
    workload: Callable[[Run], None], path: Path, before: dict[Path, bytes], *, stride: int
) -> Iterator[tuple[int, Run, dict[Path, bytes]]]:
    """Every image that a power loss at some points may leave, with what was acknowledged by then."""
    whole = Disk(before)
    with installed(whole):
        workload(Run(path))
    for at in range(0, whole.num_changes + 1, stride):
        disk, run = Disk(before, lose_power_at=at), Run(path)
        with installed(disk):
            try:
                workload(run)
            except PowerLoss:
                assert disk.is_off
        for names in disk.after_power_loss(seed=at):
            yield at, run, names


def _check_recorded(path: Path, acknowledged: set[int]) -> None:
    """Every acknowledged sample is committed, and every committed one holds the right bytes."""
    fd = files.open_existing(building_path(path))
    found = read_building_file(fd, building_path(path))
    if found.state is State.FINISHED or found.catalog.root.identity["content"] != IDENTITY:
        return  # a finished one is compared as a whole
    assert found.header is not None
    layout = found.catalog.layout
    committed, crcs = read_commits(fd, layout, found.header)
    samples = np.flatnonzero(committed)
    assert intact_parts(fd, layout, samples, crcs[samples]).all()
    for sample in samples.tolist():
        for array in layout.per_sample:
            first, _ = array.slot(sample)
            expected = VALUES[array.meta.name][sample].tobytes()
            assert files.read_at(fd, first, len(expected)) == expected
    assert acknowledged <= set(np.flatnonzero(committed).tolist())


@pytest.mark.no_cover  # traced it takes more than twice as long; the next test reaches its lines
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
@pytest.mark.parametrize("published", [None, b"an older store"], ids=["first", "rebuild"])
def test_power_loss_anywhere_keeps_every_committed_sample(
    tmp_path: Path, workload: Callable[[Run], None], published: bytes | None, stride: int
) -> None:
    """Spec 6.5 to 6.9: the old file or a resumable one, never neither; resuming gives the same bytes."""
    path = tmp_path / "a.zarr.zip"
    expected, before = _undisturbed(path), {} if published is None else {path: published}
    num_images = 0
    for at, run, names in _images(workload, path, before, stride=stride):
        where = f"power lost before change {at}, files {sorted(p.name for p in names)}"
        left = Disk(names)
        with installed(left):
            assert left.read(path) in (published, expected), where
            if building_path(path) in names:
                _check_recorded(path, run.acknowledged)
            else:
                assert left.read(path) == expected or not run.acknowledged, where
            Run(path).to_the_end(on_mismatch="restart")
            assert verify_file(path).ok, where
        assert left.read(path) == expected, where
        num_images += 1
    assert num_images > 250 // stride, "the enumeration became trivial"


def test_lazy_power_loss_anywhere_never_shows_a_wrong_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """Spec 6.5.3: after another boot a recorded sample counts only if its bytes are right."""
    path = tmp_path / "a.zarr.zip"
    expected = _undisturbed(path)

    def lazily(run: Run) -> None:
        with run.create(durability="lazy") as writer:
            run.commit(writer, [3])
            run.commit(writer, [0, 1, 4])
            run.commit(writer, [2])
            writer.finish()

    monkeypatch.setattr(files, "boot_id", lambda: b"the first boot..")
    images = list(_images(lazily, path, {}, stride=stride))
    monkeypatch.setattr(files, "boot_id", lambda: b"the second boot.")
    for at, _, names in images:
        left = Disk(names)
        with installed(left):
            if building_path(path) in names:
                _check_recorded(path, acknowledged=set())
            Run(path).to_the_end(durability="lazy")
            assert verify_file(path).ok, f"power lost before change {at}"
        assert left.read(path) == expected
    assert len(images) > 250 // stride


def test_commit_in_pieces_syncs_once_and_lets_the_disk_begin_early(tmp_path: Path) -> None:
    """Spec 6.7: `files.start_writeback` is a hint; what counts are the two syncs of the whole batch."""
    whole, pieces = Disk(), Disk()
    for disk, workload in [(whole, in_three_batches), (pieces, in_pieces)]:
        with installed(disk):
            workload(Run(tmp_path / "a.zarr.zip"))
    assert (whole.num_syncs, pieces.num_syncs) == (3 + 4 + 3 * 2, 3 + 4 + 2 * 2)
    assert (whole.num_writebacks, pieces.num_writebacks) == (3, N)  # one per piece of `fields`


def test_durable_build_syncs_twice_per_batch(tmp_path: Path) -> None:
    """Spec 6.7: what the protocol costs, so that a sync that is lost or added is noticed."""
    counts = []
    for batches in ([[0, 1, 2, 3, 4]], [[0, 1], [2, 3, 4]]):
        disk, run = Disk(), Run(tmp_path / "a.zarr.zip")
        with installed(disk), run.create() as writer:
            for samples in batches:
                run.commit(writer, samples)
            writer.finish()
        counts.append(disk.num_syncs)
    creating, finishing, per_batch = 3, 4, 2
    assert counts == [creating + finishing + per_batch, creating + finishing + 2 * per_batch]


def test_builder_killed_anywhere_lets_other_committers_do_no_harm(tmp_path: Path) -> None:
    """Spec 6.3: also when it dies between cutting the tail off and publishing (found by the kill storm)."""
    path = tmp_path / "a.zarr.zip"
    expected, at, was_killed = _undisturbed(path), 0, True
    while was_killed:
        disk, run, was_killed = Disk(), Run(path), False
        with installed(disk):
            writer, other = run.create(), ups_store.join(path, identity=IDENTITY)
            disk.lose_power_at = disk.num_changes + at
            try:
                run.commit(writer, [0, 1, 2])
                run.commit(writer, [3, 4])
                writer.finish()
            except PowerLoss:
                was_killed = True
            writer.close()
            disk.go_on()
            with contextlib.suppress(ups_store.StoreReplacedError), other:
                run.commit(other, [0, 1, 2, 3, 4])
            if was_killed:
                run.to_the_end()
        assert disk.read(path) == expected, f"killed before change {at}"
        at += 1
    assert at > 20, "the enumeration became trivial"
