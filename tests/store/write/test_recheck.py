"""What an earlier run has written is published only if it is still what was written (spec 6.9)."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from lossy_disk import Disk, PowerLoss, installed
from small_stores import (
    IDENTITY,
    all_arrays,
    assert_same_bits,
    begin,
    build,
    flip,
    mixed_constants,
    mixed_values,
    samples_of,
)

import ups_store
from ups_store import CommitError, CorruptChunkError, FormatError, IdentityMismatchError
from ups_store.format.layout import Layout
from ups_store.read import recovery
from ups_store.read.recovery import building_path
from ups_store.system import files

VALUES = mixed_values()
COMMITTED = [0, 1, 3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


@pytest.fixture
def layout(path: Path) -> Layout:
    """Geometry of the unfinished store at the path, whose samples 0, 1 and 3 are committed."""
    with begin(path, VALUES, constants=mixed_constants()) as writer:
        writer.commit_many(COMMITTED, samples_of(VALUES, COMMITTED))
        return writer.building.layout


def resume(path: Path, **options: object) -> ups_store.StoreWriter:
    return begin(path, VALUES, constants=mixed_constants(), **options)


def fill(writer: ups_store.StoreWriter) -> None:
    missing = writer.missing()
    writer.commit_many(missing, samples_of(VALUES, missing))
    writer.finish()


def undisturbed(path: Path) -> bytes:
    return build(path.with_name("undisturbed"), VALUES, constants=mixed_constants()).read_bytes()


PLACES: dict[str, Callable[[Layout], int]] = {
    "slot": lambda layout: layout.arrays["fields"].slot(3)[0] + 1000,
    "checksum of a slot": lambda layout: layout.arrays["fields"].slot(3)[0] + 5120,
    "small array": lambda layout: layout.arrays["nu"].slot(3)[0],
}


@pytest.mark.parametrize("place", PLACES)
def test_committed_sample_that_changed_is_said_and_written_again(
    place: str, path: Path, layout: Layout
) -> None:
    flip(building_path(path), PLACES[place](layout))
    with pytest.warns(RuntimeWarning, match="building: sample 3 had changed .*, and will be written"):
        writer = resume(path)
    assert writer.missing().tolist() == [2, 3]
    with writer, warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed_again = writer.check_committed()
        assert resumed_again.tolist() == []
        fill(writer)
    assert path.read_bytes() == undisturbed(path)


def test_note_is_given_the_sentence_and_progress_all_bytes(path: Path, layout: Layout) -> None:
    flip(building_path(path), *(layout.arrays["fields"].slot(sample)[0] for sample in COMMITTED))
    notes: list[str] = []
    done: list[int] = []
    with resume(path, check_on_resume=False, note=notes.append) as writer:
        assert writer.missing().tolist() == [2]
        assert writer.check_committed(note=notes.append, progress=done.append).tolist() == COMMITTED
        assert writer.missing().tolist() == [0, 1, 2, 3]
        (note,) = notes
        assert note.startswith(f"{building_path(path)}: 3 samples (0, 1, 3) had changed")
    assert sum(done) == 3 * sum(array[0].nbytes for array in VALUES.values())


@pytest.mark.parametrize("block", [64, 6000])
def test_samples_of_any_size_are_read_in_pieces(
    block: int, path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_CHECK_BLOCK_BYTES", block)
    monkeypatch.setattr(recovery, "_PIECES_AT_ONCE", 2)
    resume(path).close()
    flip(building_path(path), layout.arrays["fields"].slot(1)[1] - 1)
    with pytest.warns(RuntimeWarning, match="sample 1 had changed"):
        resume(path).close()


def test_check_can_be_left_out(path: Path, layout: Layout) -> None:
    flip(building_path(path), PLACES["slot"](layout))
    with resume(path, check_on_resume=False) as writer:
        assert writer.missing().tolist() == [2]
        fill(writer)
    with ups_store.open(path) as store:
        assert store.verify().damaged == {"fields": [3]}


def test_one_run_and_joined_committers_read_nothing_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr("ups_store.writing.writer.intact_parts", fail)
        patched.setattr(recovery, "intact_parts", fail)
        with begin(path, VALUES) as writer:
            writer.commit_many([0, 1], samples_of(VALUES, [0, 1]))
            with ups_store.join(path, identity=IDENTITY) as other:
                other.commit_many([2], samples_of(VALUES, [2]))
            writer.commit_many([3], samples_of(VALUES, [3]))
            writer.finish()
    assert_same_bits(all_arrays(path), VALUES)


def test_joined_committer_writes_what_the_builder_took_back(path: Path, layout: Layout) -> None:
    flip(building_path(path), PLACES["slot"](layout))
    with ups_store.join(path, identity=IDENTITY) as other:
        assert other.missing().tolist() == [2]
        with pytest.warns(RuntimeWarning):
            writer = resume(path)
        with writer:
            assert other.commit_many([1, 3], samples_of(VALUES, [1, 3])).tolist() == [False, True]
            fill(writer)
    assert path.read_bytes() == undisturbed(path)


def test_commits_that_can_not_be_taken_back_stop_the_writer(
    path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    flip(building_path(path), PLACES["slot"](layout))
    writer = resume(path, check_on_resume=False)
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_at", fail)
        with pytest.raises(CommitError, match="not taken back"):
            writer.check_committed()
    with writer, pytest.raises(CommitError, match="earlier commit"):
        writer.commit_many([2], samples_of(VALUES, [2]))
    with pytest.warns(RuntimeWarning):
        writer = resume(path)
    with writer:
        fill(writer)
    assert path.read_bytes() == undisturbed(path)


# --- metadata and constants ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("part", ["payload", "checksum"])
def test_constant_that_changed_is_written_again(
    part: str, is_checked: bool, path: Path, layout: Layout
) -> None:
    place = layout.arrays["x"].entry
    assert place is not None
    flip(building_path(path), place.data_offset if part == "payload" else place.end - 1)
    with pytest.warns(RuntimeWarning, match="constant 'x' had changed since an earlier run, and was written"):
        writer = resume(path, check_on_resume=is_checked)
    with writer:
        fill(writer)
    assert path.read_bytes() == undisturbed(path)


@pytest.mark.parametrize("entry", [0, 1])
@pytest.mark.parametrize("part", ["header", "document"])
def test_metadata_that_changed_is_written_again(entry: int, part: str, path: Path, layout: Layout) -> None:
    place = layout.metadata[entry]
    flip(building_path(path), place.offset + 14 if part == "header" else place.data_offset + 30)
    with pytest.warns(RuntimeWarning, match=f"{place.name} had changed"), resume(path) as writer:
        fill(writer)
    assert path.read_bytes() == undisturbed(path)


def test_constant_is_found_where_attributes_of_the_arguments_are_others(path: Path, layout: Layout) -> None:
    place = layout.arrays["x"].entry
    assert place is not None
    flip(building_path(path), place.data_offset)
    with (
        pytest.warns(RuntimeWarning, match="constant 'x'"),
        resume(path, attrs={"new": "x" * 5000}) as writer,
    ):
        fill(writer)
    assert path.read_bytes() == undisturbed(path)


def test_metadata_that_may_be_of_something_else_is_left_alone(path: Path, layout: Layout) -> None:
    where, root = building_path(path), layout.metadata[0]
    with pytest.raises(IdentityMismatchError):
        resume(path, identity={**IDENTITY, "task": "advection"})
    raw = where.read_bytes()
    for places in [(root.offset + 14, root.data_offset + 30), (root.offset + 14, layout.tail_offset)]:
        flip(where, *places)  # header and document; header and the build tail
        before = where.read_bytes()
        with pytest.raises(FormatError):
            resume(path)
        assert where.read_bytes() == before
        where.write_bytes(raw)


# --- files that only wait to be published -------------------------------------------------------------


@pytest.fixture
def finished(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A building file whose builder died before the rename."""

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, begin(path, VALUES, constants=mixed_constants()) as writer:
        patched.setattr(files, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            fill(writer)
    return building_path(path)


def place_in(finished: Path) -> int:
    """A byte of the array `fields`."""
    with finished.open("rb") as file:
        return recovery.read_building_file(file.fileno(), finished).catalog.layout.arrays["fields"].offset


def test_finished_file_that_changed_is_not_published(path: Path, finished: Path) -> None:
    flip(finished, place_in(finished))
    with pytest.raises(CorruptChunkError, match="damaged since it was finished") as caught:
        resume(path)
    assert (caught.value.array, caught.value.sample, path.exists()) == ("fields", 0, False)
    with resume(path, on_mismatch="restart") as writer:
        assert writer.missing().tolist() == [0, 1, 2, 3]
        fill(writer)
    assert path.read_bytes() == undisturbed(path)


def test_finished_file_that_did_not_change_is_published(path: Path, finished: Path) -> None:
    with resume(path) as writer:
        writer.finish()
    assert path.read_bytes() == undisturbed(path)


# --- any byte, any crash ------------------------------------------------------------------------------


@pytest.fixture(params=["unfinished", "finished"])
def damaged_at(request: pytest.FixtureRequest, path: Path) -> Path:
    """The building file in a folder that tests put on a disk in memory."""
    name = "layout" if request.param == "unfinished" else "finished"
    request.getfixturevalue(name)
    return building_path(path)


def test_any_changed_byte_is_made_good_or_refused(
    damaged_at: Path, path: Path, request: pytest.FixtureRequest
) -> None:
    raw, expected = damaged_at.read_bytes(), undisturbed(path)
    is_finished = len(raw) == len(expected)
    tail = len(expected) + (-len(expected) % 4096)  # where the header of the build tail lies
    step, num_refused = (5 if request.config.getoption("--run-slow") else 1499), 0
    for place in sorted({*range(0, len(raw), step), min(tail + 9, len(raw) - 1)}):
        changed = bytearray(raw)
        changed[place] ^= 1 << place % 8
        disk = Disk({damaged_at: bytes(changed)})
        with installed(disk), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with resume(path) as writer:
                    fill(writer)
            except (FormatError, CorruptChunkError):
                assert disk.read(damaged_at) == bytes(changed)
                assert is_finished or tail <= place < tail + 128
                num_refused += 1
            else:
                assert disk.read(path) == expected, place
                assert not is_finished
    assert num_refused


def test_power_loss_publishes_no_changed_sample(
    path: Path, layout: Layout, request: pytest.FixtureRequest
) -> None:
    expected, where, constant = undisturbed(path), building_path(path), layout.arrays["x"].entry
    assert constant is not None
    flip(where, PLACES["slot"](layout), PLACES["small array"](layout), constant.data_offset)
    raw = where.read_bytes()

    def run(note: Callable[[str], object] = lambda sentence: None, **options: object) -> None:
        with resume(path, note=note, **options) as writer:
            fill(writer)

    whole, noted_at = Disk({where: raw}), []
    with installed(whole):
        run(lambda sentence: noted_at.append(whole.num_changes))
    assert (whole.read(path), len(noted_at)) == (expected, 2)
    stride = 1 if request.config.getoption("--run-slow") else 13
    for at in [noted_at[-1], *range(0, whole.num_changes, stride)]:
        disk = Disk({where: raw}, lose_power_at=at)
        with installed(disk), pytest.raises(PowerLoss):
            run()
        for left in disk.after_power_loss(seed=at):
            again = Disk(left)
            with installed(again):
                run(check_on_resume=at < noted_at[-1])  # what was said of samples holds from then on
            assert again.read(path) == expected
