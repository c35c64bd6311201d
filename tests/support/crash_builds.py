"""Small builds on a disk that loses its power, and what must hold of everything that is left then.

The disk is `lossy_disk.Disk`. A workload is a build that notes what it was told is committed; it
is run once to count its changing operations, then again with the power lost before one of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
from lossy_disk import Disk, PowerLoss, installed

import ups_store
from ups_store.format.layout import Layout
from ups_store.read.recovery import State, building_path, intact_parts, read_building_file, read_commits
from ups_store.read.verify import verify_file
from ups_store.system import files
from ups_store.writing import commit as commit_module

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
    """A build on a disk, and the samples of which it was told that they are committed.

    Attributes:
        path: The store.
        durability: As `create` takes it.
        acknowledged: Numbers of these samples.
        noted: What it was told of damage.
        is_checked: Whether `create` returned: what had changed before isn't committed any more.
        is_finished: Whether `finish` returned.
    """

    path: Path
    durability: str = "durable"
    acknowledged: set[int] = field(default_factory=set)
    noted: list[str] = field(default_factory=list)
    is_checked: bool = False
    is_finished: bool = False

    def create(self, **options: object) -> ups_store.StoreWriter:
        options = {"durability": self.durability, "note": self.noted.append, **options}
        writer = ups_store.create(self.path, ARRAYS, constants=CONSTANTS, identity=IDENTITY, **options)
        try:
            committed = set(range(N)) - set(writer.missing().tolist())
        except BaseException:
            writer.close()
            raise
        assert self.acknowledged <= committed
        self.acknowledged, self.is_checked = committed, True
        return writer

    def commit(self, writer: ups_store.Committer, samples: list[int]) -> None:
        writer.commit_many(samples, {name: value[samples] for name, value in VALUES.items()})
        self.acknowledged |= set(samples)

    def to_the_end(self, **options: object) -> None:
        with self.create(**options) as writer:
            for sample in writer.missing().tolist():
                self.commit(writer, [sample])
            self.finish(writer)

    def finish(self, writer: ups_store.StoreWriter) -> None:
        writer.finish()
        self.is_finished = True


Workload = Callable[[Run], None]


def in_three_batches(run: Run) -> None:
    with run.create() as writer:
        run.commit(writer, [3])
        run.commit(writer, [0, 1, 4])
        run.commit(writer, [2])
        run.finish(writer)


def committing_twice(run: Run) -> None:
    with run.create() as writer:
        run.commit(writer, [1, 2])
        run.commit(writer, [2, 3])
        run.commit(writer, [0, 1, 2, 3, 4])
        run.finish(writer)


def by_two_committers(run: Run) -> None:
    with run.create() as writer, ups_store.join(run.path, identity=IDENTITY) as other:
        run.commit(writer, [0])
        run.commit(other, [0, 1])
        run.commit(writer, [1, 2])
        run.commit(other, [3, 4])
        run.finish(writer)


def in_pieces(run: Run) -> None:
    """Each sample of a batch is encoded and written by itself; one pair of syncs commits all of them."""
    with mock.patch.object(commit_module, "DURABLE_BLOCK_BYTES", 1), run.create() as writer:
        run.commit(writer, [1, 3, 4])
        run.commit(writer, [0, 2])
        run.finish(writer)


def one_at_a_time(run: Run) -> None:
    """Group commit: two samples fill the buffer, and what waits at the end of the block is committed then."""
    with run.create() as writer:
        with writer.batched(buffer_bytes=2 * 4814, save_every_s=math.inf) as batch:
            for sample in (3, 0, 4, 1):
                done = batch.commit(sample, {name: value[sample] for name, value in VALUES.items()})
                run.acknowledged |= set(done.tolist())
            assert run.acknowledged == {3, 0, 4, 1}
            assert not len(batch.commit(2, {name: value[2] for name, value in VALUES.items()}))
        run.acknowledged |= {2}
        run.finish(writer)


def interrupted_and_resumed(run: Run) -> None:
    with run.create() as writer:
        run.commit(writer, [4, 2])
    run.to_the_end()


def replacing_another_build(run: Run) -> None:
    old_arrays = {"old": ups_store.ArraySpec((2,), "int8")}
    with ups_store.create(run.path, old_arrays, identity={}, durability=run.durability) as old:
        old.commit(0, {"old": 1})
    run.to_the_end(on_mismatch="restart")


class Killed(BaseException):
    """The process ended."""


@contextlib.contextmanager
def killed_at_second(name: str) -> Iterator[None]:
    """The process ends instead of calling a function of `files` for the second time."""
    really, num_calls = getattr(files, name), 0

    def call(place: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise Killed
        really(place)

    with contextlib.suppress(Killed), mock.patch.object(files, name, call):
        yield


def killed_before_a_record_was_durable(run: Run) -> None:
    """What the next process reads of it in the page cache counts once that has said so."""
    writer = run.create()
    with killed_at_second("sync_data"), writer:
        writer.commit_many([1, 3], {name: value[[1, 3]] for name, value in VALUES.items()})
    run.to_the_end()


def killed_before_the_name_was_durable(run: Run) -> None:
    """The builder ends between giving the file its name and syncing the folder, and another goes on."""
    with killed_at_second("sync_folder"):
        run.create()
    run.to_the_end()


def joined_before_the_name_was_durable(run: Run) -> None:
    """The same, and before that another process joins and commits."""
    with killed_at_second("sync_folder"):
        run.create()
    with ups_store.join(run.path, identity=IDENTITY) as other:
        run.commit(other, [1, 3])
    run.to_the_end()


WORKLOADS = [
    in_three_batches,
    committing_twice,
    by_two_committers,
    in_pieces,
    one_at_a_time,
    interrupted_and_resumed,
    killed_before_a_record_was_durable,
    killed_before_the_name_was_durable,
    joined_before_the_name_was_durable,
    replacing_another_build,
]
LAZY_WORKLOADS = [
    in_three_batches,
    by_two_committers,
    one_at_a_time,
    interrupted_and_resumed,
    replacing_another_build,
]


def undisturbed(path: Path) -> bytes:
    disk = Disk()
    with installed(disk):
        Run(path).to_the_end()
    finished = disk.read(path)
    assert finished is not None
    return finished


def damaged_build(path: Path) -> dict[Path, bytes]:
    """An unfinished build of which two committed samples and a constant have changed."""
    disk = Disk()
    with installed(disk), Run(path).create() as writer:
        Run(path).commit(writer, [0, 1, 2, 4])
        layout = writer.building.layout
        _damage(writer.building.fd, layout)
    raw = disk.read(building_path(path))
    assert raw is not None
    return {building_path(path): raw}


def _damage(fd: int, layout: Layout) -> None:
    constant = layout.arrays["x"].entry
    assert constant is not None
    places = [layout.arrays["fields"].slot(1)[0], layout.arrays["label"].slot(4)[0], constant.data_offset]
    for place in places:
        (byte,) = files.read_at(fd, place, 1)
        files.write_at(fd, place, bytes([byte ^ 1]))


def images_of(
    workload: Workload,
    path: Path,
    before: dict[Path, bytes],
    *,
    stride: int = 1,
    durability: str = "durable",
    disk_type: Callable[..., Disk] = Disk,
) -> Iterator[tuple[int, Run, dict[Path, bytes]]]:
    """Every image that a power loss at some points may leave, with what was acknowledged by then."""
    whole = disk_type(before)
    with installed(whole):
        workload(Run(path, durability))
    for at in range(0, whole.num_changes + 1, stride):
        disk, run = disk_type(before, lose_power_at=at), Run(path, durability)
        with installed(disk), booted(b"the first boot.."), contextlib.suppress(PowerLoss):
            workload(run)
        assert disk.is_off == (at < whole.num_changes)
        for names in disk.after_power_loss(seed=at):
            yield at, run, names


@contextlib.contextmanager
def booted(boot_id: bytes) -> Iterator[None]:
    """Another boot of the machine, for lazy files."""
    with mock.patch.object(files, "boot_id", return_value=boot_id):
        yield


def check_image(
    path: Path,
    names: dict[Path, bytes],
    run: Run,
    *,
    expected: bytes,
    published: bytes | None = None,
    restart: bool = False,
) -> None:
    """Spec 6.5 to 6.9: the old file or a resumable one, never neither; resuming gives the same bytes.

    Args:
        path: The store.
        names: Files that are left.
        run: What was acknowledged before.
        expected: The bytes of an undisturbed build.
        published: What was there before it.
        restart: Whether an unfinished file of something else may be in the way.
    """
    left = Disk(names)
    with installed(left), booted(b"the second boot."):
        assert left.read(path) in ((expected,) if run.is_finished else (published, expected))
        acknowledged = run.acknowledged if run.durability == "durable" else set()
        if building_path(path) in names:
            if run.is_checked:
                check_recorded(path, acknowledged)
        else:
            assert left.read(path) == expected or not acknowledged
        on_mismatch = "restart" if restart else "raise"
        Run(path, run.durability).to_the_end(on_mismatch=on_mismatch, check_on_resume=not run.is_checked)
        assert verify_file(path).ok
    assert left.read(path) == expected


def check_recorded(path: Path, acknowledged: set[int]) -> None:
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
