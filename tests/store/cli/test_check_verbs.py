"""`verify --repair`, `doctor` and `gc` from the command line: exit codes, texts, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from build_helpers import Recorder, build, settings, write_burgers
from command_line import run_ups_store
from small_stores import build as build_small
from small_stores import damage, flip, mixed_values

import ups_store

VALUES = mixed_values(3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return build_small(tmp_path / "a.zarr.zip", VALUES)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose store is built."""
    write_burgers(tmp_path / "source" / "burgers1d_train.h5", num_samples=4)
    build(settings(tmp_path, split="train"), Recorder())
    file = tmp_path / "build.yaml"
    file.write_text(
        f"data: {{task: burgers1d, split: train, root: {tmp_path / 'source'}}}\n"
        f"cache: {{dir: {tmp_path / 'cache'}}}\nreading: {{num_workers: 0}}\n"
    )
    return file


def test_verify_repairs_what_is_damaged_and_only_that(tmp_path: Path, config: Path) -> None:
    store = tmp_path / "cache" / "burgers1d_train.zarr.zip"
    sound = store.read_bytes()
    done = run_ups_store("verify", store, "--repair", config)
    assert (done.exit_code, "nothing to repair" in done.stderr) == (0, True)
    damage(store, "fields", 2)
    done = run_ups_store("verify", store, "--repair", config, "reading.num_workers=0")
    assert (done.exit_code, "of 4 samples rebuilt" in done.stderr) == (0, True)
    assert store.read_bytes() == sound


def test_repair_takes_one_store_and_a_configuration(tmp_path: Path, config: Path) -> None:
    store = tmp_path / "cache" / "burgers1d_train.zarr.zip"
    done = run_ups_store("verify", store, store, "--repair", config)
    assert done.exit_code == 2
    assert "one store, then KEY=VALUE overrides" in done.stderr
    config.write_text("data: {tsk: burgers1d}\n")
    done = run_ups_store("verify", store, "--repair", config)
    assert (done.exit_code, "tsk" in done.stderr) == (2, True), "though nothing is damaged"


def test_repair_of_what_is_no_store_says_what_it_is(tmp_path: Path, config: Path) -> None:
    other = tmp_path / "a.zarr.zip"
    other.write_bytes(b"x" * 5000)
    done = run_ups_store("verify", other, "--repair", config)
    assert done.exit_code != 0
    assert str(other) in done.stderr


def test_doctor_says_how_many_samples_verify_and_saves_them(tmp_path: Path, path: Path) -> None:
    damage(path, "fields", 1)
    done = run_ups_store("doctor", path)
    assert done.exit_code == 1
    assert "2 of 3 samples verify" in done.stdout
    saved = tmp_path / "saved.zarr.zip"
    done = run_ups_store("doctor", path, "--salvage", saved)
    assert (done.exit_code, f"2 samples saved: {saved}" in done.stdout) == (1, True)
    with ups_store.open(saved) as store:
        np.testing.assert_array_equal(store["fields"][1], VALUES["fields"][2])


def test_doctor_names_arrays_of_which_nothing_verifies(path: Path) -> None:
    for sample in range(3):
        damage(path, "fields", sample)
    done = run_ups_store("doctor", path)
    assert (done.exit_code, "nothing verifies of fields" in done.stdout) == (1, True)


def test_doctor_of_partitions_looks_at_each_and_salvages_none(tmp_path: Path) -> None:
    for index in range(2):
        part = tmp_path / f"b-{index:05}-of-00002.zarr.zip"
        build_small(part, mixed_values(2, seed=index), partition=(index, 2))
    pattern = tmp_path / "b-*-of-00002.zarr.zip"
    done = run_ups_store("doctor", pattern)
    assert (done.exit_code, done.stdout.count("2 of 2 samples verify")) == (0, 2)
    flip(part, part.stat().st_size // 2)
    assert run_ups_store("doctor", pattern).exit_code == 1
    done = run_ups_store("doctor", pattern, "--salvage", tmp_path / "out")
    assert (done.exit_code, "one by one" in done.stderr) == (2, True)


def test_gc_refuses_words_and_folders_without_effect(tmp_path: Path) -> None:
    done = run_ups_store("gc", tmp_path, "--unfinished")
    assert (done.exit_code, "--unfinished has no effect" in done.stderr) == (2, True)
    done = run_ups_store("gc", tmp_path / "none")
    assert (done.exit_code, "no such folder" in done.stderr) == (1, True)
    done = run_ups_store("gc", tmp_path)
    assert (done.exit_code, "nothing that a dead builder left" in done.stderr) == (0, True)


def test_gc_lists_as_json_and_keeps_samples_until_it_is_asked_for_them(tmp_path: Path) -> None:
    arrays = {"u": ups_store.ArraySpec((3, 4), "float32")}
    with ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={}) as writer:
        writer.commit(1, {"u": np.ones(4, "float32")})
    (left,) = tmp_path.iterdir()
    for words, is_removed in ([], False), (["--delete"], False), (["--delete", "--unfinished"], True):
        done = run_ups_store("gc", tmp_path, "--json", *words)
        said = json.loads(done.stdout)
        assert (said["kind"], said["num_committed"], said["removed"]) == ("unfinished", 1, is_removed)
        assert left.exists() is not is_removed


def _partitions(tmp_path: Path, *, named: int = 3) -> Path:
    """A store in three partitions, whose identities say how many there are."""
    for number in range(3):
        path = tmp_path / f"p-{number:05d}-of-{named:05d}.zarr.zip"
        specs = {"u": ups_store.ArraySpec((2, 4), "float32")}
        with ups_store.create(path, specs, identity={}, partition=(number, 3)) as writer:
            writer.commit_many(range(2), {"u": np.ones((2, 4), np.float32)})
            writer.finish()
    return tmp_path / f"p-*-of-{named:05d}.zarr.zip"


def test_verify_of_partitions_that_do_not_open_checks_each_that_is_there(tmp_path: Path) -> None:
    pattern = _partitions(tmp_path)
    assert run_ups_store("verify", pattern).exit_code == 0
    damage(tmp_path / "p-00001-of-00003.zarr.zip", "u", 1)
    with (tmp_path / "p-00002-of-00003.zarr.zip").open("r+b") as file:
        file.truncate(5000)
    done = run_ups_store("verify", pattern)
    assert done.exit_code == 1
    assert "p-00000-of-00003.zarr.zip: ok" in done.stdout
    assert "p-00001-of-00003.zarr.zip: DAMAGED, 1 problem" in done.stdout
    assert done.stderr.count("p-00002-of-00003.zarr.zip") == 1, "said once, though opened twice"
    (tmp_path / "p-00000-of-00003.zarr.zip").unlink()
    done = run_ups_store("verify", pattern)
    assert "1 of 3 partitions are missing" in done.stderr
    assert "p-00001-of-00003.zarr.zip: DAMAGED" in done.stdout


def test_doctor_of_partitions_names_those_that_are_missing(tmp_path: Path) -> None:
    pattern = _partitions(tmp_path)
    assert run_ups_store("doctor", pattern).exit_code == 0
    (tmp_path / "p-00001-of-00003.zarr.zip").unlink()
    done = run_ups_store("doctor", pattern)
    assert done.exit_code == 1
    assert "p-00000-of-00003.zarr.zip: complete" in done.stdout
    assert "p-00001-of-00003.zarr.zip: missing" in done.stdout
    found = [json.loads(line) for line in run_ups_store("doctor", pattern, "--json").stdout.splitlines()]
    assert sorted(each["status"] for each in found) == ["complete", "complete", "missing"]


def test_doctor_says_what_is_wrong_with_sound_partitions_together(tmp_path: Path) -> None:
    pattern = _partitions(tmp_path, named=4)
    (tmp_path / "p-00002-of-00004.zarr.zip").rename(tmp_path / "p-00003-of-00004.zarr.zip")
    for number in (1, 2):
        copy = tmp_path / f"p-{number:05d}-of-00004.zarr.zip"
        copy.write_bytes((tmp_path / "p-00000-of-00004.zarr.zip").read_bytes())
    done = run_ups_store("doctor", pattern)
    assert (done.exit_code, done.stdout.count("complete")) == (1, 4)
    assert "by its identity" in done.stderr


def test_line_about_a_folder_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "a\nb"
    folder.mkdir()
    assert "a\\nb: nothing that" in run_ups_store("gc", folder).stderr
