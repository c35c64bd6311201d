"""Builds of ragged stores, with lengths and by spools, on a disk that loses its power."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from crash_builds import booted
from lossy_disk import Disk, PowerLoss, installed
from ragged_stores import IDENTITY, ragged_specs, ragged_values, rows_of

import ups_store
from ups_store.read.recovery import State, building_path, intact_parts, read_building_file, read_commits
from ups_store.read.verify import verify_file
from ups_store.system import files
from ups_store.writing.spool import Spool

LENGTHS = (3, 0, 400, 1)
N = len(LENGTHS)
VALUES = ragged_values(LENGTHS)
SPECS = ragged_specs(VALUES)
OPEN_SPECS = {name: replace(s, shape=(None, *s.shape[1:]), lengths=None) for name, s in SPECS.items()}


@dataclass
class Run:
    """A build, the samples of which it was told that they are committed, and whether it came to its end."""

    path: Path
    acknowledged: set[int] = field(default_factory=set)
    is_finished: bool = False


Workload = Callable[[Run], None]


def build(run: Run) -> None:
    with ups_store.create(run.path, SPECS, identity=IDENTITY, on_mismatch="restart") as writer:
        missing = writer.missing().tolist()
        for batch in (missing[::2], missing[1::2]):
            writer.commit_many(batch, rows_of(VALUES, batch))
            run.acknowledged |= set(batch)
        writer.finish()


def samples(first: int = 0, end: int = N) -> Iterator[dict[str, Any]]:
    for i in range(first, end):
        yield {name: value[i] for name, value in VALUES.items()}


def begin_spool(path: Path) -> Spool:
    content: dict[str, Any] = {"constants": {}, "dims": {}, "identity": IDENTITY, "attrs": {}}
    return Spool(path, OPEN_SPECS, on_mismatch="raise", buffer_bytes=1, save_every_s=0, **content)


def spooled(run: Run) -> None:
    with begin_spool(run.path) as spool:
        assert spool.num_found >= len(run.acknowledged)  # no sample that was synced is lost
        for sample in samples():
            spool.add(sample)
            run.acknowledged = set(range(max(spool.num_committed, len(run.acknowledged))))
        spool.finish()


def noted(run: Run) -> None:
    """Go on behind the last note, as `write(map=...)` does: samples that none covers are made again."""
    with begin_spool(run.path) as spool:
        first = spool.notes[-1]["num_samples"] if spool.notes else 0
        assert first >= len(run.acknowledged)
        spool.num_samples = first
        for sample in samples(first):
            spool.add(sample)
            if spool.notes:
                run.acknowledged = set(range(spool.notes[-1]["num_samples"]))
            spool.note = {"num_samples": spool.num_samples}
        spool.finish()


def check_building(path: Path, disk_type: Callable[..., Disk] = Disk, *, stride: int = 1) -> int:
    """Check every image of a ragged build; returns their number."""
    num_images = 0
    expected = _undisturbed(path, build, {}).read(path)
    for at, run, names in _images(build, path, {}, disk_type, stride):
        left = Disk(names)
        with installed(left):
            assert left.read(path) in (None, expected), at
            if building_path(path) in names:
                _check_recorded(path, run.acknowledged)
            build(Run(path))
            assert verify_file(path).ok, at
        assert left.read(path) == expected, at
        num_images += 1
    return num_images


def check_spool(
    path: Path,
    disk_type: Callable[..., Disk] = Disk,
    *,
    workload: Workload = spooled,
    stride: int = 1,
    room: int = 2,
) -> int:
    """Check every image while samples go through a spool, which outgrows its room; returns their number."""
    num_images, rows = 0, {"_ROOM_SAMPLES": room, "_ROOM_ROWS_BYTES": 1024 * room}
    with mock.patch.multiple("ups_store.writing.spool", **rows), booted(b"the first boot.."):
        expected = _undisturbed(path, workload, {}).read(path)
        for at, run, names in _images(workload, path, {}, disk_type, stride):
            left = Disk(names)
            with installed(left), booted(b"the second boot."):
                assert left.read(path) in (None, expected), at
                if left.read(path) is None:
                    workload(Run(path, set(run.acknowledged)))
                    assert verify_file(path).ok, at
            assert left.read(path) == expected, at
            num_images += 1
    return num_images


def _images(
    workload: Workload, path: Path, before: dict[Path, bytes], disk_type: Callable[..., Disk], stride: int
) -> Iterator[tuple[int, Run, dict[Path, bytes]]]:
    """Images that a power loss at some points may leave, with what was acknowledged by then."""
    whole = Disk(before)
    with installed(whole):
        workload(Run(path))
    for at in range(0, whole.num_changes + 1, stride):
        disk, run = disk_type(before, lose_power_at=at), Run(path)
        with installed(disk):
            try:
                workload(run)
            except PowerLoss:
                assert disk.is_off
        for number, names in enumerate(disk.after_power_loss(seed=at)):
            if (number + at) % stride == 0 or number == 0:
                yield at, run, names


def _undisturbed(path: Path, workload: Workload, before: dict[Path, bytes]) -> Disk:
    disk = Disk(before)
    with installed(disk):
        workload(Run(path))
    return disk


def _check_recorded(path: Path, acknowledged: set[int]) -> None:
    """Acknowledged samples are committed, and committed ones hold the right bytes in all arrays."""
    fd = files.open_existing(building_path(path))
    found = read_building_file(fd, building_path(path))
    if found.state is State.FINISHED:
        return
    assert found.header is not None
    layout = found.catalog.layout
    committed, crcs = read_commits(fd, layout, found.header)
    numbers = np.flatnonzero(committed)
    assert intact_parts(fd, layout, numbers, crcs[numbers]).all()
    assert acknowledged <= set(numbers.tolist())
