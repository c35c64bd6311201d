"""Builds from nothing, again, interrupted, in the way of something else; the manifest and the console."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, interrupt_after, plan, result_of, settings, write_burgers
from rich.console import Console
from small_stores import flip

import ups_store
from ups_store.building import read
from ups_store.building.config import BuildConfig
from ups_store.building.progress import Stopwatch, prepare_manifest, write_manifest
from ups_store.building.read import split_batches
from ups_store.building.watch import BuildWatcher
from ups_store.check.statistics import Statistics
from ups_store.errors import (
    BuildInterruptedError,
    BuildLockedError,
    ConfigError,
    DiskFullError,
    FormatError,
    IdentityMismatchError,
    SourceError,
)
from ups_store.read.recovery import building_path, read_building_file
from ups_store.sources import digest as digests
from ups_store.sources.source import Source
from ups_store.system import files

NAME = "burgers1d_train.zarr.zip"
NO_CAST = {"num_underflow": 0, "num_overflow": 0}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildConfig:
    """16 samples, committed one by one."""
    monkeypatch.setattr(read, "BATCH_BYTES", 1)
    write_burgers(tmp_path / "source" / BURGERS)
    return settings(tmp_path, split="train")


def test_build_on_a_network_file_system_warns(
    config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the path of a store is said as the configuration says it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "is_network", lambda path: path.absolute() == tmp_path / "here")
    cache = config.cache.model_copy(update={"dir": Path("here")})
    relative, watcher = config.model_copy(update={"cache": cache}), Recorder()
    for is_reused in (False, True):
        (result,) = build(relative, watcher).stores
        assert (result.reused, result.path) == (is_reused, Path("here") / NAME)
    assert any("network file system" in note for note in watcher.notes)


def store_of(config: BuildConfig) -> Path:
    return config.cache.dir / NAME


def unfinished_of(config: BuildConfig) -> Path:
    return building_path(store_of(config))


def num_committed(config: BuildConfig) -> int:
    with ups_store.open(unfinished_of(config), partial=True) as store:
        return int(store.committed.sum())


def undisturbed(config: BuildConfig, folder: Path) -> bytes:
    """The bytes of the store when nothing comes in between."""
    elsewhere = config.model_copy(update={"cache": config.cache.model_copy(update={"dir": folder})})
    (result,) = build(elsewhere).stores
    return result.path.read_bytes()


def interrupt(config: BuildConfig, num_samples: int, **options: bool) -> BuildInterruptedError:
    with pytest.raises(BuildInterruptedError) as caught:
        build(config, interrupt_after(num_samples), **options)
    return caught.value


# --- from nothing, and again --------------------------------------------------------------------------


def test_first_build_tells_what_it_did(config: BuildConfig) -> None:
    watcher = Recorder()
    (result,) = build(config, watcher).stores
    source_nbytes = (config.data.root / BURGERS).stat().st_size
    assert watcher.stages == [
        ["burgers1d train: sources", source_nbytes, "bytes", source_nbytes],
        ["burgers1d train: samples", 16, "samples", 16],
    ]
    assert watcher.notes == []
    assert (result.path, result.task, result.split) == (store_of(config), "burgers1d", "train")
    assert (result.reused, result.num_samples, result.num_committed) == (False, 16, 16)
    assert result.nbytes == result.path.stat().st_size
    assert 0 <= result.age_s < 60
    assert set(result.seconds) == {"digest", "open", "read", "commit", "finish", "total"}
    assert result.seconds["total"] >= sum(result.seconds.values()) - result.seconds["total"]
    assert {path.name for path in config.cache.dir.iterdir()} == {NAME, ".source_digests.json"}


def test_second_build_finds_the_store_valid_without_reading_the_source(
    config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = build(config).stores
    content, status = first.path.read_bytes(), first.path.stat()

    def fail(*args: object) -> None:
        raise AssertionError("a source is read")

    monkeypatch.setattr(digests, "full_digest", fail)
    monkeypatch.setattr(Source, "read", fail)
    watcher = Recorder()
    (result,) = build(config, watcher).stores
    assert (result.reused, result.num_samples, result.num_committed) == (True, 16, 0)
    assert (result.config_hash, result.nbytes) == (first.config_hash, first.nbytes)
    assert (result.statistics, watcher.notes) == ({}, [])
    assert first.path.read_bytes() == content
    assert (first.path.stat().st_ino, first.path.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


def test_age_of_a_valid_store_is_that_of_its_file(config: BuildConfig) -> None:
    build(config)
    os.utime(store_of(config), (time.time() - 7200, time.time() - 7200))
    (result,) = build(config).stores
    assert 7200 <= result.age_s < 7260
    assert "valid, written 2 hours ago" in result.summary()
    os.utime(store_of(config), (time.time() + 7200, time.time() + 7200))  # by a clock that is ahead
    assert build(config).stores[0].age_s == 0


def test_changed_configuration_names_the_keys_and_rebuilds(config: BuildConfig, tmp_path: Path) -> None:
    (first,) = build(config).stores
    with ups_store.open(first.path) as old:
        watcher = Recorder()
        changed = settings(tmp_path, split="train", reduce_time=2, cache_dtype="float16")
        (result,) = build(changed, watcher).stores
        (note,) = watcher.notes
        assert f"{first.path} was made from something else" in note
        assert "content.reduce_time: 1 -> 2" in note
        assert "arrays.fields.dtype: 'float32' -> 'float16'" in note
        assert not result.reused
        assert old["fields"].shape[1] == 7  # whoever has the old store open keeps it
    with ups_store.open(result.path) as new:
        assert (new["fields"].shape[1], new["fields"].dtype) == (4, np.float16)


def test_overwrite_builds_anew_what_is_valid(config: BuildConfig) -> None:
    (first,) = build(config).stores
    content, inode = first.path.read_bytes(), first.path.stat().st_ino
    (result,) = build(config, overwrite=True).stores
    assert (result.reused, result.num_committed) == (False, 16)
    assert result.path.stat().st_ino != inode
    assert result.path.read_bytes() == content


def test_rehash_reads_the_sources_and_keeps_the_store(
    config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(config)
    read_again = []
    full = digests.full_digest
    monkeypatch.setattr(digests, "full_digest", lambda *args: read_again.append(args) or full(*args))
    (result,) = build(config, rehash=True).stores
    assert result.reused
    assert len(read_again) == 1


# --- interrupted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [0, 7, 15])
def test_interrupted_build_keeps_what_is_committed_and_the_next_one_continues(
    num_samples: int, config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = interrupt(config, num_samples)
    assert (error.exit_code, error.path) == (5, str(unfinished_of(config)))
    assert f"{num_samples} of 16 samples are committed" in str(error)
    assert str(error).endswith("run the same command again to continue")
    assert not store_of(config).exists()
    assert num_committed(config) == num_samples
    seen: list[int] = []
    read_into = Source.read_into

    def note(self: Source, out: dict[str, np.ndarray], rows: list[int], **options: Any) -> Any:
        seen.extend(rows)
        return read_into(self, out, rows, **options)

    watcher = Recorder()
    with monkeypatch.context() as patched:
        patched.setattr(Source, "read_into", note)
        (result,) = build(config, watcher).stores
    assert seen == list(range(2 + num_samples, 18))  # of the file: the split starts at 2
    continuing = [f"{store_of(config)}: {num_samples} of 16 samples are there, continuing"]
    assert watcher.notes == (continuing if num_samples else [])
    assert watcher.stages[-1] == ["burgers1d train: samples", 16, "samples", 16]
    assert result.num_committed == 16 - num_samples
    assert not unfinished_of(config).exists()
    elsewhere = config.model_copy(update={"cache": config.cache.model_copy(update={"dir": tmp_path / "o"})})
    (undisturbed,) = build(elsewhere).stores
    assert store_of(config).read_bytes() == undisturbed.path.read_bytes()
    assert result.statistics == undisturbed.statistics


def test_valid_store_stays_while_its_successor_is_unfinished(config: BuildConfig, tmp_path: Path) -> None:
    build(config)
    content = store_of(config).read_bytes()
    changed = settings(tmp_path, split="train", reduce_time=2)
    interrupt(changed, 3)
    assert store_of(config).read_bytes() == content
    assert build(config).stores[0].reused


def test_failure_in_the_middle_is_resumable_once_the_source_is_mended(
    config: BuildConfig, tmp_path: Path
) -> None:
    kept = settings(tmp_path, split="train", on_nan="keep")
    path = config.data.root / BURGERS
    fields = np.zeros((20, 7, 10), "f4")
    fields[12] = np.nan
    write_burgers(path, fields=fields)
    with pytest.raises(SourceError):
        build(config)
    assert num_committed(config) == 10
    (result,) = build(kept).stores
    assert result.num_committed == 6
    assert result.statistics["fields"]["num_nan"] == 70


def test_sample_that_changed_since_an_earlier_run_is_noted_and_built_again(
    config: BuildConfig, tmp_path: Path
) -> None:
    interrupt(config, 3)
    with unfinished_of(config).open("rb") as file:
        layout = read_building_file(file.fileno(), unfinished_of(config)).catalog.layout
    flip(unfinished_of(config), layout.arrays["fields"].slot(1)[0])
    nbytes = 3 * sum(array.meta.sample_nbytes for array in layout.per_sample)
    watcher = Recorder()
    (result,) = build(config, watcher).stores
    assert watcher.notes[0].startswith(f"{unfinished_of(config)}: sample 1 had changed")
    assert watcher.notes[1].endswith("2 of 16 samples are there, continuing")
    check = next(stage for stage in watcher.stages if stage[0] == "burgers1d train: check")
    assert check == ["burgers1d train: check", nbytes, "bytes", nbytes]
    assert result.num_committed == 14
    assert store_of(config).read_bytes() == undisturbed(config, tmp_path / "other")


def test_check_of_an_earlier_run_is_left_out_where_the_configuration_says_so(config: BuildConfig) -> None:
    interrupt(config, 3)
    reading = config.reading.model_copy(update={"check_on_resume": False})
    watcher = Recorder()
    build(config.model_copy(update={"reading": reading}), watcher)
    assert [stage[0] for stage in watcher.stages] == ["burgers1d train: sources", "burgers1d train: samples"]


def die_before_the_rename(config: BuildConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = files.rename

    def die(old: Path, new: Path) -> None:
        if old == unfinished_of(config):
            raise KeyboardInterrupt
        rename(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(files, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            build(config)


def test_finished_file_that_changed_is_set_aside_and_made_again(
    config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_before_the_rename(config, monkeypatch)
    with unfinished_of(config).open("rb") as file:
        layout = read_building_file(file.fileno(), unfinished_of(config)).catalog.layout
    flip(unfinished_of(config), layout.arrays["fields"].slot(1)[0])
    assert build(config).stores[0].num_committed == 16
    assert unfinished_of(config).with_name(f"{unfinished_of(config).name}.damaged").exists()


# --- unfinished files of something else ---------------------------------------------------------------


def test_unfinished_file_of_another_identity_gives_way_without_samples_and_to_overwrite_alone(
    config: BuildConfig, tmp_path: Path
) -> None:
    interrupt(config, 0)
    changed, watcher = settings(tmp_path, split="train", reduce_time=2), Recorder()
    (result,) = build(changed, watcher).stores
    assert (result.num_committed, watcher.notes) == (16, [])
    interrupt(config, 3)
    with pytest.raises(IdentityMismatchError) as caught:
        build(settings(tmp_path, split="train", reduce_time=3))
    error = caught.value
    assert (error.exit_code, error.path) == (7, str(unfinished_of(config)))
    assert error.differences["content.reduce_time"] == (1, 3)
    assert "--overwrite" in str(error)
    assert num_committed(config) == 3
    (result,) = build(settings(tmp_path, split="train", reduce_time=3), overwrite=True).stores
    assert result.num_committed == 16
    assert not unfinished_of(config).exists()


def test_overwrite_trusts_no_sample_of_an_unfinished_file_and_is_continued_without_it(
    config: BuildConfig, tmp_path: Path
) -> None:
    interrupt(config, 3)
    error = interrupt(config, 5, overwrite=True)
    assert str(error).endswith("run the same command again to continue, without --overwrite")
    assert build(config).stores[0].num_committed == 11
    interrupt(config, 3, overwrite=True)
    assert build(config, overwrite=True).stores[0].num_committed == 16
    assert store_of(config).read_bytes() == undisturbed(config, tmp_path / "other")


def test_build_that_died_before_the_rename_is_published(
    config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_before_the_rename(config, monkeypatch)
    assert unfinished_of(config).exists()
    (result,) = build(config).stores
    assert result.num_committed == 0
    assert result.statistics["fields"]["num_nan"] == 0
    assert store_of(config).read_bytes() == undisturbed(config, tmp_path / "other")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\5\6" + bytes(18)])
def test_file_that_is_no_store_or_no_unfinished_one_is_not_replaced_until_overwrite(
    content: bytes, config: BuildConfig
) -> None:
    config.cache.dir.mkdir()
    for path in (unfinished_of(config), store_of(config)):
        path.write_bytes(content)
        with pytest.raises(FormatError) as caught:
            build(config)
        assert (caught.value.path, path.read_bytes()) == (str(path), content)
        assert build(config, overwrite=True).stores[0].num_committed == 16
        store_of(config).unlink()
    assert "--overwrite" in str(caught.value)


# --- what else may be in the way ----------------------------------------------------------------------


def test_folder_in_place_of_the_store_is_refused_before_any_work(config: BuildConfig) -> None:
    store_of(config).mkdir(parents=True)
    for overwrite in (False, True):
        with pytest.raises(ConfigError) as caught:
            build(config, overwrite=overwrite)
        assert caught.value.path == str(store_of(config))
    assert [path.name for path in config.cache.dir.iterdir()] == [NAME]


def test_folder_of_stores_that_can_not_be_made_is_refused(config: BuildConfig, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    for name in ("taken", "taken/below", "x" * 300, "a\0b"):
        with pytest.raises(ConfigError, match="can't make the folder") as caught:
            build(settings(tmp_path, cache_dir=str(tmp_path / name)))
        assert caught.value.path == str(tmp_path / name)
        assert "cache.dir" in str(caught.value)


def test_folders_above_the_stores_are_made(config: BuildConfig, tmp_path: Path) -> None:
    (result,) = build(settings(tmp_path, split="train", cache_dir=str(tmp_path / "a/ü b/c"))).stores
    assert result.path.is_file()


def test_store_that_another_process_builds_is_locked(config: BuildConfig) -> None:
    planned = plan(config)
    config.cache.dir.mkdir()
    arguments = {"constants": planned.constants, "dims": planned.dims, "identity": {}}
    with ups_store.create(planned.path, planned.arrays, **arguments):
        for overwrite in (False, True):
            with pytest.raises(BuildLockedError) as caught:
                build(config, overwrite=overwrite)
            assert (caught.value.exit_code, caught.value.pid) == (8, os.getpid())


def test_full_disk_is_an_error_at_the_start_and_leaves_nothing(
    config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "allocate", refuse)
    with pytest.raises(DiskFullError) as caught:
        build(config)
    assert caught.value.exit_code == 6
    assert caught.value.needed_bytes > 16 * 7 * 10 * 4
    assert {path.name for path in config.cache.dir.iterdir()} == {".source_digests.json"}


# --- sources that change ------------------------------------------------------------------------------


def touch_after(num_samples: int, path: Path) -> Recorder:
    def touch(watcher: Recorder) -> None:
        if watcher.num_samples == num_samples:
            os.utime(path, ns=(1, 1))

    return Recorder(on_advance=touch)


def test_source_that_changes_during_the_build_fails_it(config: BuildConfig) -> None:
    path = config.data.root / BURGERS
    with pytest.raises(SourceError) as caught:
        build(config, touch_after(9, path))
    assert (caught.value.kind, caught.value.path, caught.value.exit_code) == ("source_changed", str(path), 3)
    assert not store_of(config).exists()
    # It was touched only: the samples that were read before are as good as they were.
    assert build(config).stores[0].num_committed <= 7


def test_samples_of_a_source_that_really_changed_are_not_used(config: BuildConfig) -> None:
    path = config.data.root / BURGERS
    interrupt(config, 9)
    write_burgers(path, fields=np.ones((20, 7, 10), "f4"))
    with pytest.raises(IdentityMismatchError) as caught:
        build(config)
    assert "content.sources[0].digest" in caught.value.differences
    build(config, overwrite=True)
    with ups_store.open(store_of(config)) as store:
        assert (store["fields"] == 1).all()


def test_source_that_disappears_during_the_build_fails_it(config: BuildConfig) -> None:
    path = config.data.root / BURGERS

    def remove(watcher: Recorder) -> None:
        if watcher.num_samples == 16:
            path.unlink()

    with pytest.raises(SourceError) as caught:
        build(config, Recorder(on_advance=remove))
    assert (caught.value.kind, caught.value.path) == ("missing_file", str(path))


# --- the manifest -------------------------------------------------------------------------------------


def test_manifest_holds_every_store_and_what_was_skipped(tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=5)
    report = build(settings(tmp_path))
    path = tmp_path / "manifest.json"
    write_manifest(path, report)
    manifest = json.loads(path.read_text())
    assert set(manifest) == {"stores", "skipped", "readers", "startup"}
    assert manifest["readers"]["num_workers"] == 1
    assert set(manifest["skipped"]) == {"burgers1d val", "burgers1d test"}
    (store,) = manifest["stores"]
    counts = "num_samples num_committed num_files source_sample_nbytes nbytes mapped_nbytes"
    facts = "path task split config_hash codec reused pulled pushed age_s seconds statistics tuning"
    assert set(store) == {*counts.split(), *facts.split(), "samples_per_s", "mb_per_s"}
    assert store["path"] == str(tmp_path / "cache" / NAME)
    assert store["statistics"]["nu"] == {"min": 0.01, "max": 0.01, "num_nan": 0, "num_inf": 0, **NO_CAST}
    assert len(store["config_hash"]) == 64
    write_manifest(path, build(settings(tmp_path)))
    assert json.loads(path.read_text())["stores"][0]["reused"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"source", "cache", "manifest.json"}


@pytest.mark.parametrize("content", [None, b"", b'{"stores": []}'])
def test_manifest_replaces_nothing_or_a_manifest(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "manifest.json"
    prepare_manifest(path)
    if content is not None:
        path.write_bytes(content)
        prepare_manifest(path)
    assert path.parent.is_dir()


def test_manifest_never_replaces_a_store_or_a_source_or_a_folder(config: BuildConfig) -> None:
    build(config)
    for path in (store_of(config), config.data.root / BURGERS, config.data.root):
        with pytest.raises(ConfigError) as caught:
            prepare_manifest(path)
        assert caught.value.path == str(path)


def test_manifest_that_can_not_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="can't make the folder"):
        prepare_manifest(tmp_path / "taken" / "manifest.json")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="can't write into the folder"):
        prepare_manifest(tmp_path / "manifest.json")


# --- parts of a build ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "lengths"), [(2 << 20, [16, 4]), (32 << 20, [1] * 20), (1 << 40, [1] * 20), (0, [20])]
)
def test_batches_hold_about_32_mib_and_at_least_a_sample(nbytes: int, lengths: list[int]) -> None:
    batches = split_batches(np.arange(20), nbytes)
    assert [len(batch) for batch in batches] == lengths
    assert np.concatenate(batches).tolist() == list(range(20))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_statistics_are_those_of_numpy_over_all_batches(dtype) -> None:
    data = np.random.default_rng(1).normal(size=(12, 5, 3)).astype(dtype)
    data[2, 1] = [np.nan, np.inf, -np.inf]
    data[7, 0, 0] = np.nan
    statistics = Statistics()
    for first in (0, 5, 10):
        statistics.add({"u": data[first : first + 5], "nu": np.full(2, first, np.float64)})
    finite = data[np.isfinite(data)].astype(np.float64)
    assert statistics.to_json() == {
        "u": {"min": finite.min(), "max": finite.max(), "num_nan": 2, "num_inf": 2, **NO_CAST},
        "nu": {"min": 0.0, "max": 10.0, "num_nan": 0, "num_inf": 0, **NO_CAST},
    }


def test_stopwatch_adds_up_stages_also_when_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Stopwatch()
    with clock.timed("read"):
        pass
    with pytest.raises(ValueError, match="x"), clock.timed("read"):
        raise ValueError("x")
    assert clock.to_json() == {"read": 6.0, "total": 20.0}


def test_summary_is_one_line() -> None:
    assert result_of(seconds={"total": 2.345}).summary() == (
        "burgers1d train: 16 samples, 12.1 kB, built in 2.3 s, abababababab, cache/burgers1d_train.zarr.zip"
    )
    assert "valid, written 3 days ago" in result_of(reused=True, age_s=300_000.0).summary()


# --- the console's watcher ----------------------------------------------------------------------------


def test_console_watcher_shows_count_rate_and_time_left_on_a_terminal() -> None:
    out, clock = io.StringIO(), itertools.count()
    console = Console(file=out, force_terminal=True, width=120, get_time=lambda: float(next(clock)))
    with BuildWatcher(console) as watcher:
        watcher.stage("burgers1d train: sources", 4_000_000, unit="bytes")
        watcher.advance(1_000_000)
        watcher.advance(3_000_000)
        watcher.stage("burgers1d train: samples", 16, unit="samples")
        watcher.advance(2)
        watcher.advance(2)
        watcher.note("a [note] with brackets")
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())[-260:]
    assert re.search(r"burgers1d train: sources +.* 4\.0 MB/4\.0 MB +[0-9.]+ .?B/s +0:00:00", last)
    assert re.search(r"burgers1d train: samples +.* 4/16 +\d+ samples/s +0:00:[0-9]+", last)
    assert "a [note] with brackets" in out.getvalue()


def test_console_watcher_prints_only_notes_into_a_pipe() -> None:
    out = io.StringIO()
    with BuildWatcher(Console(file=out)) as watcher:
        watcher.advance(1)
        watcher.stage("sources", 10, unit="bytes")
        watcher.advance(10)
        watcher.note("skipped " + "x" * 200)
    assert out.getvalue() == "skipped " + "x" * 200 + "\n"
