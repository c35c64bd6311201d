"""A build whose sources take data from other files: these are digested, watched and part of the identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from build_helpers import Recorder, build, hash_of, plan, settings
from outer_data import FIELDS, SAMPLES, write_fields, write_halves, write_linked, write_raw, write_virtual
from pdebench_files import T, X, values

import ups_store
from ups_store.building.command import main
from ups_store.building.config import BuildConfig
from ups_store.building.progress import Watcher
from ups_store.building.stores import explain_all
from ups_store.errors import SourceError
from ups_store.read.recovery import building_path

NAME = "burgers1d_train.h5"


def following(folder: Path, **keys: Any) -> BuildConfig:
    keys = {"split": "train", "follow_external": str(folder / "outer"), **keys}
    return settings(folder, **keys)


def virtual(folder: Path) -> Path:
    write_halves(folder / "outer")
    names = ("../outer/a.h5", "../outer/b.h5")
    return write_virtual(folder / "source" / NAME, *names, fields_each=SAMPLES // 2)


def raw(folder: Path) -> Path:
    (folder / "outer").mkdir()
    FIELDS.tofile(folder / "outer" / "u.bin")
    return write_raw(folder / "source" / NAME, str(folder / "outer" / "u.bin"))


def built(config: BuildConfig) -> np.ndarray:
    (result,) = build(config).stores
    with ups_store.open(result.path) as store:
        return np.array(store["fields"][..., 0])


def test_build_refuses_data_in_other_files_unless_a_folder_is_allowed(tmp_path: Path) -> None:
    source = virtual(tmp_path)
    with pytest.raises(SourceError) as caught:
        build(following(tmp_path, follow_external=None))
    error = caught.value
    assert (error.kind, error.path, error.dataset) == ("external_data", str(source), "tensor")
    assert (error.outer, error.exit_code) == ("../outer/a.h5", 3)
    assert not list(tmp_path.glob("cache/*.zip*"))
    np.testing.assert_array_equal(built(following(tmp_path)), FIELDS)


def test_identity_has_every_outer_file_and_is_as_before_without(tmp_path: Path) -> None:
    virtual(tmp_path)
    config = following(tmp_path)
    built(config)
    with ups_store.open(tmp_path / "cache/burgers1d_train.zarr.zip") as store:
        (source,) = store.identity["sources"]
    half = (tmp_path / "outer/a.h5").stat().st_size
    assert [{**each, "digest": len(each["digest"])} for each in source["external"]] == [
        {"name": f"../outer/{name}", "path": f"../outer/{name}", "size": half, "digest": 64}
        for name in ("a.h5", "b.h5")
    ]
    write_fields(tmp_path / "source" / NAME)
    with h5py.File(tmp_path / "source" / NAME, "a") as file:
        file.move("u", "tensor")
    content = plan(config).identity(_Digests(), lambda nbytes: None)
    assert list(content["sources"][0]) == ["name", "size", "digest", "samples"]
    assert hash_of(config) == hash_of(following(tmp_path, follow_external=None))


class _Digests:
    def digest(self, *arguments: object) -> str:
        return "0" * 64


@pytest.mark.parametrize("source_digest", ["full", "sampled"])
@pytest.mark.parametrize("write", [virtual, raw])
def test_store_is_stale_once_an_outer_file_changed(write: Any, source_digest: str, tmp_path: Path) -> None:
    write(tmp_path)
    config = following(tmp_path, source_digest=source_digest)
    built(config)
    assert build(config).stores[0].reused
    if write is raw:
        (FIELDS + np.float32(1)).tofile(tmp_path / "outer/u.bin")
        expected = FIELDS + np.float32(1)
    else:
        write_fields(tmp_path / "outer/b.h5", FIELDS[: SAMPLES // 2])
        expected = np.concatenate([FIELDS[: SAMPLES // 2]] * 2)
    (explanation,) = explain_all(config, watcher=Watcher())
    assert explanation.action == "rebuild"
    assert all(".external" in key for key in explanation.differences)
    np.testing.assert_array_equal(built(config), expected)


def test_identity_depends_on_which_name_leads_to_which_file(tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    write_fields(outer / "one.h5")
    write_fields(outer / "two.h5")
    (outer / "a.h5").symlink_to("one.h5")
    write_linked(tmp_path / "source" / NAME, "../outer/a.h5")
    before = hash_of(following(tmp_path))
    assert before == hash_of(following(tmp_path, follow_external=str(tmp_path)))  # whatever is allowed
    (outer / "a.h5").unlink()
    (outer / "a.h5").symlink_to("two.h5")
    assert hash_of(following(tmp_path)) != before


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.multi_process)])
@pytest.mark.parametrize("write", [virtual, raw])
def test_no_sample_of_an_outer_file_that_changes_is_committed(
    write: Any, num_workers: int, tmp_path: Path
) -> None:
    write(tmp_path)
    config = following(tmp_path)
    reading = config.reading.model_copy(update={"num_workers": num_workers, "batch_size": 1, "retries": 0})
    config = config.model_copy(update={"reading": reading})
    last = max((tmp_path / "outer").iterdir())

    def change(watcher: Recorder) -> None:
        if watcher.num_samples == 1:
            content = bytearray(last.read_bytes())
            content[-len(content) // 2 :] = bytes(len(content) // 2)
            last.write_bytes(content)

    with pytest.raises(SourceError) as caught:
        build(config, Recorder(on_advance=change))
    assert caught.value.kind == "source_changed"
    with ups_store.open(building_path(config.cache.dir / "burgers1d_train.zarr.zip"), partial=True) as store:
        there = np.flatnonzero(store.committed)
        np.testing.assert_array_equal(store.gather(there)["fields"][..., 0], FIELDS[there])


@pytest.mark.multi_process
def test_more_outer_files_than_stay_open_are_read_by_a_process(tmp_path: Path) -> None:
    fields = values("many", (40, T, X))
    names = [f"../outer/{i}.h5" for i in range(40)]
    for i, field in enumerate(fields):
        write_fields(tmp_path / "outer" / f"{i}.h5", field[None])
    write_virtual(tmp_path / "source" / NAME, *names)
    np.testing.assert_array_equal(built(following(tmp_path, num_workers=1)), fields)


def test_outer_file_that_changes_after_the_last_sample_leaves_no_store(tmp_path: Path) -> None:
    raw(tmp_path)

    def change(watcher: Recorder) -> None:
        if watcher.num_samples == SAMPLES:
            (FIELDS * 0).tofile(tmp_path / "outer/u.bin")

    with pytest.raises(SourceError) as caught:
        build(following(tmp_path), Recorder(on_advance=change))
    assert (caught.value.kind, caught.value.path) == ("source_changed", str(tmp_path / "outer/u.bin"))
    assert not (tmp_path / "cache/burgers1d_train.zarr.zip").exists()


def test_flag_of_the_command_allows_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    virtual(tmp_path)
    words = ["--tasks", "burgers1d", "--split", "train", "--num-workers", "0", "--json"]
    words += ["--root", str(tmp_path / "source"), "--cache-dir", str(tmp_path / "cache")]
    with pytest.raises(SourceError):
        main(words)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--follow-external", str(tmp_path / "outer")])
    assert ended.value.code == 0
    assert '"num_samples": 6' in capsys.readouterr().out
