"""A power loss at points of building ragged stores, of writing parts, merging them, and appending.

The disk is that of `test_crash_consistency.py`: after every loss, in every image that may be left, committed
samples and finished parts are there, nothing is half there, and going on gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ragged_stores import IDENTITY, ragged_specs, ragged_values, rows_of

import ups_store
from ups_store.format.manifest import parse_manifest
from ups_store.read.catalog import fingerprint_of, read_finished
from ups_store.read.recovery import State, building_path, intact_parts, read_building_file, read_commits
from ups_store.read.store_set import manifest_path, parts_folder
from ups_store.read.verify import verify_file
from ups_store.system import files
from ups_store.testing.disk import Disk, PowerLoss, installed

LENGTHS = (3, 0, 400, 1)
N = len(LENGTHS)
VALUES = ragged_values(LENGTHS)
SPECS = ragged_specs(VALUES)
OPEN_SPECS = {name: replace(s, shape=(None, *s.shape[1:]), lengths=None) for name, s in SPECS.items()}

pytestmark = pytest.mark.no_cover


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> int:
    """Every point of power loss, and every image of it, with --run-slow; without some of them."""
    return 1 if request.config.getoption("--run-slow") else 11


@dataclass
class Run:
    """A build, and the samples of which it was told that they are committed."""

    path: Path
    acknowledged: set[int] = field(default_factory=set)


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


def _images(
    workload: Callable[[Run], None], path: Path, before: dict[Path, bytes], stride: int
) -> Iterator[tuple[int, Run, dict[Path, bytes]]]:
    """Images that a power loss at some points may leave, with what was acknowledged by then."""
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
        for number, names in enumerate(disk.after_power_loss(seed=at)):
            if (number + at) % stride == 0 or number == 0:
                yield at, run, names


def _undisturbed(path: Path, workload: Callable[[Run], None], before: dict[Path, bytes]) -> Disk:
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
    samples = np.flatnonzero(committed)
    assert intact_parts(fd, layout, samples, crcs[samples]).all()
    assert acknowledged <= set(np.flatnonzero(committed).tolist())


def test_power_loss_in_a_ragged_build_keeps_every_committed_sample(tmp_path: Path, stride: int) -> None:
    path, num_images = tmp_path / "a.zarr.zip", 0
    expected = _undisturbed(path, build, {}).read(path)
    for at, run, names in _images(build, path, {}, stride):
        left = Disk(names)
        with installed(left):
            assert left.read(path) in (None, expected), at
            if building_path(path) in names:
                _check_recorded(path, run.acknowledged)
            build(Run(path))
            assert verify_file(path).ok, at
        assert left.read(path) == expected, at
        num_images += 1
    assert num_images > 100 // stride


def test_power_loss_while_parts_are_written_and_merged_loses_no_part(
    tmp_path: Path, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec 15.4, 15.5: the store is there whole or not at all; parts that were finished are continued."""
    path = tmp_path / "a.zarr.zip"
    parts_folder(path).mkdir()  # the disk has no folders of its own
    monkeypatch.setattr(files, "allocate", lambda fd, nbytes: None)
    expected, num_images = _undisturbed(path, merged, {}).read(path), 0
    for at, run, names in _images(merged, path, {}, stride):
        left = Disk(names)
        with installed(left):
            assert left.read(path) in (None, expected), at
            if left.read(path) is None:
                again = Run(path, set(run.acknowledged))
                merged(again)
                assert verify_file(path).ok, at
        assert left.read(path) == expected, at
        num_images += 1
    assert num_images > 100 // stride


def test_power_loss_while_a_set_grows_leaves_the_set_or_the_longer_one(tmp_path: Path, stride: int) -> None:
    """Spec 15.3: the manifest is replaced in one step, and every part that it names is there."""
    path = tmp_path / "a.zarr.zip"
    parts_folder(path).mkdir()
    manifest, before = manifest_path(path), Disk()
    with (
        installed(before),
        ups_store.write_parts(path, OPEN_SPECS, identity=IDENTITY, buffer_bytes=4500, merge=False) as writer,
    ):
        writer.extend(samples(0, 2))
        writer.finish()
    begun = next(iter(before.after_power_loss()))
    texts = {begun[manifest], _undisturbed(path, appended, begun).read(manifest)}
    num_images = 0
    for at, _, names in _images(appended, path, begun, stride):
        assert names[manifest] in texts, at
        left = Disk(names)
        with installed(left):
            _check_set(manifest)
            if names[manifest] == begun[manifest]:
                appended(Run(path))
            _check_set(manifest, num_samples=N)
        num_images += 1
    assert num_images > 100 // stride


def _check_set(manifest: Path, num_samples: int | None = None) -> None:
    with files.opened(manifest) as fd:
        named = parse_manifest(files.read_at(fd, 0, 1 << 20), path=manifest)
    for part in named:
        path = parts_folder(manifest) / part.name
        assert verify_file(path).ok
        fd = files.open_existing(path)
        assert fingerprint_of(read_finished(fd, path)) == part.fingerprint
    assert num_samples in (None, sum(part.count for part in named))
