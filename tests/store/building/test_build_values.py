"""What built stores hold: values of every family, coordinates, dtypes, NaN, and the samples of splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, plain, settings, write_burgers
from pdebench_files import (
    FAMILIES,
    REAL_FILES,
    Arrays,
    Family,
    T,
    X,
    coordinate,
    reduced,
    values,
    write,
    write_cfd2d,
)

import ups_store
from ups_store.building.progress import BuildReport
from ups_store.errors import SourceError
from ups_store.sources.tasks import get_task

REAL = sorted(REAL_FILES.glob("*.h*5"))
FRACTIONS = (0.5, 0.25, 0.25)
FIRST = {"advection1d", "burgers1d", "reacdiff1d", "cfd1d", "cfd2d", "cfd3d", "darcy2d"}  # tested on


def rows_of(task: str, num_samples: int) -> dict[str, list[int]]:
    """Samples of every split for `FRACTIONS`, written down without the package."""
    quarter, numbers = num_samples // 4, list(range(num_samples))
    if task in FIRST:
        test, rest = numbers[:quarter], numbers[quarter:]
    else:
        test, rest = numbers[num_samples - quarter :], numbers[: num_samples - quarter]
    return {"train": rest[: len(rest) - quarter], "val": rest[len(rest) - quarter :], "test": test}


def assert_store_holds(path: Path, expected: Arrays, rows: list[int], dtype: Any = np.float32) -> None:
    with ups_store.open(path) as store:
        assert len(store) == len(rows)
        assert store.verify().ok
        for name, array in expected.items():
            assert store[name].dtype == dtype
            assert np.array_equal(store[name], array[rows].astype(dtype), equal_nan=True), name


def assert_built(folder: Path, expected: Arrays, rows: dict[str, list[int]], /, **keys: Any) -> BuildReport:
    """Build every split, and compare the stores with the `rows` of `expected` that they should hold."""
    report = build(settings(folder, split_fractions=FRACTIONS, **keys))
    assert [result.split for result in report.stores] == [split for split in rows if rows[split]]
    for result in report.stores:
        assert_store_holds(result.path, expected, rows[result.split])
    return report


# --- every family -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_built_stores_hold_what_h5py_reads(family: Family, tmp_path: Path) -> None:
    """Other selections are read in `test_ingest_layouts`."""
    space, time = 3, 2
    (tmp_path / "source").mkdir()
    path = family.write(tmp_path / "source" / family.file_name)
    expected = reduced(plain(path, family.read), space=space, time=time)
    num_samples = len(expected["fields"])
    rows = rows_of(family.task, num_samples)
    if family.file_name.startswith((family.task, "Sod")):  # of one split as a whole
        rows = {"test" if "Sod" in family.file_name else "train": list(range(num_samples))}
    keys = {"tasks": family.task, "files": [family.file_name]}
    assert_built(tmp_path, expected, rows, **keys, reduce_space=space, reduce_time=time)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
@pytest.mark.parametrize(("space", "time"), [(1, 1), (2, 5)])
def test_stores_built_from_pdebench_hold_what_h5py_reads(
    path: Path, space: int, time: int, tmp_path: Path
) -> None:
    family = next(f for f in FAMILIES if get_task(f.task).matches(path.name) and f.file_name != "Sod6.hdf5")
    expected = reduced(plain(path, family.read), space=space, time=time)
    rows = rows_of(family.task, len(expected["fields"]))
    keys = {"tasks": family.task, "root": str(REAL_FILES), "files": [path.name]}
    report = assert_built(tmp_path, expected, rows, **keys, reduce_space=space, reduce_time=time)
    for result in report.stores:
        statistics = result.statistics["fields"]
        chosen = expected["fields"][rows[result.split]]
        assert (statistics["min"], statistics["max"]) == (chosen.min(), chosen.max())


# --- what lies beside the fields ----------------------------------------------------------------------


def test_store_holds_coordinates_dimensions_and_attributes(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    path = write_cfd2d(tmp_path / "source" / "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_64_Train.hdf5")
    build(settings(tmp_path, tasks="cfd2d", split="train", reduce_space=2, reduce_time=3))
    with ups_store.open(tmp_path / "cache/cfd2d_train.zarr.zip") as store, h5py.File(path) as file:
        assert np.array_equal(store["t"], file["t-coordinate"][:T:3])
        assert np.array_equal(store["x"], file["x-coordinate"][::2])
        assert np.array_equal(store["y"], file["y-coordinate"][::2])
        assert store.dims["fields"] == ("sample", "time", "y", "x", "channel")
        assert (store.dims["t"], store.dims["x"], store.dims["eta"]) == (("time",), ("x",), ("sample",))
        assert {name: store[name].tolist() for name in ("eta", "zeta", "mach")} == {
            "eta": [0.01] * 5,
            "zeta": [0.01] * 5,
            "mach": [0.1] * 5,
        }
        assert store["eta"].dtype == np.float64
        assert store.arrays["fields"].attrs == {"channels": ["density", "pressure", "Vx", "Vy"]}
        assert store.attrs == {
            "task": "cfd2d",
            "split": "train",
            "channels": ["density", "pressure", "Vx", "Vy"],
            "boundary": {"x": "periodic", "y": "periodic"},
            "domain_lengths": {"x": 1.111111, "y": 1.2},  # n cells of the distance between two centres
        }


def test_domain_length_does_not_depend_on_a_reduction_that_divides_the_grid(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    data = {"data": values("data", (2, T, 12)), "x": (np.arange(12) / 12 + 1 / 24).astype("<f4")}
    write(tmp_path / "source" / "burgers1d_train.h5", data)
    for step in (1, 2, 3):
        build(settings(tmp_path, split="train", reduce_space=step))
        with ups_store.open(tmp_path / "cache/burgers1d_train.zarr.zip") as store:
            assert store.attrs["domain_lengths"] == {"x": 1.0}


def test_file_without_coordinates_makes_a_store_without_constants(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "burgers1d_train.h5", {"data": values("data", (3, T, X))})
    build(settings(tmp_path, split="train"))
    with ups_store.open(tmp_path / "cache/burgers1d_train.zarr.zip") as store:
        assert store.constants == {}
        assert set(store.arrays) == {"fields"}


# --- dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float16", np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float32", np.float32),
        ("float64", np.float64),
    ],
)
def test_fields_are_stored_in_the_dtype_asked_for(name: str, dtype: Any, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.task == "darcy2d")  # which has a coefficient, too
    (tmp_path / "source").mkdir()
    path = family.write(tmp_path / "source" / family.file_name)
    keys = {"tasks": family.task, "split": "train", "split_fractions": (1, 0, 0)}
    (result,) = build(settings(tmp_path, cache_dtype=name, **keys)).stores
    expected = plain(path, family.read)
    assert_store_holds(result.path, expected, list(range(len(expected["fields"]))), dtype)


@pytest.mark.parametrize(("dtype", "big"), [("float16", 1e6), ("bfloat16", 1e39), ("float32", 1e39)])
def test_overflow_of_the_dtype_fails_or_is_counted(dtype: str, big: float, tmp_path: Path) -> None:
    data = values("data", (4, T, X), "<f8")
    data[2, 1, 3] = -big
    (tmp_path / "source").mkdir()
    path = write(tmp_path / "source" / "burgers1d_train.h5", {"data": data})
    with pytest.raises(SourceError, match=f"the cast to {dtype} made 1 of {T * X} values") as caught:
        build(settings(tmp_path, split="train", cache_dtype=dtype))
    error = caught.value
    assert (error.kind, error.path, error.array, error.sample) == ("not_finite", str(path), "fields", 2)
    assert f"-{big:.6g} to " in str(error.found)
    holds = "float32" if big < 1e38 else "float64"
    assert error.hint == f"cache.dtype={holds} holds them"
    watcher = Recorder()
    (result,) = build(settings(tmp_path, split="train", cache_dtype=dtype, on_nan="keep"), watcher).stores
    found = result.statistics["fields"]
    assert (found["num_inf"], found["num_overflow"], found["num_underflow"]) == (1, 1, 0)
    assert any(f"1 Inf, 1 of them by the cast to {dtype}" in note for note in watcher.notes)
    with ups_store.open(result.path) as store:
        assert store["fields"][2, 1, 3, 0].astype(np.float64) == -np.inf


@pytest.mark.parametrize(("dtype", "tiny"), [("float16", 1e-9), ("bfloat16", 1e-50), ("float32", 1e-50)])
def test_values_that_a_cast_makes_zero_are_counted_and_noted_once(
    dtype: str, tiny: float, tmp_path: Path
) -> None:
    data = values("data", (4, T, X), "<f8")
    data[1, 2, :5], data[3, 0, 0], data[2, 1, 1] = tiny, -tiny, 0
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "burgers1d_train.h5", {"data": data})
    watcher = Recorder()
    (result,) = build(settings(tmp_path, split="train", cache_dtype=dtype), watcher).stores
    assert result.to_json()["statistics"]["fields"]["num_underflow"] == 6
    notes = [note for note in watcher.notes if "made 6 values 0" in note]
    assert len(notes) == 1
    assert f"array 'fields': the cast to {dtype} made 6 values 0" in notes[0]


# --- NaN and Inf --------------------------------------------------------------------------------------


NO_CAST = {"num_underflow": 0, "num_overflow": 0}


def nan_file(folder: Path) -> Path:
    data = values("data", (20, T, X))
    data[7, 2, 3:5] = np.nan
    data[7, 2, 6] = np.inf
    data[9, 0, 0] = -np.inf
    return write_burgers(folder / "source" / BURGERS, fields=data)


def test_nan_in_the_source_fails_and_names_file_array_and_sample(tmp_path: Path) -> None:
    path = nan_file(tmp_path)
    others = "the first of 2 such samples among the 16 read together, numbered as in the file"
    message = f"3 of {T * X} values are not finite, {others}; .*data.on_nan=keep"
    with pytest.raises(SourceError, match=message) as caught:
        build(settings(tmp_path, split="train"))
    error = caught.value
    assert (error.kind, error.exit_code) == ("not_finite", 3)
    assert (error.path, error.array, error.sample) == (str(path), "fields", 7)


def test_nan_outside_the_split_or_the_selection_is_no_error(tmp_path: Path) -> None:
    nan_file(tmp_path)
    build(settings(tmp_path, split=["test", "val"]))
    build(
        settings(
            tmp_path, split="train", reduce_time=5, reduce_space=3, cache_dir=str(tmp_path / "c"), limit=7
        )
    )


def test_nan_that_is_kept_is_stored_and_counted(tmp_path: Path) -> None:
    path = nan_file(tmp_path)
    watcher = Recorder()
    (result,) = build(settings(tmp_path, split="train", on_nan="keep"), watcher).stores
    assert f"{result.path}: array 'fields' holds 2 NaN and 2 Inf" in watcher.notes
    assert result.statistics["fields"]["num_nan"] == 2
    assert result.statistics["fields"]["num_inf"] == 2
    tensor = plain(path, lambda file: {"fields": file["tensor"][...][..., None]})
    finite = tensor["fields"][2:18][np.isfinite(tensor["fields"][2:18])]
    assert result.statistics["fields"]["min"] == finite.min()
    assert result.statistics["fields"]["max"] == finite.max()
    assert_store_holds(result.path, tensor, list(range(2, 18)))


def test_signalling_nan_is_kept_without_a_warning(tmp_path: Path) -> None:
    data = np.full(4 * T * X, 0x7FF0000000000001, np.uint64).view("<f8").reshape(4, T, X)
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "burgers1d_train.h5", {"data": data})
    (result,) = build(settings(tmp_path, split="train", on_nan="keep")).stores
    assert result.statistics["fields"] == {
        "min": None,
        "max": None,
        "num_nan": 4 * T * X,
        "num_inf": 0,
        **NO_CAST,
    }


def test_parameter_that_is_nan_fails_or_is_counted(tmp_path: Path) -> None:
    path = write_burgers(tmp_path / "source" / BURGERS, nu=float("nan"))
    with pytest.raises(SourceError) as caught:
        build(settings(tmp_path, split="train"))
    assert (caught.value.kind, caught.value.array, caught.value.path) == ("not_finite", "nu", str(path))
    (result,) = build(settings(tmp_path, split="train", on_nan="keep")).stores
    assert result.statistics["nu"] == {"min": None, "max": None, "num_nan": 16, "num_inf": 0, **NO_CAST}


def test_coordinate_that_is_nan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    grid = coordinate(X)
    grid[4] = np.nan
    write(tmp_path / "source" / "burgers1d_train.h5", {"data": values("data", (3, T, X)), "x": grid})
    with pytest.raises(SourceError) as caught:
        build(settings(tmp_path, split="train", on_nan="keep"))
    assert (caught.value.kind, caught.value.dataset, caught.value.found) == (
        "not_finite",
        "x",
        "nan at index 4",
    )


# --- files and splits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["hdf5", "h5"])
def test_splits_are_disjoint_and_cover_the_files(suffix: str, tmp_path: Path) -> None:
    first = np.arange(30 * T * X, dtype="<f4").reshape(30, T, X)
    second = first + first.size
    write_burgers(tmp_path / "source" / f"1D_Burgers_Sols_Nu0.001.{suffix}", fields=first, nu=0.001)
    write_burgers(tmp_path / "source" / f"1D_Burgers_Sols_Nu0.1.{suffix}", fields=second[:20], nu=0.1)
    build(settings(tmp_path))
    seen = []
    for split in ("train", "val", "test"):
        with ups_store.open(tmp_path / f"cache/burgers1d_{split}.zarr.zip") as store:
            assert (
                store["nu"].tolist()
                == np.where(store["fields"][:, 0, 0, 0] < first.size, 0.001, 0.1).tolist()
            )
            seen.append(store["fields"].copy())
    assert [len(part) for part in seen] == [24 + 16, 3 + 2, 3 + 2]
    everything = np.concatenate([first, second[:20]])[..., None]
    assert np.array_equal(np.sort(np.concatenate(seen), axis=0), everything)


def test_files_of_a_split_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for nu in (4.0, 0.001, 0.01, 0.1):
        write_burgers(tmp_path / "source" / f"1D_Burgers_Sols_Nu{nu}.hdf5", num_samples=4, nu=nu)
    build(settings(tmp_path, split="train", split_fractions=(1, 0, 0)))
    with ups_store.open(tmp_path / "cache/burgers1d_train.zarr.zip") as store:
        assert store["nu"].tolist() == [nu for nu in (0.001, 0.01, 0.1, 4.0) for _ in range(4)]
    shards, parts = tmp_path / "shards", [values(str(i), (2, T, X)) for i in range(3)]
    shards.mkdir()
    for number, part in zip((1, 2, 10), parts, strict=True):
        write(shards / f"burgers1d_valid_{number}.h5", {"data": part})
    (result,) = build(settings(tmp_path, root=str(shards), split="valid")).stores
    assert result.path == tmp_path / "cache/burgers1d_val.zarr.zip"
    assert_store_holds(result.path, {"fields": np.concatenate(parts)[..., None]}, list(range(6)))


def test_limit_takes_the_first_samples_of_the_split(tmp_path: Path) -> None:
    paths = [
        write_burgers(tmp_path / "source" / f"1D_Burgers_Sols_Nu{nu}.hdf5", nu=nu)
        for nu in (0.001, 0.01, 0.1)
    ]
    build(settings(tmp_path, split="train", limit=18))
    with ups_store.open(tmp_path / "cache/burgers1d_train.zarr.zip") as store:
        assert store["nu"].tolist() == [0.001] * 16 + [0.01] * 2
        tensors = [plain(path, lambda file: {"tensor": file["tensor"][...]})["tensor"] for path in paths]
        assert np.array_equal(store["fields"][..., 0], np.concatenate([tensors[0][2:18], tensors[1][2:4]]))
