"""A power loss at every point of a build, and everything that it may leave: no committed sample is ever lost.

The disk is `lossy_disk.Disk`, which tells written from durable bytes. Each test runs a build once
to count its changing operations, then once per operation with the power lost just before it, and resumes from
every image that may be found afterwards.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from crash_builds import (
    IDENTITY,
    LAZY_WORKLOADS,
    WORKLOADS,
    N,
    Run,
    Workload,
    check_image,
    images_of,
    in_pieces,
    in_three_batches,
    replacing_another_build,
    undisturbed,
)
from lossy_disk import Disk, PowerLoss, installed

import ups_store
from ups_store.system import files


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> int:
    """Every point of power loss with --run-slow, every 16th without."""
    return 1 if request.config.getoption("--run-slow") else 16


@pytest.mark.timeout(900)
@pytest.mark.no_cover  # traced it takes more than twice as long; the next test reaches its lines
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
@pytest.mark.parametrize("published", [None, b"an older store"], ids=["first", "rebuild"])
def test_power_loss_anywhere_keeps_every_committed_sample(
    tmp_path: Path, workload: Workload, published: bytes | None, stride: int
) -> None:
    check_everywhere(tmp_path / "a.zarr.zip", workload, published, stride, "durable")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("workload", LAZY_WORKLOADS, ids=lambda workload: workload.__name__)
def test_lazy_power_loss_anywhere_never_shows_a_wrong_byte(
    tmp_path: Path, workload: Workload, stride: int
) -> None:
    """Spec 6.5.3: after another boot a recorded sample counts only if its bytes are right."""
    check_everywhere(tmp_path / "a.zarr.zip", workload, None, stride, "lazy")


def check_everywhere(
    path: Path, workload: Workload, published: bytes | None, stride: int, durability: str
) -> None:
    expected, before = undisturbed(path), {} if published is None else {path: published}
    points, num_images = set(), 0
    for at, run, names in images_of(workload, path, before, stride=stride, durability=durability):
        try:
            restart = workload is replacing_another_build
            check_image(path, names, run, expected=expected, published=published, restart=restart)
        except BaseException as error:
            error.add_note(f"power lost before change {at}, files {sorted(p.name for p in names)}")
            raise
        points.add(at)
        num_images += 1
    print(f"{num_images} images of {len(points)} points")
    assert num_images > 200 // stride, "the enumeration became trivial"


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
    expected, at, was_killed = undisturbed(path), 0, True
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
            if was_killed and not files.exists(path):  # else it died after the rename
                run.to_the_end()
        assert disk.read(path) == expected, f"killed before change {at}"
        at += 1
    assert at > 20, "the enumeration became trivial"
