"""Builds of ragged stores, of parts and of sets on a disk that loses its power, and what must hold then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from lossy_disk import Disk, PowerLoss, installed
from ragged_stores import IDENTITY, ragged_specs, ragged_values, rows_of

import ups_store
from ups_store.format.manifest import parse_manifest
from ups_store.read.catalog import fingerprint_of, read_finished
from ups_store.read.recovery import State, building_path, intact_parts, read_building_file, read_commits
from ups_store.read.store_set import manifest_path, parts_folder
from ups_store.read.verify import verify_file
from ups_store.system import files

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


def merged(run: Run) -> None:
    with ups_store.write_parts(run.path, OPEN_SPECS, identity=IDENTITY, buffer_bytes=4500) as writer:
        assert writer.num_found >= len(run.acknowledged)  # no finished part is lost
        for number, sample in enumerate(samples()):
            writer.add(sample)
            if number + 1 > len(run.acknowledged) and not writer._buffer.num_samples:
                run.acknowledged = set(range(number + 1))  # its part is finished
        writer.finish()


def appended(run: Run) -> None:
    with ups_store.append(manifest_path(run.path), buffer_bytes=4500) as writer:
        writer.extend(samples(2))
        writer.finish()
    run.is_finished = True


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


def check_merging(path: Path, disk_type: Callable[..., Disk] = Disk, *, stride: int = 1) -> int:
    """Check every image while parts are written and merged; returns their number."""
    parts_folder(path).mkdir()  # `create` looks for a real one; whether it is durable, the disk knows
    expected, num_images = _undisturbed(path, merged, {}).read(path), 0
    for at, run, names in _images(merged, path, {}, disk_type, stride):
        left = Disk(names)
        with installed(left):
            assert left.read(path) in (None, expected), at
            if left.read(path) is None:
                merged(Run(path, set(run.acknowledged)))
                assert verify_file(path).ok, at
        assert left.read(path) == expected, at
        num_images += 1
    return num_images


def check_growing(path: Path, disk_type: Callable[..., Disk] = Disk, *, stride: int = 1) -> int:
    """Check every image while a set of two samples grows; returns their number."""
    parts_folder(path).mkdir()
    manifest, before = manifest_path(path), Disk()
    with (
        installed(before),
        ups_store.write_parts(path, OPEN_SPECS, identity=IDENTITY, buffer_bytes=4500, merge=False) as writer,
    ):
        writer.extend(samples(0, 2))
        writer.finish()
    begun = next(iter(before.after_power_loss()))
    longer, num_images = _undisturbed(path, appended, begun).read(manifest), 0
    for at, run, names in _images(appended, path, begun, disk_type, stride):
        assert names[manifest] in ((longer,) if run.is_finished else (begun[manifest], longer)), at
        left = Disk(names)
        with installed(left):
            _check_set(manifest)
            if names[manifest] == begun[manifest]:
                appended(Run(path))
            _check_set(manifest, num_samples=N)
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


def _check_set(manifest: Path, num_samples: int | None = None) -> None:
    with files.opened(manifest) as fd:
        named = parse_manifest(files.read_at(fd, 0, 1 << 20), path=manifest)
    for part in named:
        path = parts_folder(manifest) / part.name
        assert verify_file(path).ok
        fd = files.open_existing(path)
        assert fingerprint_of(read_finished(fd, path)) == part.fingerprint
    assert num_samples in (None, sum(part.count for part in named))
