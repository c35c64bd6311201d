"""Files of users' own, read as a configuration declares them; what is missing is named with its key."""

from __future__ import annotations

import copy
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


NO_CHANNELS = {"fields": [{"dataset": "state", "axes": "time channel x", "channels": ["h", "q", "b"]}]}


@pytest.mark.parametrize(
    ("example", "keys", "kind", "key", "found"),
    [
        (
            FOURIER,
            {"fields": [{"dataset": "sol", "axes": "sample x time"}]},
            "wrong_rank",
            "fields[0].axes",
            None,
        ),
        (FOURIER, {"coordinates": {"x": "sol"}}, "wrong_rank", "coordinates.x", None),
        (RUNS, NO_CHANNELS, "shapes_differ", "fields[0].channels", "3: h, q, b"),
        (RUNS, {"parameters": {"a": {"dataset": "setup/start"}}}, "bad_parameter", "", f"shape ({X},)"),
        (
            FOURIER,
            {"parameters": {"nu": {"attribute": "viscosty"}}},
            "missing_attribute",
            "parameters.nu.attribute",
            "viscosity",
        ),
        (
            FOURIER,
            {"parameters": {"nu": {"attribute": "name", "of": "sol"}}},
            "bad_parameter",
            "parameters.nu.attribute",
            "text 'u'",
        ),
        (
            FOURIER,
            {"parameters": {"nu": {"file_name": r"nu_([\d.]*)\."}}},
            "bad_parameter",
            "parameters.nu.file_name",
            "a.h5",
        ),
        (FOURIER, {"parameters": {"nu": {"file_name": r"a(\d)?"}}}, "bad_parameter", "", "a.h5"),
    ],
)
def test_what_does_not_fit_names_its_key(
    example: Example, keys: dict[str, Any], kind: str, key: str, found: str | None, tmp_path: Path
) -> None:
    path = example.write(tmp_path / "a.h5")
    if example is FOURIER:
        edited(path, lambda file: file["sol"].attrs.__setitem__("name", "u"))
    layout = with_keys(example, arrays={}, coordinates={}) | keys
    error = error_of(path, layout)
    assert (error.kind, error.found) == (kind, found or error.found)
    assert f"tasks.flow.layout.{key}" in str(error) or not key


@pytest.mark.parametrize("pattern", ["runs/case_*", "runs/run_1/*/x"])
def test_groups_that_match_nothing_are_refused(pattern: str, tmp_path: Path) -> None:
    error = error_of(write_runs(tmp_path / "a.h5"), with_keys(RUNS, groups=pattern))
    assert (error.kind, error.dataset) == ("missing_group", pattern)
    assert "which tasks.flow.layout.groups asks for" in str(error)
    assert "runs/run_1/state" in str(error.found)


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


# --- groups that differ -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "kind", "dataset"),
    [
        (lambda run: run.attrs.__delitem__("nu"), "missing_attribute", "runs/run_10"),
        (lambda run: run.__delitem__("energy"), "missing_dataset", "runs/run_10/energy"),
        (lambda run: run["t"].__setitem__(2, 9.0), "grids_differ", "runs/run_10/t"),
    ],
    ids=["attribute", "number", "grid"],
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
