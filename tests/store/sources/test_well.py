"""The layout of The Well: what is read is what h5py reads, and what makes no sense is refused."""

from __future__ import annotations

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


def test_compressed_field_is_read_as_h5py_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with start_file(path, num_samples=3, dims=("x", "y"), attrs={}) as file:
        add_field(file, 2, "D", values("D", (3, T, X, Y, 2, 2)), varies="st", space=(True, True))
        attrs, data = dict(file["t2_fields/D"].attrs), file["t2_fields/D"][...]
        del file["t2_fields/D"]
        dataset = file["t2_fields"].create_dataset(
            "D", data=data, chunks=(2, 3, 4, 5, 1, 2), compression="gzip", shuffle=True
        )
        dataset.attrs.update(attrs)
    with open_source(path) as source:
        np.testing.assert_array_equal(
            source.read([0, 1, 2])["fields"], data.reshape(3, T, X, Y, 4).swapaxes(2, 3)
        )


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


def test_time_of_every_sample_that_is_the_same_is_a_coordinate(tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        del file["dimensions/time"]
        file["dimensions/time"] = np.tile(coordinate(T), (2, 1))

    info = info_of(edited(_simple(tmp_path / "a.hdf5"), change))
    np.testing.assert_array_equal(info.constants["t"], coordinate(T))


def test_axis_along_which_no_field_varies_is_as_long_as_its_coordinate(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with start_file(path, num_samples=2, dims=("x", "y"), attrs={}) as file:
        add_field(file, 0, "u", values("u", (2, T, X)), varies="st", space=(True, False))
    with open_source(path) as source:
        fields = source.read([0, 1])["fields"]
    np.testing.assert_array_equal(
        fields, np.broadcast_to(values("u", (2, T, X))[:, :, None, :, None], (2, T, Y, X, 1))
    )


def test_fields_without_a_list_are_taken_by_name(tmp_path: Path) -> None:
    def forget(file: h5py.File) -> None:
        add_field(file, 0, "a", values("a", (2, T, X, Y)), varies="st", space=(True, True))
        del file["t0_fields"].attrs["field_names"]

    assert info_of(edited(_simple(tmp_path / "a.hdf5"), forget)).channels == ("a", "u")


# --- files of one set ---------------------------------------------------------------------------------


def test_files_with_other_parameters_make_one_store(tmp_path: Path) -> None:
    infos = [
        info_of(write_well_2d(tmp_path / f"{i}.hdf5", parameters={"Nu": float(i)}, num_samples=i))
        for i in (1, 2)
    ]
    check_same_grid(infos)
    assert [info.parameters["Nu"] for info in infos] == [1.0, 2.0]


def test_files_with_other_grids_do_not(tmp_path: Path) -> None:
    def stretch(file: h5py.File) -> None:
        file["dimensions/x"][1] = 5.0

    infos = [info_of(_simple(tmp_path / "a.hdf5")), info_of(edited(_simple(tmp_path / "b.hdf5"), stretch))]
    with pytest.raises(SourceError, match="coordinate 'x' isn't") as caught:
        check_same_grid(infos)
    assert caught.value.kind == "grids_differ"


# --- what is refused ----------------------------------------------------------------------------------


def test_missing_group_is_named_beside_what_is_there(tmp_path: Path) -> None:
    error = error_of(edited(_simple(tmp_path / "a.hdf5"), lambda file: file.__delitem__("dimensions")))
    assert (error.kind, error.dataset) == ("missing_dataset", "dimensions")
    assert error.found == f"t0_fields/u (2, {T}, {X}, {Y})"


@pytest.mark.parametrize("name", ["dimensions/time", "dimensions/y", "t0_fields/u"])
def test_missing_dataset_is_named(name: str, tmp_path: Path) -> None:
    error = error_of(edited(_simple(tmp_path / "a.hdf5"), lambda file: file.__delitem__(name)))
    assert (error.kind, error.dataset) == ("missing_dataset", name)


def test_file_without_varying_fields_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with start_file(path, num_samples=1, dims=("x", "y"), attrs={}) as file:
        add_field(file, 0, "u", values("u", (1, X, Y)), varies="s", space=(True, True))
    error = error_of(path)
    assert error.kind == "missing_dataset"
    assert "no field varies in time" in str(error)


@pytest.mark.parametrize("attribute", ["sample_varying", "time_varying", "dim_varying"])
def test_field_that_does_not_say_how_it_varies_is_refused(attribute: str, tmp_path: Path) -> None:
    path = edited(_simple(tmp_path / "a.hdf5"), lambda file: file["t0_fields/u"].attrs.__delitem__(attribute))
    error = error_of(path)
    assert (error.kind, error.dataset) == ("missing_attribute", "t0_fields/u")
    assert attribute in str(error)


@pytest.mark.parametrize("value", [[True], [True, True, True], ["a", "b"], 0.5])
def test_axes_that_are_not_marked_true_or_false_each_are_refused(value: object, tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["t0_fields/u"].attrs["dim_varying"] = value

    error = error_of(edited(_simple(tmp_path / "a.hdf5"), change))
    assert (error.kind, error.expected) == ("bad_attribute", "2 times true or false")


@pytest.mark.parametrize("shape", [(2, T, X), (2, T, X, Y, 2)])
def test_field_of_another_rank_than_its_attributes_say_is_refused(shape, tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with start_file(path, num_samples=2, dims=("x", "y"), attrs={}) as file:
        add_field(file, 0, "u", values("u", shape), varies="st", space=(True, True))
    error = error_of(path)
    assert (error.kind, error.expected) == ("wrong_rank", "(sample, time, x, y)")


def test_tensor_of_another_rank_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with start_file(path, num_samples=2, dims=("x", "y"), attrs={}) as file:
        add_field(file, 2, "D", values("D", (2, T, X, Y)), varies="st", space=(True, True))
    error = error_of(path)
    assert (error.kind, error.expected) == ("wrong_rank", "(sample, time, x, y, channel, column)")


def test_vector_with_more_components_than_dimensions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with start_file(path, num_samples=2, dims=("x", "y"), attrs={}) as file:
        add_field(file, 1, "B", values("B", (2, T, X, Y, 3)), varies="st", space=(True, True))
    error = error_of(path)
    assert (error.kind, error.dataset, error.expected) == ("shapes_differ", "t1_fields/B", "2, x, y")


def test_zero_trajectories_are_refused(tmp_path: Path) -> None:
    error = error_of(_simple(tmp_path / "a.hdf5", num_samples=0))
    assert (error.kind, error.dataset) == ("no_samples", "t0_fields/u")


def test_fields_of_different_numbers_of_trajectories_are_refused(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        del file.attrs["n_trajectories"]
        add_field(file, 1, "v", values("v", (3, T, X, Y, 2)), varies="st", space=(True, True))

    error = error_of(edited(_simple(tmp_path / "a.hdf5"), add))
    assert (error.kind, error.expected, error.found) == ("shapes_differ", 2, 3)


def test_fewer_trajectories_than_the_file_says_are_refused(tmp_path: Path) -> None:
    path = edited(_simple(tmp_path / "a.hdf5"), lambda file: file.attrs.modify("n_trajectories", 5))
    error = error_of(path)
    assert (error.kind, error.expected, error.found) == (
        "shapes_differ",
        "5, by attribute 'n_trajectories'",
        "2",
    )


@pytest.mark.parametrize("dims", [[], ["x", "y", "z", "w"]])
def test_number_of_dimensions_is_one_to_three(dims: list[str], tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["dimensions"].attrs["spatial_dims"] = dims

    assert error_of(edited(_simple(tmp_path / "a.hdf5"), change)).kind == "wrong_rank"


def test_grid_that_moves_is_refused(tmp_path: Path) -> None:
    path = edited(
        _simple(tmp_path / "a.hdf5"), lambda file: file["dimensions/x"].attrs.modify("time_varying", True)
    )
    error = error_of(path)
    assert (error.kind, error.dataset) == ("unsupported", "dimensions/x")


def test_grid_that_differs_between_samples_is_refused(tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        del file["dimensions/x"]
        file["dimensions/x"] = np.stack([coordinate(X), coordinate(X) + 1])

    error = error_of(edited(_simple(tmp_path / "a.hdf5"), change))
    assert (error.kind, error.sample) == ("grids_differ", 1)


@pytest.mark.parametrize(
    ("kind", "dims"), [("", ["x"]), ("wall", []), ("wall", ["r"])], ids=["no type", "no axis", "unknown axis"]
)
def test_boundary_that_does_not_say_what_and_where_is_refused(
    kind: str, dims: list[str], tmp_path: Path
) -> None:
    path = edited(_simple(tmp_path / "a.hdf5"), lambda file: add_boundary(file, "odd", kind, dims, ends(X)))
    error = error_of(path)
    assert (error.kind, error.dataset) == ("bad_attribute", "boundary_conditions/odd")


def test_mask_of_another_rank_is_refused(tmp_path: Path) -> None:
    path = edited(
        _simple(tmp_path / "a.hdf5"), lambda file: add_boundary(file, "odd", "wall", ["x", "y"], ends(X))
    )
    error = error_of(path)
    assert (error.kind, error.dataset) == ("wrong_rank", "boundary_conditions/odd/mask")


@pytest.mark.parametrize("name", ["x", "fields"])
def test_scalar_that_is_called_like_something_else_is_refused(name: str, tmp_path: Path) -> None:
    path = edited(_simple(tmp_path / "a.hdf5"), lambda file: add_scalar(file, name, 1.0))
    error = error_of(path)
    assert error.kind == "name_clash"
    assert repr(name) in str(error)


def test_field_that_is_called_like_something_else_is_refused(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        add_field(file, 0, "fields", values("f", (X, Y)), varies="", space=(True, True))

    assert error_of(edited(_simple(tmp_path / "a.hdf5"), add)).kind == "name_clash"


def test_scalar_of_several_values_that_does_not_vary_is_refused(tmp_path: Path) -> None:
    path = edited(_simple(tmp_path / "a.hdf5"), lambda file: add_scalar(file, "a", np.ones(3)))
    error = error_of(path)
    assert (error.kind, error.dataset) == ("bad_parameter", "scalars/a")


def test_file_of_another_set_is_refused(tmp_path: Path) -> None:
    error = error_of(_simple(tmp_path / "a.hdf5"), task=get_task("MHD_64"))
    assert (error.kind, error.expected, error.found) == ("task_mismatch", 3, 2)
