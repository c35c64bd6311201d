"""The layout of The Well: what is read is what h5py reads, and what makes no sense is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from pdebench_files import T, X, Y, coordinate, edited, values
from well_files import (
    CHANNELS_2D,
    add_boundary,
    add_field,
    add_scalar,
    ends,
    read_well_2d,
    read_well_3d,
    start_file,
    write_well_2d,
    write_well_3d,
)

from ups_store.errors import SourceError
from ups_store.sources.contents import Selection, SourceInfo, check_same_grid
from ups_store.sources.source import open_source
from ups_store.sources.tasks import Task, get_task

MATTER = get_task("active_matter")


def info_of(path: Path, *, task: Task | None = None) -> SourceInfo:
    with open_source(path, task=task) as source:
        return source.info


def error_of(path: Path, *, task: Task | None = None) -> SourceError:
    with pytest.raises(SourceError) as caught:
        info_of(path, task=task)
    assert caught.value.path == str(path)
    return caught.value


# --- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", [Selection(), Selection(reduce_space=2, reduce_time=3)], ids=str)
def test_well_file_is_read_as_h5py_reads_it(selection: Selection, tmp_path: Path) -> None:
    path = write_well_2d(tmp_path / "a.hdf5")
    with h5py.File(path) as file:
        expected = read_well_2d(file)
    with open_source(path, task=MATTER, selection=selection) as source:
        found = source.read([2, 0, 1])
        info = source.info
    assert found.keys() == expected.keys() == info.arrays.keys()
    for name, array in expected.items():
        dims = ("sample", *info.arrays[name].dims)
        letters = {"time": "t", "y": "y", "x": "x"}
        steps = [slice(None, None, selection.step(letters.get(dim, ""))) for dim in dims]
        np.testing.assert_array_equal(found[name], array[tuple(steps)][[2, 0, 1]], err_msg=name)
        assert found[name].dtype == info.arrays[name].dtype == array.dtype, name


def test_well_file_of_three_axes_is_read_as_h5py_reads_it(tmp_path: Path) -> None:
    path = write_well_3d(tmp_path / "a.hdf5")
    with h5py.File(path) as file:
        expected = read_well_3d(file)["fields"]
    with open_source(path, task=get_task("MHD_64")) as source:
        np.testing.assert_array_equal(source.read([0, 1])["fields"], expected)
        assert source.info.channels == ("rho", "v_x", "v_y", "v_z")
        assert source.info.arrays["fields"].dims == ("time", "z", "y", "x", "channel")


def test_file_says_what_it_holds(tmp_path: Path) -> None:
    info = info_of(write_well_2d(tmp_path / "a.hdf5"), task=MATTER)
    assert (info.layout, info.layout_version, info.num_samples) == ("the-well", 1, 3)
    assert info.channels == CHANNELS_2D
    assert info.boundary == {"x": "periodic", "y": "wall_open"}
    assert info.parameters == {"alpha": -1.0, "Nu": 2.0}
    assert info.arrays["gravity"].dims == ("y", "x", "component")
    assert info.arrays["stress"].dims == ("y", "x", "component", "column")
    assert info.arrays["gain"].dims == ("time",)
    assert info.arrays["seed"].dims == ()
    assert info.attrs == {
        "dataset_name": "small",
        "grid_type": "cartesian",
        "axis_names": {"x": "x", "y": "y"},
    }
    np.testing.assert_array_equal(info.constants["y"], coordinate(Y, start=1.0))
    np.testing.assert_array_equal(info.constants["t"], coordinate(T))


def test_dimensions_are_x_and_y_whatever_the_file_calls_them(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with start_file(path, num_samples=1, dims=("theta", "phi"), attrs={"grid_type": b"sphere"}) as file:
        add_field(file, 1, "velocity", values("v", (1, T, X, Y, 2)), varies="st", space=(True, True))
        file["dimensions"].attrs["spatial_dims"] = np.array([b"theta", b"phi"])
        file["dimensions/phi"][...] = np.arange(Y)
    info = info_of(path)
    assert info.channels == ("velocity_theta", "velocity_phi")
    assert info.attrs["axis_names"] == {"x": "theta", "y": "phi"}
    assert info.attrs["grid_type"] == "sphere"
    np.testing.assert_array_equal(info.constants["y"], np.arange(Y))


def _simple(path: Path, *, num_samples: int = 2) -> Path:
    """One scalar field that varies with everything."""
    with start_file(path, num_samples=num_samples, dims=("x", "y"), attrs={}) as file:
        data = values("u", (num_samples, T, X, Y))
        add_field(file, 0, "u", data, varies="st", space=(True, True))
    return path


def test_file_without_scalars_and_boundaries_has_open_faces_and_no_parameters(tmp_path: Path) -> None:
    info = info_of(_simple(tmp_path / "a.hdf5"))
    assert (info.parameters, info.boundary) == ({}, {"x": "open", "y": "open"})


def test_task_of_a_configuration_decides_over_the_boundaries_of_the_file(tmp_path: Path) -> None:
    task = Task(name="mine", ndim=2, channels=(), boundary={"y": "slip"}, test_part="last", steady=None)
    assert info_of(_simple(tmp_path / "a.hdf5"), task=task).boundary == {"x": "open", "y": "slip"}


def test_type_of_a_boundary_may_be_bytes_and_in_capitals(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        add_boundary(file, "sides", "", ["x"], ends(X))
        file["boundary_conditions/sides"].attrs["bc_type"] = np.bytes_("PERIODIC")

    assert info_of(edited(_simple(tmp_path / "a.hdf5"), add)).boundary["x"] == "periodic"


def test_wall_that_covers_a_part_of_a_face_is_none(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        mask = np.zeros((2, X, Y), bool)
        mask[:, 0, :] = True
        mask[1, 0, 2] = False  # a gap in one sample
        mask[:, :, -1] = True
        add_boundary(file, "wall", "wall", ["x", "y"], mask, varies="s")
        add_boundary(file, "window", "periodic", ["x"], ends(X, first=False))

    info = info_of(edited(_simple(tmp_path / "a.hdf5"), add))
    assert info.boundary == {"x": "open_periodic", "y": "open_wall"}
    assert info.arrays["bc_wall"].shape == (Y, X)


def test_time_that_differs_between_samples_is_an_array(tmp_path: Path) -> None:
    times = np.stack([coordinate(T), coordinate(T) * 2])

    def change(file: h5py.File) -> None:
        del file["dimensions/time"]
        file["dimensions/time"] = times
        file["dimensions/time"].attrs["sample_varying"] = True

    with open_source(edited(_simple(tmp_path / "a.hdf5"), change), selection=Selection(1, 2)) as source:
        assert "t" not in source.info.constants
        np.testing.assert_array_equal(source.read([1, 0])["t"], times[[1, 0], ::2])


def test_axis_along_which_no_field_varies_is_as_long_as_its_coordinate(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with start_file(path, num_samples=2, dims=("x", "y"), attrs={}) as file:
        add_field(file, 0, "u", values("u", (2, T, X)), varies="st", space=(True, False))
    with open_source(path) as source:
        fields = source.read([0, 1])["fields"]
    np.testing.assert_array_equal(
        fields, np.broadcast_to(values("u", (2, T, X))[:, :, None, :, None], (2, T, Y, X, 1))
    )


# --- files of one set ---------------------------------------------------------------------------------


def test_files_with_other_parameters_make_one_store(tmp_path: Path) -> None:
    infos = [
        info_of(write_well_2d(tmp_path / f"{i}.hdf5", parameters={"Nu": float(i)}, num_samples=i))
        for i in (1, 2)
    ]
    check_same_grid(infos)
    assert [info.parameters["Nu"] for info in infos] == [1.0, 2.0]


# --- what is refused ----------------------------------------------------------------------------------


def _set(path: str, attribute: str, value: object) -> Callable[[h5py.File], None]:
    return lambda file: file[path].attrs.__setitem__(attribute, value)


def _put(path: str, data: np.ndarray) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        attrs = dict(file[path].attrs)
        del file[path]
        file[path] = data
        file[path].attrs.update(attrs)

    return change


def _bound(kind: str, dims: list[str]) -> Callable[[h5py.File], None]:
    return lambda file: add_boundary(file, "odd", kind, dims, ends(X))


U = "t0_fields/u"
ODD = "boundary_conditions/odd"
TRUE_OR_FALSE = "2 times true or false"
VECTOR = values("B", (2, T, X, Y, 3))


@pytest.mark.parametrize(
    ("change", "kind", "dataset", "expected"),
    [
        (lambda file: file.__delitem__("dimensions"), "missing_dataset", "dimensions", None),
        (lambda file: file.__delitem__("dimensions/time"), "missing_dataset", "dimensions/time", None),
        (lambda file: file.__delitem__(U), "missing_dataset", U, None),
        (lambda file: file[U].attrs.__delitem__("dim_varying"), "missing_attribute", U, None),
        (lambda file: file[U].attrs.__delitem__("sample_varying"), "missing_attribute", U, None),
        (_set(U, "time_varying", False), "missing_dataset", "t0_fields", None),  # no field varies
        (_set(U, "dim_varying", [True]), "bad_attribute", U, TRUE_OR_FALSE),
        (_set(U, "dim_varying", ["a", "b"]), "bad_attribute", U, TRUE_OR_FALSE),
        (_put(U, values("u", (2, T, X))), "wrong_rank", U, "(sample, time, x, y)"),
        (
            lambda file: add_field(file, 1, "B", VECTOR, varies="st", space=(True, True)),
            "shapes_differ",
            "t1_fields/B",
            "2, x, y",
        ),
        (_set("/", "n_trajectories", 5), "shapes_differ", U, "5, by attribute 'n_trajectories'"),
        (_set("dimensions", "spatial_dims", ["x", "y", "z", "w"]), "wrong_rank", "dimensions", "1 to 3"),
        (_set("dimensions/x", "time_varying", True), "unsupported", "dimensions/x", "a grid that stays"),
        (
            _put("dimensions/x", np.stack([coordinate(X), coordinate(X) + 1])),
            "grids_differ",
            "dimensions/x",
            None,
        ),
        (_bound("", ["x"]), "bad_attribute", ODD, "bc_type, and associated_dims among x, y"),
        (_bound("wall", ["r"]), "bad_attribute", ODD, "bc_type, and associated_dims among x, y"),
        (_bound("wall", ["x", "y"]), "wrong_rank", f"{ODD}/mask", "(x, y)"),
        (
            lambda file: add_boundary(file, "odd", "wall", ["x"], np.ones((X, Y), bool)),
            "wrong_rank",
            f"{ODD}/mask",
            "1 axes",
        ),
        (lambda file: add_scalar(file, "fields", 1.0), "name_clash", None, None),
        (lambda file: add_scalar(file, "a", np.ones(3)), "bad_parameter", "scalars/a", "one number"),
    ],
)
def test_file_that_makes_no_sense_is_refused(
    change: Callable[[h5py.File], None], kind: str, dataset: str, expected: str, tmp_path: Path
) -> None:
    error = error_of(edited(_simple(tmp_path / "a.hdf5"), change))
    assert (error.kind, error.dataset, error.expected) == (kind, dataset, expected)
