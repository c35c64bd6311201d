from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, hash_of, plan, settings, write_burgers
from pdebench_files import T, X, coordinate, values, write, write_darcy, write_diffsorp

import ups_store
from ups_store.building import read
from ups_store.building.config import BuildConfig
from ups_store.building.plan import DigestCache
from ups_store.building.stores import open_builds
from ups_store.errors import SourceError, StoreError
from ups_store.format.root import config_hash
from ups_store.sources.conventions import Converted


def error_of(config: BuildConfig) -> StoreError:
    with pytest.raises(StoreError) as caught:
        build(config)
    assert not list(config.cache.dir.glob("*.zarr.zip"))
    return caught.value


# --- which samples ------------------------------------------------------------------------------------


def test_parts_of_all_splits_are_disjoint_and_cover_every_file(tmp_path: Path) -> None:
    lengths = {"0.001": 33, "0.01": 10, "0.1": 5}
    for nu, num in lengths.items():
        write_burgers(tmp_path / "source" / f"1D_Burgers_Sols_Nu{nu}.hdf5", num_samples=num, nu=float(nu))
    seen: dict[str, list[int]] = {f"1D_Burgers_Sols_Nu{nu}.hdf5": [] for nu in lengths}
    for split in ("train", "val", "test"):
        for part in plan(settings(tmp_path, split=split)).parts:
            seen[part.path.name] += part.indices
    assert [sorted(rows) for rows in seen.values()] == [list(range(num)) for num in lengths.values()]


def test_file_without_a_share_in_the_split_is_left_out(tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / "1D_Burgers_Sols_Nu0.01.hdf5", num_samples=20)
    write_burgers(tmp_path / "source" / "1D_Burgers_Sols_Nu0.1.hdf5", num_samples=3, nu=0.1)
    config = settings(tmp_path, split="test")
    assert [part.path.name for part in plan(config).parts] == ["1D_Burgers_Sols_Nu0.01.hdf5"]
    before = hash_of(config)
    (tmp_path / "source" / "1D_Burgers_Sols_Nu0.1.hdf5").unlink()
    assert hash_of(config) == before


def test_files_beyond_the_limit_are_neither_digested_nor_part_of_the_identity(tmp_path: Path) -> None:
    for nu in (0.001, 0.01):
        write_burgers(tmp_path / "source" / f"1D_Burgers_Sols_Nu{nu}.hdf5", nu=nu)
    planned = plan(settings(tmp_path, split="train", limit=16))
    content = planned.identity(DigestCache(tmp_path), lambda nbytes: None)
    assert [source["name"] for source in content["sources"]] == ["1D_Burgers_Sols_Nu0.001.hdf5"]
    assert planned.source_nbytes == (tmp_path / "source" / "1D_Burgers_Sols_Nu0.001.hdf5").stat().st_size


def test_split_that_would_be_empty_is_skipped_with_a_note_beside_others(tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=5)
    watcher = Recorder()
    report = build(settings(tmp_path), watcher)
    assert [result.split for result in report.stores] == ["train"]
    assert list(report.skipped) == ["burgers1d val", "burgers1d test"]
    assert [note.partition(":")[0] for note in watcher.notes] == [
        "skipped burgers1d val",
        "skipped burgers1d test",
    ]
    assert (
        "5 samples in 1 file, shared out 0.8, 0.1, 0.1: 5 to train, 0 to val, 0 to test"
        in report.skipped["burgers1d val"]
    )
    assert not (tmp_path / "cache" / "burgers1d_val.zarr.zip").exists()


@pytest.mark.parametrize("split", ["test", ["val", "test"]])
def test_split_that_would_be_empty_is_an_error_when_nothing_is_left(split, tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=5)
    error = error_of(settings(tmp_path, split=split))
    assert (error.kind, error.exit_code, error.path) == ("empty_split", 3, str(tmp_path / "source"))
    assert "burgers1d test would be empty" in str(error)


def test_split_without_a_source_is_skipped_beside_others_and_an_error_alone(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "burgers1d_train.h5", {"data": values("data", (3, T, X))})
    report = build(settings(tmp_path))
    assert [result.path.name for result in report.stores] == ["burgers1d_train.zarr.zip"]
    assert len(report.skipped) == 2
    with pytest.raises(SourceError) as caught:
        build(settings(tmp_path, split="test"))
    assert caught.value.kind == "no_source"


# --- sources that can't be built ----------------------------------------------------------------------


def test_missing_root_is_no_empty_split(tmp_path: Path) -> None:
    error = error_of(settings(tmp_path))
    assert (error.kind, error.path, error.exit_code) == ("missing_root", str(tmp_path / "source"), 3)


def test_root_that_is_a_file_is_called_so(tmp_path: Path) -> None:
    path = write_burgers(tmp_path / "source" / BURGERS)
    error = error_of(settings(tmp_path, root=str(path)))
    assert (error.kind, error.problem) == ("missing_root", "not a folder")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_root_with_a_name_that_can_not_exist_is_a_missing_root(name: str, tmp_path: Path) -> None:
    assert error_of(settings(tmp_path, root=name)).kind == "missing_root"


def test_root_that_can_not_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_burgers(tmp_path / "source" / BURGERS)

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", refuse)
    error = error_of(settings(tmp_path))
    assert (error.kind, error.path) == ("missing_root", str(tmp_path / "source"))
    assert "Permission denied" in str(error)


def test_folder_below_the_root_that_can_not_be_listed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_burgers(tmp_path / "source" / BURGERS)
    (tmp_path / "source" / "lost+found").mkdir()
    scandir = os.scandir

    def refuse(path):
        if "lost" in os.fspath(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert plan(settings(tmp_path, split="train")).num_samples == 16


def _not_hdf5(path: Path) -> None:
    path.write_bytes(b"PK\3\4 not HDF5")


def _no_dataset(path: Path) -> None:
    write(path, {"u": values("u", (2, T, X))})


def _no_sample(path: Path) -> None:
    write(path, {"data": values("data", (0, T, X))})


def _truncated(path: Path) -> None:
    write_burgers(path)
    os.truncate(path, path.stat().st_size - 100)


def _null_dataset(path: Path) -> None:
    write(path, {"data": h5py.Empty("f4")})


def _half_of_flow(path: Path) -> None:
    write(path, {"velocity": values("velocity", (2, T, X, X, 2))})


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_not_hdf5, "not_hdf5"),
        (_no_dataset, "unknown_layout"),
        (_no_sample, "no_samples"),
        (_truncated, "truncated"),
        (_null_dataset, "wrong_rank"),
        (_half_of_flow, "missing_dataset"),
    ],
)
def test_bad_source_is_named_and_leaves_no_store(
    make: Callable[[Path], None], kind: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "burgers1d_train.h5"
    make(path)
    error = error_of(settings(tmp_path, split="train"))
    assert (error.kind, error.path, error.exit_code) == (kind, str(path), 3)


def test_dataset_that_is_lost_behind_the_first_sample_leaves_a_resumable_file(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    path = write_diffsorp(tmp_path / "source" / "1D_diff-sorp_NA_NA.h5")
    with h5py.File(path, "a") as file:
        del file["0002/data"]
    error = error_of(settings(tmp_path, tasks="diffsorp1d", split="train"))
    assert (error.kind, error.sample, error.path) == ("missing_dataset", 2, str(path))


@pytest.mark.parametrize("change", ["x-coordinate", "t-coordinate", "tensor"])
def test_files_with_different_grids_are_both_named(change: str, tmp_path: Path) -> None:
    one = write_burgers(tmp_path / "source" / "1D_Burgers_Sols_Nu0.01.hdf5")
    other = write_burgers(tmp_path / "source" / "1D_Burgers_Sols_Nu0.1.hdf5", nu=0.1)
    with h5py.File(other, "a") as file:
        if change == "tensor":
            del file["tensor"], file["t-coordinate"]
            file["tensor"] = values("tensor", (20, T - 1, X))
        else:
            file[change][3] = 77.0
    error = error_of(settings(tmp_path, split="train"))
    assert (error.kind, error.path) == ("grids_differ", str(other))
    assert str(one) in str(error)


def test_files_with_different_parameters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "burgers1d_train_0.h5", {"data": values("data", (2, T, X))})
    write(tmp_path / "source" / "burgers1d_train_1.h5", {"data": values("data", (2, T, X))}, {"nu": 0.1})
    error = error_of(settings(tmp_path, split="train"))
    assert (error.kind, error.expected, error.found) == ("grids_differ", [], ["nu"])


# --- what the plan says -------------------------------------------------------------------------------


def test_plan_describes_the_store_that_is_built(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write_darcy(tmp_path / "source" / "2D_DarcyFlow_beta1.0_Train.hdf5")
    config = settings(tmp_path, tasks="darcy2d", split="train", split_fractions=(1, 0, 0), reduce_space=2)
    planned = plan(config)
    (result,) = build(config).stores
    assert planned.title == "darcy2d train"
    with ups_store.open(result.path) as store:
        assert planned.arrays.keys() == store.arrays.keys()
        assert {name: spec.shape for name, spec in planned.arrays.items()} == {
            name: array.shape for name, array in store.arrays.items()
        }
        assert planned.num_samples * planned.sample_nbytes == sum(store[name].nbytes for name in store.arrays)
        assert planned.dims == {name: store.dims[name] for name in store.constants}
        assert (
            result.config_hash == store.config_hash == hash_of(config) == config_hash(store.identity_document)
        )


def test_description_of_a_plan_is_json_for_people(tmp_path: Path) -> None:
    path = write_burgers(tmp_path / "source" / BURGERS)
    config = settings(tmp_path, split="test")
    (opened,) = open_builds(config, {}, Recorder())
    described = opened.plan.to_json()
    nbytes = described.pop("nbytes")
    assert described == {
        "path": str(tmp_path / "cache/burgers1d_test.zarr.zip"),
        "codec": "none",
        "num_samples": 2,
        "arrays": {
            "fields": {
                "shape": [2, T, X, 1],
                "dtype": "float32",
                "dims": ["sample", "time", "x", "channel"],
            },
            "nu": {"shape": [2], "dtype": "float64", "dims": ["sample"]},
        },
        "constants": {"t": [T], "x": [X]},
        "sources": {str(path): [0, 2]},
        "external": [],
    }
    assert not (tmp_path / "cache").exists()
    assert nbytes == build(config).stores[0].path.stat().st_size


# --- the identity -------------------------------------------------------------------------------------


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """A file that several tasks could be made from, whole or shared out."""
    (tmp_path / "source").mkdir()
    datasets = {"data": values("data", (20, T, X)), "x": coordinate(X), "t": coordinate(T)}
    return write(tmp_path / "source" / "own.h5", datasets)


def own_settings(folder: Path, **keys: object) -> BuildConfig:
    return settings(folder, **{"files": ["own*.h5"], "split": "train", **keys})


@pytest.mark.parametrize(
    "keys",
    [
        {"tasks": "advection1d"},
        {"split": "val"},
        {"split": "test"},
        {"split_fractions": (0.8, 0.1, 0.05)},
        {"reduce_space": 2},
        {"reduce_time": 2},
        {"limit": 15},
        {"source_digest": "sampled"},
        {"cache_dtype": "float64"},
        {"cache_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_every_setting_that_decides_the_bytes_changes_the_hash(keys, own_file: Path, tmp_path: Path) -> None:
    assert hash_of(own_settings(tmp_path, **keys)) != hash_of(own_settings(tmp_path))


def _value(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["data"][19, 0, 0] += 1  # of the last sample, which isn't in the split


def _coordinate(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["x"][3] += 1


def _parameter(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.attrs["nu"] = 0.1


def _name(path: Path) -> None:
    path.rename(path.with_name("own2.h5"))


def _size(path: Path) -> None:
    with path.open("ab") as raw:
        raw.write(b"\0")


def _shard(path: Path) -> None:
    shutil.copy(path, path.with_name("own2.h5"))


@pytest.mark.parametrize("change", [_value, _coordinate, _parameter, _name, _size, _shard])
def test_every_change_of_a_source_changes_the_hash(change, own_file: Path, tmp_path: Path) -> None:
    before = hash_of(own_settings(tmp_path))
    change(own_file)
    assert hash_of(own_settings(tmp_path)) != before


def test_version_of_the_layout_changes_the_hash(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hash_of(own_settings(tmp_path))
    monkeypatch.setattr(Converted, "version", Converted.version + 1)
    assert hash_of(own_settings(tmp_path)) != before


def test_fractions_do_not_matter_to_files_that_are_a_split_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "burgers1d_train.h5", {"data": values("data", (20, T, X))})
    config = settings(tmp_path, split="train")
    assert hash_of(settings(tmp_path, split="train", split_fractions=(0.5, 0.3, 0.2))) == hash_of(config)


@pytest.mark.parametrize("keys", [{"on_nan": "keep"}, {"cache_dir": "/elsewhere"}, {"limit": 16}], ids=str)
def test_setting_that_does_not_decide_the_bytes_keeps_the_hash(keys, own_file: Path, tmp_path: Path) -> None:
    assert hash_of(own_settings(tmp_path, **keys)) == hash_of(own_settings(tmp_path))


def test_time_and_place_of_a_source_keep_the_hash(own_file: Path, tmp_path: Path) -> None:
    before = hash_of(own_settings(tmp_path))
    os.utime(own_file, ns=(1, 1))
    assert hash_of(own_settings(tmp_path)) == before
    shutil.copytree(tmp_path / "source", tmp_path / "elsewhere" / "deeper")
    assert hash_of(own_settings(tmp_path, root=str(tmp_path / "elsewhere" / "deeper"))) == before
    assert hash_of(own_settings(tmp_path), rehash=True) == before


def test_size_of_batches_keeps_hash_and_bytes(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = build(own_settings(tmp_path)).stores
    monkeypatch.setattr(read, "BATCH_BYTES", 1)
    (other,) = build(own_settings(tmp_path, cache_dir=str(tmp_path / "other"))).stores
    assert one.config_hash == other.config_hash
    assert one.path.read_bytes() == other.path.read_bytes()


def test_identity_says_what_the_store_was_made_from(own_file: Path, tmp_path: Path) -> None:
    (result,) = build(own_settings(tmp_path, reduce_time=2)).stores
    digest = DigestCache(tmp_path).digest(own_file, "full", lambda nbytes: None)
    with ups_store.open(result.path) as store:
        assert store.identity == {
            "kind": "fields",
            "task": "burgers1d",
            "split": "train",
            "split_fractions": [0.8, 0.1, 0.1],
            "reduce_space": 1,
            "reduce_time": 2,
            "layout": {"name": "converted", "version": 1},
            "source_digest": "full",
            "sources": [
                {
                    "name": "own.h5",
                    "size": own_file.stat().st_size,
                    "digest": digest,
                    "samples": [2, 18],
                }
            ],
        }


@pytest.mark.parametrize("name", ["burgers1d_train_ü–日 '\"[x]{y}.h5", "burgers1d_train_\udcff.h5"])
def test_file_with_an_unusual_name_is_built(name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    data = values("data", (3, T, X))
    write(tmp_path / "source" / name, {"data": data})
    (result,) = build(settings(tmp_path, split="train")).stores
    with ups_store.open(result.path) as store:
        assert np.array_equal(store["fields"][..., 0], data)
        assert store.identity["sources"][0]["name"] == name.replace("\udcff", "\\xff")
