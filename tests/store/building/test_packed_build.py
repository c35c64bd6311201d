"""`cache.codec`: stores packed as they are built, or later without building, and killed at any step."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, interrupt_after, settings, write_burgers
from command_line import run_command
from forked import Forked
from small_stores import assert_same_bits, flip, names_in

import ups_store
from ups_store.building import build as joining
from ups_store.building import decide, fill
from ups_store.building.decide import count_files
from ups_store.building.stores import open_builds
from ups_store.check.doctor import Status, examine
from ups_store.errors import BuildInterruptedError, ConfigError, MissingExtraError, TruncatedError
from ups_store.packed import codecs
from ups_store.read.base import AnyStore
from ups_store.read.several import parts_of
from ups_store.system import files

N = 8  # of the split: 10 samples, 0.8 of them
PARTS = [f"burgers1d_train-0000{number}-of-00003.zarr.zip" for number in range(3)]
DIGESTS = ".source_digests.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=10)
    return tmp_path


def built(folder: Path, watcher: Recorder | None = None, **cache: Any) -> Any:
    """The result of building the training split with keys of `cache`."""
    return build(settings(folder, split="train", **cache), watcher).stores[0]


def values_of(store: AnyStore) -> dict[str, Any]:
    return {**store.gather(slice(None)), **store.constants}


@pytest.fixture
def expected(folder: Path) -> dict[str, Any]:
    """What the store holds, built mapped somewhere else."""
    path = built(folder, cache_dir=str(folder / "mapped")).path
    with ups_store.open(path) as store:
        return {**values_of(store), "hash": store.config_hash}


def assert_holds(place: Path, expected: dict[str, Any], *, codec: str) -> None:
    wanted = {name: value for name, value in expected.items() if name != "hash"}
    with ups_store.open(place) as store:
        assert {part.codec for part in parts_of(store)} == {codec}
        assert store.config_hash == expected["hash"]
        assert_same_bits(values_of(store), wanted)
        assert store.verify().ok


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a sample from here on is a failure."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a sample is read")

    monkeypatch.setattr(fill, "read_batches", refuse)


@pytest.mark.parametrize("codec", ["blosc", "pcodec"])
def test_build_with_a_codec_gives_packed_partitions_that_are_one_store(
    folder: Path, expected: dict[str, Any], codec: str
) -> None:
    result = built(folder, cache_codec=codec, cache_partitions=3)
    assert (result.codec, result.num_files, result.num_committed) == (codec, 3, N)
    assert names_in(folder / "cache") == [DIGESTS, *PARTS]
    assert result.nbytes == sum((folder / "cache" / name).stat().st_size for name in PARTS)
    assert result.config_hash == expected["hash"]
    assert f"in 3 files, packed by {codec}" in result.summary()
    assert result.to_json()["codec"] == codec
    assert result.statistics["fields"]["max"] == pytest.approx(float(expected["fields"].max()))
    assert_holds(result.path, expected, codec=codec)


def test_packed_partition_has_identity_and_fingerprint_of_its_mapped_form(folder: Path) -> None:
    mapped = built(folder, cache_partitions=3, cache_dir=str(folder / "mapped")).path
    packed = built(folder, cache_partitions=3, cache_codec="blosc").path
    with ups_store.open(mapped) as a, ups_store.open(packed) as b:
        assert a.codec == "none"
        for left, right in zip(parts_of(a), parts_of(b), strict=True):
            assert left.identity_document == right.identity_document
            assert left.fingerprint == right.fingerprint


def test_only_one_file_at_a_time_is_mapped_while_a_packed_store_is_built(folder: Path) -> None:
    mapped: list[list[str]] = []

    def look(watcher: Recorder) -> None:
        there = [folder / "cache" / name for name in names_in(folder / "cache") if name.startswith("burgers")]
        unpacked = [path.name for path in there if path.name.endswith(".building") or not is_packed(path)]
        mapped.append([name for name in unpacked if ".building." not in name])

    built(folder, Recorder(on_advance=look), cache_codec="blosc", cache_partitions=3)
    assert max(map(len, mapped)) == 1
    assert len({name for names in mapped for name in names}) >= 3


def is_packed(path: Path) -> bool:
    if ".building." in path.name:
        return True
    with ups_store.open(path) as store:
        return store.codec != "none"


def test_small_store_is_packed_in_one_file_and_a_large_one_in_several(
    folder: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(folder, split="train", cache_codec="blosc")
    (opened,) = open_builds(config, {}, Recorder())
    assert count_files(opened) == 1
    nbytes = opened.num_samples * opened.plan.sample_nbytes
    for least, count in ((nbytes, 1), (nbytes // 2, 2), (1, N)):
        monkeypatch.setattr(decide, "FILE_NBYTES", least)
        assert count_files(opened) == count
    monkeypatch.setattr(decide, "MOST_FILES", 5)
    assert count_files(opened) == 5
    monkeypatch.setattr(decide, "FILE_NBYTES", 1 << 30)
    result = built(folder, cache_codec="blosc")
    assert result.path.name == "burgers1d_train.zarr.zip"
    assert_holds(result.path, expected, codec="blosc")


@pytest.mark.parametrize("count", [1, 3])
def test_valid_store_is_packed_or_unpacked_without_reading_a_sample(
    folder: Path, expected: dict[str, Any], count: int, request: pytest.FixtureRequest
) -> None:
    place = built(folder, cache_partitions=count).path
    mapped = {path.name: path.read_bytes() for path in (folder / "cache").glob("*.zip")}
    request.getfixturevalue("no_reading")
    for codec in ("blosc", "none", "pcodec"):
        result = built(folder, cache_codec=codec)
        assert (result.path, result.codec, result.num_committed) == (place, codec, 0)
        assert result.reused
        assert f"valid, {'unpacked' if codec == 'none' else 'packed'} in" in result.summary()
        assert_holds(place, expected, codec=codec)
        if codec == "none":
            assert {path.name: path.read_bytes() for path in (folder / "cache").glob("*.zip")} == mapped
        assert names_in(folder / "cache") == sorted([DIGESTS, *mapped])


def test_valid_store_of_another_codec_is_kept_with_a_note(folder: Path, expected: dict[str, Any]) -> None:
    built(folder, cache_codec="blosc")
    watcher = Recorder()
    result = built(folder, watcher, cache_codec="pcodec")
    assert (result.reused, result.codec) == (True, "blosc")
    assert any(
        "packed by blosc and not packed by pcodec: `ups-store unpack`" in note for note in watcher.notes
    )
    assert_holds(result.path, expected, codec="blosc")


def test_valid_packed_store_is_reused_as_it_is(folder: Path, request: pytest.FixtureRequest) -> None:
    built(folder, cache_codec="blosc", cache_partitions=3)
    before = {name: (folder / "cache" / name).stat().st_mtime_ns for name in PARTS}
    request.getfixturevalue("no_reading")
    for options in ({}, {"cache_partitions": 2}):
        result = built(folder, cache_codec="blosc", **options)
        assert (result.reused, result.num_files) == (True, 3)
        assert "pack" not in result.seconds
        assert {name: (folder / "cache" / name).stat().st_mtime_ns for name in PARTS} == before


def test_unfinished_mapped_store_is_finished_in_one_file_and_then_packed(
    folder: Path, expected: dict[str, Any]
) -> None:
    interrupted = settings(folder, split="train")
    in_pairs = interrupted.reading.model_copy(update={"batch_size": 2})
    with pytest.raises(BuildInterruptedError):
        build(interrupted.model_copy(update={"reading": in_pairs}), interrupt_after(4))
    watcher = Recorder()
    result = built(folder, watcher, cache_codec="blosc")
    assert any("continuing" in note for note in watcher.notes)
    assert (result.num_files, result.num_committed) == (1, 4)
    assert_holds(result.path, expected, codec="blosc")


def test_partitions_begun_in_another_number_are_continued_in_that(
    folder: Path, expected: dict[str, Any]
) -> None:
    with pytest.raises(BuildInterruptedError):
        build(settings(folder, split="train", cache_codec="blosc", cache_partitions=3), interrupt_after(2))
    result = built(folder, cache_codec="blosc")
    assert result.num_files == 3
    assert_holds(result.path, expected, codec="blosc")


def test_rebuilt_store_removes_what_it_replaces(folder: Path) -> None:
    """Else the old file would be found first."""
    old = built(folder).path
    watcher = Recorder()
    result = built(folder, watcher, cache_codec="blosc", cache_partitions=3, cache_dtype="float16")
    assert names_in(folder / "cache") == [DIGESTS, *PARTS]
    assert [note for note in watcher.notes if "is removed" in note] == [
        f"{old} is removed: {result.path.name} replaces it"
    ]
    result = built(folder, cache_codec="none", cache_partitions=1, cache_dtype="float32")
    assert names_in(folder / "cache") == [DIGESTS, old.name]
    assert result.path == old


def test_damaged_packed_file_is_removed_and_made_again_alone(folder: Path) -> None:
    """What `doctor` advises."""
    built(folder, cache_codec="blosc", cache_partitions=3)
    paths = [folder / "cache" / name for name in PARTS]
    good, times = [path.read_bytes() for path in paths], [path.stat().st_mtime_ns for path in paths]
    flip(paths[1], len(good[1]) // 2)
    found = examine(paths[1])
    assert found.status is Status.PACKED_DAMAGED
    assert "remove it and run `ups-store build" in found.to_json()["advice"]
    paths[1].unlink()
    built(folder, cache_codec="blosc")
    assert [path.read_bytes() for path in paths] == good
    assert [paths[i].stat().st_mtime_ns == times[i] for i in range(3)] == [True, False, True]


def test_sample_that_no_codec_takes_is_refused_before_anything_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "MAX_CHUNK_BYTES", 8)
    with pytest.raises(ConfigError, match=r"cache\.codec.*at most 8 bytes"):
        built(folder, cache_codec="blosc")
    assert not list((folder / "cache").glob("*.zip*"))


def test_missing_package_is_named_before_anything_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pcodec" else real(name))
    with pytest.raises(MissingExtraError, match=r"ups-store\[pack\]"):
        built(folder, cache_codec="pcodec")


# --- killed at any step


STEPS = ("rename", "link", "remove")
OPERATIONS = (*STEPS, "create_new", "truncate", "allocate", "sync", "sync_data", "sync_folder", "write_at")


def killed_at(folder: Path, number: int, operations: tuple[str, ...], **cache: Any) -> bool:
    """Whether a build in a process of its own was killed, before it did so many of the operations."""
    child = os.fork()
    if not child:
        left = [number]

        def dying(operation: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return operation(*arguments, **options)

            return call

        try:
            for name in operations:
                setattr(files, name, dying(getattr(files, name)))
            built(folder, **cache)
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def check_kills(
    folder: Path, expected: dict[str, Any], operations: tuple[str, ...], numbers: Iterable[int]
) -> int:
    """Kill building, unpacking and packing at their so many-th operation, and go on; count the kills."""
    num_kills = 0
    for number in numbers:
        was_killed = []
        for codec in ("blosc", "none", "pcodec"):
            was_killed.append(killed_at(folder, number, operations, cache_codec=codec, cache_partitions=2))
            result = built(folder, cache_codec=codec, cache_partitions=2)
            assert_holds(result.path, expected, codec=codec)
            names = [name for name in names_in(folder / "cache") if not name.startswith(DIGESTS)]
            assert names == [f"burgers1d_train-0000{part}-of-00002.zarr.zip" for part in range(2)], number
        num_kills += any(was_killed)
        if not any(was_killed):
            return num_kills
        for path in (folder / "cache").glob("*.zip"):
            path.unlink()
    return num_kills


def test_build_that_is_killed_at_any_step_goes_on_where_it_was(
    folder: Path, expected: dict[str, Any]
) -> None:
    assert check_kills(folder, expected, STEPS, [4, 9]) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_build_that_is_killed_at_any_operation_goes_on_where_it_was(
    folder: Path, expected: dict[str, Any]
) -> None:
    assert check_kills(folder, expected, OPERATIONS, itertools.count(1)) > 30


# --- ranks, explanation, command line


def test_ranks_of_one_machine_build_packed_partitions_together(
    folder: Path, expected: dict[str, Any]
) -> None:
    def work() -> None:
        result = built(folder, cache_codec="blosc", cache_partitions=3)
        assert (result.num_files, result.codec) == (3, "blosc")

    ranks = [{"RANK": n, "WORLD_SIZE": 2, "LOCAL_RANK": n, "LOCAL_WORLD_SIZE": 2} for n in range(2)]
    children = [Forked(work, folder, rank) for rank in ranks]
    assert [child.communicate(timeout=150) and child.returncode for child in children] == [0, 0]
    assert names_in(folder / "cache") == [DIGESTS, *PARTS]
    assert_holds(folder / "cache" / "burgers1d_train-*-of-00003.zarr.zip", expected, codec="blosc")


@pytest.mark.parametrize("is_being_built", [True, False])
def test_file_without_its_end_is_joined_later_if_its_builder_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_being_built: bool
) -> None:
    """Between cutting the build tail off and writing the end records it is neither."""
    answers: list[Any] = [TruncatedError("no end", path=tmp_path), "joined"]

    def join(path: Path, *, identity: object) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(joining, "join", join)
    monkeypatch.setattr(joining, "_is_being_built", lambda path: is_being_built)
    if is_being_built:
        assert joining._join(tmp_path / "a", {}, "") == "joined"
    else:
        with pytest.raises(TruncatedError):
            joining._join(tmp_path / "a", {}, "")


def test_dry_run_says_that_a_store_would_be_packed_and_in_how_many_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explained(*flags: str) -> dict[str, Any]:
        command = ["build", "--dry-run", "--json", "--tasks", "burgers1d", "--split", "train"]
        places = ["--root", folder / "source", "--cache-dir", folder / "cache", "--num-workers", "0"]
        capsys.readouterr()
        assert run_command(monkeypatch, *command, *places, *flags) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found[0]

    absent = explained("--codec", "pcodec", "--partitions", "3")
    assert (absent["action"], absent["codec"]) == ("build", "pcodec")
    assert absent["reason"] == "there is none yet, to be built in 3 files, to be packed by pcodec"
    built(folder, cache_codec="blosc", cache_partitions=3)
    assert explained("--codec", "blosc")["action"] == "reuse"
    other = explained("--codec", "none")
    assert (other["action"], other["reason"]) == (
        "repack",
        "valid, but packed by blosc instead of mapped: no source is read",
    )
    assert explained("--codec", "pcodec")["action"] == "reuse"
    (folder / "cache" / PARTS[2]).unlink()
    rest = explained("--codec", "blosc")
    assert (rest["action"], rest["reason"]) == ("continue", "2 of 3 files are finished")


def test_statistics_of_a_continued_build_cover_the_files_that_were_finished(
    folder: Path, expected: dict[str, Any]
) -> None:
    built(folder, cache_codec="blosc", cache_partitions=3)
    (folder / "cache" / PARTS[2]).unlink()
    result = built(folder, cache_codec="blosc")
    assert result.num_committed == 3
    for name, stored in expected.items():
        if name in result.statistics:
            assert result.statistics[name]["min"] == float(np.min(stored))
