from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from pdebench_files import (
    FAMILIES,
    REAL_FILES,
    Family,
    Size,
    T,
    X,
    Y,
    coordinate,
    edited,
    reduced,
    values,
    write,
    write_cfd1d,
    write_cfd2d,
    write_converted,
    write_converted_2d,
    write_darcy,
    write_diffreact,
    write_diffsorp,
    write_navier_stokes,
    write_reacdiff,
    write_scalar_1d,
)

from ups_store.errors import ConfigError, SourceError, StoreClosedError
from ups_store.sources import regions
from ups_store.sources.contents import Selection, check_same_grid
from ups_store.sources.source import open_source
from ups_store.sources.tasks import TASKS, Task, get_task

SELECTIONS = [Selection(), Selection(reduce_space=3, reduce_time=2), Selection(reduce_space=1, reduce_time=5)]
REAL = sorted(REAL_FILES.glob("*.h*5"))


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in found.items():
        assert array.dtype == expected[name].dtype
        assert array.flags.c_contiguous
        assert np.array_equal(array, expected[name]), name


def error_of(path: Path, *, task: Task | None = None) -> SourceError:
    with pytest.raises(SourceError) as caught:
        open_source(path, task=task)
    assert caught.value.path == str(path)
    return caught.value


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


# --- values -------------------------------------------------------------------------------------------


def test_read_returns_values_of_the_file_in_store_order_and_in_that_asked_for(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block and a few frames at a time."""
    path = family.write(tmp_path / family.file_name)
    with h5py.File(path) as file:
        everything = family.read(file)
    for selection, block_bytes in itertools.product(SELECTIONS, (2**26, 1000)):
        monkeypatch.setattr(regions, "BLOCK_BYTES", block_bytes)
        with open_source(path, task=get_task(family.task), selection=selection) as source:
            assert source.info.layout == family.layout
            num_samples = source.info.num_samples
            expected = reduced(everything, space=selection.reduce_space, time=selection.reduce_time)
            assert_same(source.read(range(num_samples)), expected)
            for indices in ([3, 0, 1, 2, 2], [], range(1, 4)):
                samples = [i % num_samples for i in indices]
                assert_same(source.read(samples), {name: array[samples] for name, array in expected.items()})


@pytest.mark.parametrize(
    ("selection", "key"), [(Selection(1 << 12), "reduce_space"), (Selection(1, 1 << 12), "reduce_time")]
)
def test_selection_of_one_point_or_step_of_many_is_refused(
    selection: Selection, key: str, tmp_path: Path
) -> None:
    path = write_scalar_1d(tmp_path / "a.h5")
    with pytest.raises(ConfigError, match=f"data.{key}") as caught:
        open_source(path, selection=selection)
    assert (caught.value.kind, caught.value.path) == ("bad_reduction", str(path))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
@pytest.mark.parametrize("selection", SELECTIONS[:2], ids=["all", "space3_time2"])
def test_read_of_file_by_pdebench_returns_its_values(path: Path, selection: Selection) -> None:
    family = next(f for f in FAMILIES if get_task(f.task).matches(path.name) and f.file_name != "Sod6.hdf5")
    with h5py.File(path) as file:
        expected = reduced(family.read(file), space=selection.reduce_space, time=selection.reduce_time)
    with open_source(path, task=get_task(family.task), selection=selection) as source:
        info, found = source.info, source.read(range(source.info.num_samples))
    assert_same(found, expected)
    assert info.layout == family.layout
    assert set(info.parameters) == set(get_task(family.task).parameters)


def test_array_info_describes_what_read_returns(family: Family, tmp_path: Path) -> None:
    path = family.write(tmp_path / family.file_name)
    with open_source(path, selection=Selection(2, 3)) as source:
        arrays = source.read([0])
        for name, info in source.info.arrays.items():
            assert arrays[name].shape == (1, *info.shape)
            assert arrays[name].dtype == info.dtype
            assert len(info.dims) == len(info.shape)
            for dim, length in zip(info.dims, info.shape, strict=True):
                assert length == len(source.info.constants.get(dim, range(length)))


def test_run_of_samples_is_read_by_hyperslabs_of_at_most_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[slice, slice]] = []
    getitem = h5py.Dataset.__getitem__

    def spy(dataset: h5py.Dataset, key: object) -> np.ndarray:
        if isinstance(key, tuple):
            read.append(key[:2])
        return getitem(dataset, key)

    def slabs_of(indices: list[int], block_bytes: int) -> list[tuple[slice, slice]]:
        monkeypatch.setattr(regions, "BLOCK_BYTES", block_bytes)
        read.clear()
        with open_source(path) as source:
            source.read(indices)
        return [*read]

    path = write_scalar_1d(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:  # big-endian: nothing that is copied as it lies there
        values = file["tensor"][...]
        del file["tensor"]
        file["tensor"] = values.astype(">f4")
    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    every = slice(0, T, 1)
    assert slabs_of([1, 2, 3, 0], 1 << 20) == [(slice(1, 4), every), (slice(0, 1), every)]
    by_two = [(slice(i, min(i + 2, 5)), every) for i in (0, 2, 4)]
    assert slabs_of([*range(5)], 2 * T * X * 4) == by_two
    frames = [(slice(4, 5), slice(i, min(i + 3, T), 1)) for i in (0, 3, 6)]
    assert slabs_of([4], 3 * X * 4) == frames


# --- what is known before reading ---------------------------------------------------------------------


def test_coordinates_are_read_reduced_and_cut_to_their_axis(tmp_path: Path) -> None:
    path = write_cfd2d(tmp_path / "a.h5")
    with open_source(path, selection=Selection(reduce_space=2, reduce_time=3)) as source:
        constants = source.info.constants
    with h5py.File(path) as file:
        assert len(file["t-coordinate"]) == T + 1
        assert np.array_equal(constants["t"], file["t-coordinate"][:T][::3])
        assert np.array_equal(constants["x"], file["x-coordinate"][::2])
        assert np.array_equal(constants["y"], file["y-coordinate"][::2])
    assert set(constants) == {"t", "x", "y"}


def test_darcy_has_no_time_coordinate_and_its_coefficient_no_time(tmp_path: Path) -> None:
    with open_source(write_darcy(tmp_path / "a.h5"), task=get_task("darcy2d")) as source:
        assert set(source.info.constants) == {"x", "y"}
        assert source.info.arrays["fields"].dims == ("time", "y", "x", "channel")
        assert source.info.arrays["coefficient"].dims == ("y", "x")
        assert source.info.arrays["coefficient"].shape == (Y, X)


def test_navier_stokes_has_time_of_one_sample_and_force_components(tmp_path: Path) -> None:
    with open_source(write_navier_stokes(tmp_path / "a.h5")) as source:
        assert source.info.constants["t"].shape == (T,)
        assert source.info.arrays["force"].dims == ("y", "x", "component")
        assert source.info.channels == ("Vx", "Vy", "particles")


@pytest.mark.parametrize(
    ("write_file", "parameters"),
    [
        (write_scalar_1d, {"nu": 0.01}),
        (write_reacdiff, {"nu": 0.5, "rho": 1.0}),
        (write_cfd2d, {"eta": 0.01, "zeta": 0.01, "mach": 0.1}),
        (write_converted, {"nu": 0.02}),
        (write_navier_stokes, {}),
    ],
)
def test_parameters_are_root_attributes_in_lower_case(write_file, parameters, tmp_path: Path) -> None:
    with open_source(write_file(tmp_path / "a.h5")) as source:
        assert source.info.parameters == parameters


def test_boundary_comes_from_task_and_file_name(tmp_path: Path) -> None:
    path = write_cfd1d(tmp_path / "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5")
    with open_source(path, task=get_task("cfd1d")) as source:
        assert source.info.boundary == {"x": "outflow"}
    with open_source(path) as source:
        assert source.info.boundary == {}


def test_groups_are_sorted_as_text(tmp_path: Path) -> None:
    path = edited(write_diffsorp(tmp_path / "a.h5"), lambda file: file.move("0001", "00005"))
    with open_source(path) as source, h5py.File(path) as file:
        assert np.array_equal(source.read([1])["fields"][0], file["00005/data"][...])


@pytest.mark.parametrize(
    ("shape", "coordinates", "ndim", "channels"),
    [
        ((2, T, X), {}, 1, ("u",)),
        ((2, T, X, 1), {}, 1, ("u",)),
        ((2, T, X, 3), {}, 1, ("u0", "u1", "u2")),
        ((2, T, Y, X), {"x": X, "y": Y}, 2, ("u",)),
        ((2, T, Y, X, 2), {"t": T}, 2, ("u0", "u1")),
        ((2, T, 4, Y, X, 2), {}, 3, ("u0", "u1")),
    ],
)
def test_converted_file_without_task_is_guessed_from_rank_and_coordinates(
    shape, coordinates, ndim, channels, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "a.h5",
        {"data": values("data", shape)} | {name: coordinate(n) for name, n in coordinates.items()},
    )
    with open_source(path) as source:
        assert source.info.channels == channels
        assert source.info.arrays["fields"].dims == ("time", *"zyx"[-ndim:], "channel")
        assert set(source.info.constants) == set(coordinates)


def test_converted_file_takes_channel_names_of_its_task(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {"data": values("data", (2, T, Y, X, 2))})
    with open_source(path, task=get_task("diffreact2d")) as source:
        assert source.info.channels == ("u", "v")


def test_float16_file_is_read_as_float16(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {"data": values("data", (2, T, X), "<f2")})
    with open_source(path) as source:
        assert source.read([0])["fields"].dtype == np.float16


# --- selections ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, True, "2"])
@pytest.mark.parametrize("name", ["reduce_space", "reduce_time"])
def test_selection_rejects_what_is_no_positive_whole_number(name: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=f"data.{name}") as caught:
        Selection(**{name: bad})
    assert caught.value.kind == "bad_reduction"


# --- files that can't be opened -----------------------------------------------------------------------


def test_missing_file_and_folder_are_no_files(tmp_path: Path) -> None:
    error = error_of(tmp_path / "none.hdf5")
    assert (error.kind, error.exit_code) == ("missing_file", 3)
    error = error_of(tmp_path)
    assert (error.kind, error.found) == ("not_hdf5", "a folder")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"PK\x03\x04 a zip archive", "bytes 50 4b 03 04"),
        (b"", "an empty file"),
        (b"\x89HD", "bytes 89 48 44"),
    ],
)
def test_other_file_is_not_hdf5(content: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    path.write_bytes(content)
    error = error_of(path)
    assert error.kind == "not_hdf5"
    assert error.found.startswith(found)


@pytest.mark.parametrize("share", [0.02, 0.99])
def test_truncated_file_is_called_so(share: float, tmp_path: Path) -> None:
    path = write_scalar_1d(tmp_path / "a.h5")
    size = int(path.stat().st_size * share)
    os.truncate(path, size)
    error = error_of(path)
    assert (error.kind, error.found) == ("truncated", f"{size} bytes")


def test_damaged_superblock_is_unreadable(tmp_path: Path) -> None:
    path = write_scalar_1d(tmp_path / "a.h5")
    content = bytearray(path.read_bytes())
    content[8] = 99  # version of the superblock
    path.write_bytes(b"a user block".ljust(512, b" ") + content)
    assert error_of(path).kind == "unreadable"


def test_file_without_permission_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_scalar_1d(tmp_path / "a.h5")

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(h5py, "File", refuse)
    assert error_of(path).kind == "unreadable"


def test_file_that_is_being_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    code = (
        f"import h5py, sys; f = h5py.File({str(path)!r}, 'w'); f['tensor'] = [1.0]; f.flush();"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        error = error_of(path)
        assert writer.stdin is not None
        writer.stdin.close()
    assert error.kind == "being_written"


def test_file_system_without_locks_is_read_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_scalar_1d(tmp_path / "a.h5")
    opened = []
    real_file = h5py.File

    def without_locks(name: Path, mode: str, **options: object) -> h5py.File:
        opened.append(options)
        if options.get("locking") is not False:
            raise OSError("Unable to open file (unable to lock file, errno = 37, 'No locks available')")
        return real_file(name, mode, **options)

    monkeypatch.setattr(h5py, "File", without_locks)
    with open_source(path) as source:
        assert source.read([0])["fields"].shape == (1, T, X, 1)
    assert opened == [{}, {"locking": False}]


# --- contents that don't fit --------------------------------------------------------------------------


def test_unknown_layout_lists_what_the_file_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {f"group/array{i:02d}": np.zeros(2) for i in range(20)})
    error = error_of(path)
    assert error.kind == "unknown_layout"
    assert error.found.startswith("group/array00 (2,), group/array01 (2,)")
    assert error.found.endswith("...")


@pytest.mark.parametrize(
    ("write_file", "name"),
    [
        (write_cfd1d, "density"),
        (write_darcy, "nu"),
        (write_navier_stokes, "force"),
    ],
)
def test_missing_dataset_is_named_beside_what_is_there(write_file, name: str, tmp_path: Path) -> None:
    path = edited(write_file(tmp_path / "a.h5"), lambda file: file.__delitem__(name))
    error = error_of(path)
    assert (error.kind, error.dataset) == ("missing_dataset", name)
    assert error.found
    assert name not in error.found.split()


GROUPS = "(time, x, 1), (time, x, y, 1) or (time, y, x, 2)"
FLOATS = "float16, float32 or float64"


@pytest.mark.parametrize(
    ("shapes", "kind", "dataset", "expected"),
    [
        ({"tensor": (5, X)}, "wrong_rank", "tensor", "(sample, time, x)"),
        ({"tensor": (5, 1, X, Y), "nu": (5, X)}, "wrong_rank", "nu", "(sample, x, y)"),
        ({"data": (5, T)}, "wrong_rank", "data", "(sample, time, x, channel)"),
        ({"0000/data": (T, X)}, "wrong_rank", "0000/data", GROUPS),
        ({"tensor": (2, T, X), "dtype": "<i4"}, "wrong_dtype", "tensor", FLOATS),
        ({"tensor": (2, T, X), "dtype": np.longdouble}, "wrong_dtype", "tensor", FLOATS),
        ({"tensor": (0, T, X)}, "no_samples", "tensor", ">= 1"),
        ({"tensor": (2, 0, X)}, "empty_axis", "tensor", ">= 1"),
        (
            {"density": (5, T, X), "pressure": (5, T - 1, X), "Vx": (5, T, X)},
            "shapes_differ",
            "pressure",
            T,
        ),
        ({"tensor": (5, T, X), "x-coordinate": (X + 1,)}, "wrong_length", "x-coordinate", X),
        ({"tensor": (5, T, X), "t-coordinate": (T + 2,)}, "wrong_length", "t-coordinate", T),
    ],
)
def test_datasets_that_do_not_fit_are_refused(
    shapes: dict[str, Any], kind: str, dataset: str, expected: object, tmp_path: Path
) -> None:
    dtype = shapes.get("dtype", "f4")
    arrays = {name: np.zeros(shape, dtype) for name, shape in shapes.items() if name != "dtype"}
    error = error_of(write(tmp_path / "a.h5", arrays))
    assert (error.kind, error.dataset, error.expected) == (kind, dataset, expected)


def test_times_that_differ_unfinished_simulations_and_parameters_in_words_are_refused(tmp_path: Path) -> None:
    def shift(file: h5py.File) -> None:
        file["t"][2] += 1

    error = error_of(edited(write_navier_stokes(tmp_path / "a.h5"), shift))
    assert (error.kind, error.sample, error.dataset) == ("grids_differ", 2, "t")
    error = error_of(write_navier_stokes(tmp_path / "b.h5", latest_index=2))
    assert (error.kind, error.expected, error.found) == ("incomplete", f"{T} frames", "3 written")
    error = error_of(write_scalar_1d(tmp_path / "c.h5", attrs={"Nu": "0.01"}))
    assert error.kind == "bad_parameter"


@pytest.mark.parametrize(
    ("write_file", "task", "what"),
    [
        (write_cfd2d, "cfd1d", "number of spatial axes"),
        (write_cfd2d, "navier_stokes2d", "channels"),
        (write_scalar_1d, "advection1d", "parameters"),
        (write_converted_2d, "darcy2d", "number of frames"),
    ],
)
def test_file_of_another_task_is_refused(write_file, task: str, what: str, tmp_path: Path) -> None:
    error = error_of(write_file(tmp_path / "a.h5"), task=get_task(task))
    assert error.kind == "task_mismatch"
    assert f"by its {what}" in str(error)


# --- reading that fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, 5])
def test_sample_out_of_range_is_refused(index: int, tmp_path: Path) -> None:
    with open_source(write_scalar_1d(tmp_path / "a.h5")) as source, pytest.raises(SourceError) as caught:
        source.read([0, index])
    assert (caught.value.kind, caught.value.sample) == ("no_such_sample", index)


def test_read_of_closed_source_is_refused(tmp_path: Path) -> None:
    source = open_source(write_scalar_1d(tmp_path / "a.h5"))
    source.close()
    source.close()
    with pytest.raises(StoreClosedError):
        source.read([0])


def test_damaged_chunk_names_dataset_and_samples(tmp_path: Path) -> None:
    path = write_converted(tmp_path / "a.h5")
    with h5py.File(path) as file:
        chunk = file["data"].id.get_chunk_info_by_coord((2, 0, 0, 0))
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)
    with open_source(path) as source:
        assert source.read([0, 1])["fields"].shape[0] == 2
        with pytest.raises(SourceError) as caught:
            source.read([2, 3])
    error = caught.value
    assert (error.kind, error.dataset, error.sample) == ("read_failed", "data", 2)
    assert "can't read samples 2..3 of dataset 'data'" in str(error)


def test_failed_open_leaves_the_file_closed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {"tensor": np.zeros((2, X), "f4")})
    error_of(path)
    with h5py.File(path, "w") as file:  # HDF5 refuses this while the file is open
        assert not list(file)


def test_sample_with_another_grid_is_refused_when_it_is_read(tmp_path: Path) -> None:
    def shift(file: h5py.File) -> None:
        file["0003/grid/x"][1] = 77.0

    with open_source(edited(write_diffreact(tmp_path / "a.h5"), shift)) as source:
        source.read([0, 1, 2, 4])
        with pytest.raises(SourceError) as caught:
            source.read([3])
    error = caught.value
    assert (error.kind, error.sample, error.dataset) == ("grids_differ", 3, "0003/grid/x")
    assert (error.expected.split()[1:], error.found) == (["at", "index", "1"], "77.0")


def test_sample_of_another_shape_is_refused_when_it_is_read(tmp_path: Path) -> None:
    def shorten(file: h5py.File) -> None:
        data = file["0003/data"][...]
        del file["0003/data"]
        file["0003/data"] = data[:-1]

    path = edited(write_diffsorp(tmp_path / "a.h5"), shorten)
    with open_source(path) as source, pytest.raises(SourceError) as caught:
        source.read(range(5))
    assert (caught.value.kind, caught.value.sample) == ("shapes_differ", 3)


# --- files of one store -------------------------------------------------------------------------------


def info_of(path: Path, *, task: str | None = None):
    with open_source(path, task=TASKS[task] if task else None) as source:
        return source.info


def test_files_that_differ_in_parameter_values_and_number_of_samples_share_a_grid(tmp_path: Path) -> None:
    one = info_of(write_scalar_1d(tmp_path / "a.h5"))
    other = info_of(write_scalar_1d(tmp_path / "b.h5", Size(3), attrs={"Nu": 4.0}))
    check_same_grid([one, other])
    check_same_grid([one])
    check_same_grid([])


def _different_x(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        file["x-coordinate"][2] = 9.0

    return edited(write_scalar_1d(path), change)


def _without_x(path: Path) -> Path:
    return edited(write_scalar_1d(path), lambda file: file.__delitem__("x-coordinate"))


def _another_length(path: Path) -> Path:
    return write(path, {"tensor": values("t", (2, T, X - 1)), "x-coordinate": coordinate(X - 1)}, {"Nu": 1.0})


def _without_parameter(path: Path) -> Path:
    return write_scalar_1d(path, attrs={})


@pytest.mark.parametrize(
    ("write_other", "what", "found"),
    [
        (_different_x, "coordinate 'x' isn't", "9.0"),
        (_without_x, "coordinate 'x' isn't", "none"),
        (_another_length, "array 'fields' isn't", None),
        (_without_parameter, "parameters isn't", []),
        (write_converted, "layout isn't", ("converted", 1)),
    ],
)
def test_files_that_can_not_make_one_store_are_both_named(write_other, what, found, tmp_path: Path) -> None:
    one, other = write_scalar_1d(tmp_path / "one.h5"), write_other(tmp_path / "other.h5")
    with pytest.raises(SourceError) as caught:
        check_same_grid([info_of(one), info_of(one), info_of(other)])
    error = caught.value
    assert error.kind == "grids_differ"
    assert error.path == str(other)
    assert str(one) in str(error)
    assert what in str(error)
    assert found is None or error.found == found


def test_coordinates_of_other_length_are_shown_by_length_and_ends(tmp_path: Path) -> None:
    data = {"data": values("data", (2, T, X))}
    one = write(tmp_path / "one.h5", data | {"x": coordinate(X)})
    other = write(tmp_path / "other.h5", data | {"x": coordinate(X).astype("f8")})
    with pytest.raises(SourceError) as caught:
        check_same_grid([info_of(one), info_of(other)])
    assert caught.value.expected == f"{X} float32 values 0.0..1.0"
    assert caught.value.found == f"{X} float64 values 0.0..1.0"


def test_periodic_and_outflow_files_can_not_make_one_store(tmp_path: Path) -> None:
    names = [
        "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_periodic_Train.hdf5",
        "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5",
    ]
    infos = [info_of(write_cfd1d(tmp_path / name), task="cfd1d") for name in names]
    with pytest.raises(SourceError, match="boundary isn't") as caught:
        check_same_grid(infos)
    assert caught.value.found == {"x": "outflow"}


def test_ingest_imports_neither_torch_nor_zarr_nor_pydantic() -> None:
    code = (
        "import sys; import ups_store.sources.source, ups_store.sources.source_files;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'zarr', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
