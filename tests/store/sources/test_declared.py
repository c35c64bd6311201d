"""Files of users' own, read as a configuration declares them; what is missing is named with its key."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from declared_files import EXAMPLES, FOURIER, RUNS, Example, N, declared_task, write_fourier, write_runs
from pdebench_files import T, X, Y, coordinate, edited, values

from ups_store.errors import SourceError
from ups_store.sources.contents import Selection, SourceInfo
from ups_store.sources.conventions import Declared, recognise
from ups_store.sources.source import open_source

STEPS = {"time": "t", "z": "z", "y": "y", "x": "x"}


def info_of(path: Path, layout: dict[str, Any], **keys: Any) -> SourceInfo:
    with open_source(path, task=declared_task(layout, **keys)) as source:
        return source.info


def error_of(path: Path, layout: dict[str, Any]) -> SourceError:
    with pytest.raises(SourceError) as caught:
        info_of(path, layout)
    assert caught.value.path == str(path)
    return caught.value


def with_keys(example: Example, **keys: Any) -> dict[str, Any]:
    return {**copy.deepcopy(example.layout), **keys}


# --- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", [Selection(), Selection(reduce_space=3, reduce_time=2)], ids=str)
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_file_is_read_as_h5py_reads_it(example: Example, selection: Selection, tmp_path: Path) -> None:
    path = example.write(tmp_path / "a.h5")
    with h5py.File(path) as file:
        expected = example.read(file)
    with open_source(path, task=declared_task(example.layout), selection=selection) as source:
        info, order = source.info, list(range(source.info.num_samples))[::-1]
        found = source.read(order)
    assert (info.layout, info.channels) == ("declared", example.channels)
    assert found.keys() == expected.keys() == info.arrays.keys()
    for name, array in expected.items():
        steps = [slice(None)] + [
            slice(None, None, selection.step(STEPS.get(d, ""))) for d in info.arrays[name].dims
        ]
        np.testing.assert_array_equal(found[name], array[tuple(steps)][order], err_msg=name)
        assert found[name].dtype == info.arrays[name].dtype, name
        assert found[name].dtype.kind == "f", name


def test_coordinates_are_datasets_or_steps(tmp_path: Path) -> None:
    path, task = write_fourier(tmp_path / "a.h5"), declared_task(FOURIER.layout)
    with open_source(path, task=task, selection=Selection(reduce_space=2, reduce_time=3)) as source:
        constants = source.info.constants
    np.testing.assert_array_equal(constants["x"], coordinate(X)[::2])
    np.testing.assert_array_equal(constants["y"], coordinate(Y, start=2.0)[::2])
    np.testing.assert_array_equal(constants["t"], (1.0 + 0.5 * np.arange(T))[::3])
    assert constants["t"].dtype == np.float64


def test_parameters_of_the_file_are_numbers(tmp_path: Path) -> None:
    layout = with_keys(
        FOURIER, parameters={"nu": {"attribute": "viscosity"}, "beta": {"file_name": r"beta(-?[\d.]+)_"}}
    )
    assert info_of(write_fourier(tmp_path / "a_beta-0.5_b.h5"), layout).parameters == {
        "nu": 0.25,
        "beta": -0.5,
    }
    assert info_of(write_runs(tmp_path / "a.h5"), RUNS.layout).parameters == {"gravity": 9.81}


def test_attribute_may_be_of_a_dataset(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        file["sol"].attrs["scale"] = np.array([3], "i4")

    layout = with_keys(FOURIER, parameters={"scale": {"attribute": "scale", "of": "sol"}})
    assert info_of(edited(write_fourier(tmp_path / "a.h5"), add), layout).parameters == {"scale": 3.0}


def test_spelling_of_attributes_is_that_of_the_file(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        file.attrs.update({"Nu": 1.0, "nu": 2.0})

    layout = with_keys(FOURIER, parameters={"a": {"attribute": "Nu"}, "b": {"attribute": "nu"}})
    path = edited(write_fourier(tmp_path / "a.h5"), add)
    assert info_of(path, layout).parameters == {"a": 1.0, "b": 2.0}


def test_boundary_is_what_the_configuration_says(tmp_path: Path) -> None:
    path = write_fourier(tmp_path / "a.h5")
    assert info_of(path, FOURIER.layout, boundary={"x": "wall"}).boundary == {"x": "wall"}
    assert info_of(path, FOURIER.layout).boundary == {}


def test_every_file_of_a_declared_task_is_meant_to_be_as_declared(tmp_path: Path) -> None:
    task = declared_task(FOURIER.layout)
    with h5py.File(write_runs(tmp_path / "a.h5")) as file:
        layout = recognise(file, task)
        assert isinstance(layout, Declared)
        assert layout.matches(file)


def test_layout_that_content_suggests_gives_way_to_the_declared_one(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["tensor"] = values("tensor", (N, X, T))  # PDEBench has time before x
    layout = {"fields": [{"dataset": "tensor", "axes": "sample x time"}]}
    with open_source(path, task=declared_task(layout)) as source:
        assert source.info.arrays["fields"].shape == (T, X, 1)


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dataset", "key"),
    [
        ("sol", "sol", "fields[0].dataset"),
        ("coeff", "coeff", "arrays.coefficient.dataset"),
        ("mesh/y", "mesh/y", "coordinates.y"),
        ("re", "re", "parameters.re.dataset"),
    ],
)
def test_missing_dataset_is_named_with_the_key_and_the_tree(
    name: str, dataset: str, key: str, tmp_path: Path
) -> None:
    path = edited(write_fourier(tmp_path / "a.h5"), lambda file: file.__delitem__(name))
    error = error_of(path, FOURIER.layout)
    assert (error.kind, error.dataset) == ("missing_dataset", dataset)
    assert f"no dataset {dataset!r}, which tasks.flow.layout.{key} asks for" in str(error)
    assert f"tags ({N}, 3)" in str(error.found)


def test_misspelled_dataset_suggests_the_nearest(tmp_path: Path) -> None:
    layout = with_keys(FOURIER, coordinates={"x": "mesh/X"})
    assert error_of(write_fourier(tmp_path / "a.h5"), layout).hint == "did you mean 'mesh/x'?"
    layout = with_keys(RUNS, fields=[{"dataset": "stat", "axes": "time channel x"}])
    error = error_of(write_runs(tmp_path / "b.h5"), layout)
    assert (error.dataset, error.hint) == ("runs/run_1/stat", "did you mean 'runs/run_1/state'?")


def test_group_in_place_of_a_dataset_is_a_missing_dataset(tmp_path: Path) -> None:
    layout = with_keys(FOURIER, coordinates={"x": "mesh"})
    assert error_of(write_fourier(tmp_path / "a.h5"), layout).kind == "missing_dataset"


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        (
            {"fields": [{"dataset": "sol", "axes": "sample x time"}]},
            "fields[0].axes",
            "(sample, x, time)",
        ),
        ({"arrays": {"c": {"dataset": "coeff", "axes": "x y"}}}, "arrays.c.axes", "(x, y)"),
        ({"coordinates": {"x": "sol"}}, "coordinates.x", "(x)"),
    ],
)
def test_wrong_rank_names_the_key(keys: dict[str, Any], key: str, expected: str, tmp_path: Path) -> None:
    layout = with_keys(FOURIER, arrays={}, coordinates={}) | keys
    error = error_of(write_fourier(tmp_path / "a.h5"), layout)
    assert (error.kind, error.expected) == ("wrong_rank", expected)
    assert f"tasks.flow.layout.{key} says" in str(error)


@pytest.mark.parametrize("pattern", ["case_*", "runs/case_*", "runs/run_1/*/x", "run_*"])
def test_groups_that_match_nothing_are_refused(pattern: str, tmp_path: Path) -> None:
    error = error_of(write_runs(tmp_path / "a.h5"), with_keys(RUNS, groups=pattern))
    assert (error.kind, error.dataset) == ("missing_group", pattern)
    assert "which tasks.flow.layout.groups asks for" in str(error)
    assert "runs/run_1/state" in str(error.found)


def test_wrong_number_of_channel_names_is_refused(tmp_path: Path) -> None:
    fields = [{"dataset": "state", "axes": "time channel x", "channels": ["h", "q", "b"]}]
    error = error_of(write_runs(tmp_path / "a.h5"), with_keys(RUNS, fields=fields))
    assert (error.kind, error.found) == ("shapes_differ", "3: h, q, b")
    assert "tasks.flow.layout.fields[0].channels" in str(error)


def test_missing_attribute_is_named_beside_those_that_are_there(tmp_path: Path) -> None:
    layout = with_keys(FOURIER, parameters={"nu": {"attribute": "viscosty"}})
    error = error_of(write_fourier(tmp_path / "a.h5"), layout)
    assert (error.kind, error.found, error.hint) == (
        "missing_attribute",
        "viscosity",
        "did you mean 'viscosity'?",
    )
    assert "which tasks.flow.layout.parameters.nu.attribute asks for" in str(error)


def test_attribute_of_nothing_is_refused(tmp_path: Path) -> None:
    layout = with_keys(FOURIER, parameters={"nu": {"attribute": "nu", "of": "setup"}})
    error = error_of(write_fourier(tmp_path / "a.h5"), layout)
    assert (error.kind, error.dataset) == ("missing_dataset", "setup")


@pytest.mark.parametrize("value", ["high", [1.0, 2.0]])
def test_attribute_that_is_no_number_is_refused(value: object, tmp_path: Path) -> None:
    path = edited(write_fourier(tmp_path / "a.h5"), lambda file: file.attrs.__setitem__("viscosity", value))
    error = error_of(path, FOURIER.layout)
    assert (error.kind, error.expected) == ("bad_parameter", "one number")
    assert "parameters.nu.attribute" in str(error)


def test_parameter_of_several_values_in_a_group_is_refused(tmp_path: Path) -> None:
    layout = with_keys(RUNS, parameters={"a": {"dataset": "setup/start"}})
    error = error_of(write_runs(tmp_path / "a.h5"), layout)
    assert (error.kind, error.dataset, error.found) == (
        "bad_parameter",
        "runs/run_1/setup/start",
        f"shape ({X},)",
    )


@pytest.mark.parametrize("name", ["nothing.h5", "nu_.h5"])
def test_file_name_without_the_number_is_refused(name: str, tmp_path: Path) -> None:
    layout = with_keys(FOURIER, parameters={"nu": {"file_name": r"nu_([\d.]*)\."}})
    error = error_of(write_fourier(tmp_path / name), layout)
    assert (error.kind, error.found) == ("bad_parameter", name)
    assert "tasks.flow.layout.parameters.nu.file_name" in str(error)


def test_group_of_the_file_name_that_takes_no_part_is_refused(tmp_path: Path) -> None:
    layout = with_keys(FOURIER, parameters={"nu": {"file_name": r"a(\d)?"}})
    assert error_of(write_fourier(tmp_path / "a.h5"), layout).kind == "bad_parameter"


def test_numbers_that_are_not_one_for_each_sample_are_refused(tmp_path: Path) -> None:
    def shorten(file: h5py.File) -> None:
        del file["re"]
        file["re"] = np.arange(N - 1)

    error = error_of(edited(write_fourier(tmp_path / "a.h5"), shorten), FOURIER.layout)
    assert (error.kind, error.dataset, error.expected, error.found) == ("shapes_differ", "re", N, N - 1)


def test_swapped_axes_are_noticed_by_another_array(tmp_path: Path) -> None:
    layout = with_keys(FOURIER, arrays={"c": {"dataset": "coeff", "axes": "sample y x"}})
    assert error_of(write_fourier(tmp_path / "a.h5"), layout).kind == "shapes_differ"


def test_fields_of_no_floats_are_refused_and_marks_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["u"] = np.zeros((N, T, X), "f4")
        file["m"] = np.arange(N * X).reshape(N, X) % 2 == 0
        file["s"] = np.full((N, X), "a", "S1")
    fields = [{"dataset": "u", "axes": "sample time x"}]
    arrays = {"mask": {"dataset": "m", "axes": "sample x"}}
    with open_source(path, task=declared_task({"fields": fields, "arrays": arrays})) as source:
        assert source.read([0])["mask"].tolist() == [[1.0, 0.0] * (X // 2)]
    arrays["mask"]["dataset"] = "s"
    assert error_of(path, {"fields": fields, "arrays": arrays}).kind == "wrong_dtype"
    fields[0]["dataset"] = "m"
    fields[0]["axes"] = "sample x"
    assert error_of(path, {"fields": fields}).kind == "wrong_dtype"


def test_time_axis_of_length_one_is_no_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["u"] = np.zeros((N, 1, X), "f4")
    error = error_of(path, {"fields": [{"dataset": "u", "axes": "sample time x"}]})
    assert (error.kind, error.found) == ("task_mismatch", 1)


# --- groups that differ -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "kind", "dataset"),
    [
        (lambda run: run.attrs.__delitem__("nu"), "missing_attribute", "runs/run_10"),
        (lambda run: run.__delitem__("energy"), "missing_dataset", "runs/run_10/energy"),
        (lambda run: run.__delitem__("state"), "missing_dataset", "runs/run_10/state"),
        (lambda run: run["t"].__setitem__(2, 9.0), "grids_differ", "runs/run_10/t"),
    ],
    ids=["attribute", "number", "dataset", "grid"],
)
def test_sample_unlike_the_first_is_refused_when_it_is_read(
    edit: Callable[[h5py.Group], None], kind: str, dataset: str, tmp_path: Path
) -> None:
    path = edited(write_runs(tmp_path / "a.h5"), lambda file: edit(file["runs/run_10"]))
    with open_source(path, task=declared_task(RUNS.layout)) as source:
        source.read([0, 1, 3])
        with pytest.raises(SourceError) as caught:
            source.read([2])
    error = caught.value
    assert (error.kind, error.sample, error.dataset) == (kind, 2, dataset)


def test_only_declared_layouts_import_pydantic() -> None:
    code = "import sys; import ups_store.sources.source; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
