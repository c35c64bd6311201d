"""Which samples of which files a store has, sources that make none, and what its identity depends on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, hash_of, plan, settings, write_burgers
from pdebench_files import T, X, coordinate, edited, values, write, write_darcy, write_diffsorp

import ups_store
from ups_store.building import read
from ups_store.building.config import BuildConfig
from ups_store.building.plan import DigestCache
from ups_store.building.stores import open_builds
from ups_store.errors import StoreError
from ups_store.format.root import config_hash
from ups_store.sources.conventions import Converted


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def error_of(config: BuildConfig) -> StoreError:
    with pytest.raises(StoreError) as caught:
        build(config)
    assert not list(config.cache.dir.glob("*.zarr.zip"))
    return caught.value


# --- which samples ------------------------------------------------------------------------------------


def test_parts_of_all_splits_are_disjoint_and_cover_every_file(source: Path, tmp_path: Path) -> None:
    lengths = {"0.001": 33, "0.01": 10, "0.1": 5}
    for nu, num in lengths.items():
        write_burgers(source / f"1D_Burgers_Sols_Nu{nu}.hdf5", num_samples=num, nu=float(nu))
    seen: dict[str, list[int]] = {f"1D_Burgers_Sols_Nu{nu}.hdf5": [] for nu in lengths}
    for split in ("train", "val", "test"):
        for part in plan(settings(tmp_path, split=split)).parts:
            seen[part.path.name] += part.indices
    assert [sorted(rows) for rows in seen.values()] == [list(range(num)) for num in lengths.values()]


def test_file_without_a_share_in_the_split_or_beyond_the_limit_is_left_out(
    source: Path, tmp_path: Path
) -> None:
    one = write_burgers(source / "1D_Burgers_Sols_Nu0.01.hdf5", num_samples=20)
    other = write_burgers(source / "1D_Burgers_Sols_Nu0.1.hdf5", num_samples=3, nu=0.1)
    limited = plan(settings(tmp_path, split="train", limit=16))
    content = limited.identity(DigestCache(tmp_path), lambda nbytes: None)
    assert [file["name"] for file in content["sources"]] == [one.name]
    assert limited.source_nbytes == one.stat().st_size
    config = settings(tmp_path, split="test")
    assert [part.path for part in plan(config).parts] == [one]
    before = hash_of(config)
    other.unlink()
    assert hash_of(config) == before


def test_split_that_would_be_empty_is_skipped_beside_others_and_an_error_alone(
    source: Path, tmp_path: Path
) -> None:
    write_burgers(source / BURGERS, num_samples=5)
    for split in ("test", ["val", "test"]):
        error = error_of(settings(tmp_path, split=split))
        assert (error.kind, error.exit_code, error.path) == ("empty_split", 3, str(source))
        assert "burgers1d test would be empty" in str(error)
    watcher = Recorder()
    report = build(settings(tmp_path), watcher)
    assert [result.split for result in report.stores] == ["train"]
    assert list(report.skipped) == ["burgers1d val", "burgers1d test"]
    assert watcher.notes == [f"skipped {name}: {why}" for name, why in report.skipped.items()]
    shares = "5 samples in 1 file, shared out 0.8, 0.1, 0.1: 5 to train, 0 to val, 0 to test"
    assert shares in report.skipped["burgers1d val"]
    assert not (tmp_path / "cache" / "burgers1d_val.zarr.zip").exists()


def test_split_without_a_source_is_skipped_beside_others_and_an_error_alone(
    source: Path, tmp_path: Path
) -> None:
    write(source / "burgers1d_train.h5", {"data": values("data", (3, T, X))})
    assert error_of(settings(tmp_path, split="test")).kind == "no_source"
    report = build(settings(tmp_path))
    assert [result.path.name for result in report.stores] == ["burgers1d_train.zarr.zip"]
    assert len(report.skipped) == 2


# --- sources that can't be built ----------------------------------------------------------------------


def test_root_that_is_no_folder_is_called_so(source: Path, tmp_path: Path) -> None:
    file = write_burgers(source / BURGERS)
    for root, problem in ((tmp_path / "absent", "no such folder"), (file, "not a folder")):
        error = error_of(settings(tmp_path, root=str(root)))
        assert (error.kind, error.problem, error.path) == ("missing_root", problem, str(root))
        assert error.exit_code == 3
    for name in ("x" * 5000, "a\0b"):
        assert error_of(settings(tmp_path, root=name)).kind == "missing_root"


def test_root_that_can_not_be_listed_is_an_error_and_a_folder_below_it_is_passed_over(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_burgers(source / BURGERS)
    (source / "lost+found").mkdir()
    scandir, hidden = os.scandir, "lost+found"

    def refuse(path: Any) -> Any:
        if os.fspath(path).endswith(hidden):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert plan(settings(tmp_path, split="train")).num_samples == 16
    hidden = "source"
    error = error_of(settings(tmp_path))
    assert (error.kind, error.path, "Permission denied" in str(error)) == ("missing_root", str(source), True)


BAD_SOURCES: dict[str, Callable[[Path], object]] = {
    "not_hdf5": lambda path: path.write_bytes(b"PK\3\4 not HDF5"),
    "unknown_layout": lambda path: write(path, {"u": values("u", (2, T, X))}),
    "no_samples": lambda path: write(path, {"data": values("data", (0, T, X))}),
    "truncated": lambda path: os.truncate(write_burgers(path), path.stat().st_size - 100),
    "wrong_rank": lambda path: write(path, {"data": h5py.Empty("f4")}),
    "missing_dataset": lambda path: write(path, {"velocity": values("velocity", (2, T, X, X, 2))}),
}


@pytest.mark.parametrize("kind", BAD_SOURCES)
def test_bad_source_is_named_and_leaves_no_store(kind: str, source: Path, tmp_path: Path) -> None:
    path = source / "burgers1d_train.h5"
    BAD_SOURCES[kind](path)
    error = error_of(settings(tmp_path, split="train"))
    assert (error.kind, error.path, error.exit_code) == (kind, str(path), 3)


def test_dataset_that_is_lost_behind_the_first_sample_leaves_a_resumable_file(
    source: Path, tmp_path: Path
) -> None:
    path = write_diffsorp(source / "1D_diff-sorp_NA_NA.h5")
    with h5py.File(path, "a") as file:
        del file["0002/data"]
    error = error_of(settings(tmp_path, tasks="diffsorp1d", split="train"))
    assert (error.kind, error.sample, error.path) == ("missing_dataset", 2, str(path))


@pytest.mark.parametrize("change", ["x-coordinate", "tensor", "parameter"])
def test_files_with_different_grids_or_parameters_are_both_named(
    change: str, source: Path, tmp_path: Path
) -> None:
    one = write_burgers(source / "1D_Burgers_Sols_Nu0.01.hdf5")
    other = write_burgers(source / "1D_Burgers_Sols_Nu0.1.hdf5", nu=0.1)
    with h5py.File(other, "a") as file:
        if change == "tensor":
            del file["tensor"], file["t-coordinate"]
            file["tensor"] = values("tensor", (20, T - 1, X))
        elif change == "parameter":
            file.attrs["rho"] = 1.0
        else:
            file[change][3] = 77.0
    error = error_of(settings(tmp_path, split="train"))
    assert (error.kind, error.path) == ("grids_differ", str(other))
    assert str(one) in str(error)
    if change == "parameter":
        assert (error.expected, error.found) == (["nu"], ["nu", "rho"])


# --- what the plan says -------------------------------------------------------------------------------


def test_plan_describes_the_store_that_is_built(source: Path, tmp_path: Path) -> None:
    path = write_darcy(source / "2D_DarcyFlow_beta1.0_Train.hdf5")
    config = settings(tmp_path, tasks="darcy2d", split="train", split_fractions=(1, 0, 0), reduce_space=2)
    planned = plan(config)
    (opened,) = open_builds(config, {}, Recorder())
    described = opened.plan.to_json()
    assert not (tmp_path / "cache").exists()
    (result,) = build(config).stores
    assert planned.title == "darcy2d train"
    with ups_store.open(result.path) as store:
        shapes = {name: array.shape for name, array in store.arrays.items()}
        assert {name: spec.shape for name, spec in planned.arrays.items()} == shapes
        assert planned.num_samples * planned.sample_nbytes == sum(store[name].nbytes for name in store.arrays)
        assert planned.dims == {name: store.dims[name] for name in store.constants}
        document_hash = config_hash(store.identity_document)
        assert result.config_hash == store.config_hash == hash_of(config) == document_hash
        assert described == {
            "path": str(result.path),
            "codec": "none",
            "num_samples": len(store),
            "nbytes": result.path.stat().st_size,
            "arrays": {
                name: {"shape": list(shape), "dtype": store[name].dtype.name, "dims": list(store.dims[name])}
                for name, shape in shapes.items()
            },
            "constants": {name: list(values.shape) for name, values in store.constants.items()},
            "sources": {str(path): [0, len(store)]},
            "external": [],
        }


# --- the identity -------------------------------------------------------------------------------------


@pytest.fixture
def own_file(source: Path) -> Path:
    """A file that several tasks could be made from, whole or shared out."""
    datasets = {"data": values("data", (20, T, X)), "x": coordinate(X), "t": coordinate(T)}
    return write(source / "own.h5", datasets)


def own_settings(folder: Path, **keys: Any) -> BuildConfig:
    return settings(folder, **{"files": ["own*.h5"], "split": "train", **keys})


def test_every_setting_that_decides_the_bytes_changes_the_hash_and_no_other(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisive: tuple[dict[str, Any], ...] = (
        {},
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
    )
    hashes = [hash_of(own_settings(tmp_path, **keys)) for keys in decisive]
    assert len(set(hashes)) == len(decisive)
    for keys in ({"on_nan": "keep"}, {"cache_dir": "/elsewhere"}, {"limit": 16}):
        assert hash_of(own_settings(tmp_path, **keys)) == hashes[0], keys
    monkeypatch.setattr(Converted, "version", Converted.version + 1)
    assert hash_of(own_settings(tmp_path)) not in hashes


def _add(name: str) -> Callable[[Path], object]:
    """Add 1 to a value of a dataset: of "data" in the last sample, which isn't in the split."""
    return lambda path: edited(path, lambda file: file[name].__setitem__(-1, file[name][-1] + 1))


@pytest.mark.parametrize(
    "change",
    [
        _add("data"),
        _add("x"),
        lambda path: edited(path, lambda file: file.attrs.update(nu=0.1)),
        lambda path: path.rename(path.with_name("own2.h5")),
        lambda path: os.truncate(path, path.stat().st_size + 1),
        lambda path: shutil.copy(path, path.with_name("own2.h5")),
    ],
    ids=["value", "coordinate", "parameter", "name", "size", "shard"],
)
def test_every_change_of_a_source_changes_the_hash(
    change: Callable[[Path], object], own_file: Path, tmp_path: Path
) -> None:
    before = hash_of(own_settings(tmp_path))
    change(own_file)
    assert hash_of(own_settings(tmp_path)) != before


def test_fractions_do_not_matter_to_files_that_are_a_split_as_a_whole(source: Path, tmp_path: Path) -> None:
    write(source / "burgers1d_train.h5", {"data": values("data", (20, T, X))})
    hashes = {
        hash_of(settings(tmp_path, split="train", split_fractions=fractions))
        for fractions in ((0.8, 0.1, 0.1), (0.5, 0.3, 0.2))
    }
    assert len(hashes) == 1


def test_time_and_place_of_a_source_keep_the_hash(own_file: Path, tmp_path: Path) -> None:
    before = hash_of(own_settings(tmp_path))
    os.utime(own_file, ns=(1, 1))
    assert hash_of(own_settings(tmp_path)) == before
    shutil.copytree(tmp_path / "source", tmp_path / "elsewhere" / "deeper")
    assert hash_of(own_settings(tmp_path, root=str(tmp_path / "elsewhere" / "deeper"))) == before
    assert hash_of(own_settings(tmp_path), rehash=True) == before


def test_size_of_batches_keeps_hash_and_bytes_and_the_identity_says_all(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = build(own_settings(tmp_path, reduce_time=2)).stores
    monkeypatch.setattr(read, "BATCH_BYTES", 1)
    (other,) = build(own_settings(tmp_path, reduce_time=2, cache_dir=str(tmp_path / "other"))).stores
    assert one.config_hash == other.config_hash
    assert one.path.read_bytes() == other.path.read_bytes()
    digest = DigestCache(tmp_path).digest(own_file, "full", lambda nbytes: None)
    size = own_file.stat().st_size
    with ups_store.open(one.path) as store:
        assert store.identity == {
            "kind": "fields",
            "task": "burgers1d",
            "split": "train",
            "split_fractions": [0.8, 0.1, 0.1],
            "reduce_space": 1,
            "reduce_time": 2,
            "layout": {"name": "converted", "version": 1},
            "source_digest": "full",
            "sources": [{"name": "own.h5", "size": size, "digest": digest, "samples": [2, 18]}],
        }


@pytest.mark.parametrize("name", ["burgers1d_train_ü–日 '\"[x]{y}.h5", "burgers1d_train_\udcff.h5"])
def test_file_with_an_unusual_name_is_built(name: str, source: Path, tmp_path: Path) -> None:
    data = values("data", (3, T, X))
    write(source / name, {"data": data})
    (result,) = build(settings(tmp_path, split="train")).stores
    with ups_store.open(result.path) as store:
        assert np.array_equal(store["fields"][..., 0], data)
        assert store.identity["sources"][0]["name"] == name.replace("\udcff", "\\xff")
