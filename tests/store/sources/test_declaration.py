"""What a configuration may declare about files of a user's own, and how it is told what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ups_store.building.config import BuildConfig, load_config
from ups_store.errors import ConfigError
from ups_store.sources.tasks import get_task

LAYOUT: dict[str, Any] = {
    "fields": [
        {"dataset": "velocity", "axes": "sample time x y channel", "channels": ["vx", "vy"]},
        {"dataset": "p", "axes": "sample time x y"},
    ],
    "arrays": {"porosity": {"dataset": "phi", "axes": "sample x y"}},
    "coordinates": {"x": "grid/x", "t": {"step": 0.5}},
    "parameters": {"nu": {"attribute": "viscosity"}},
}


def load(folder: Path, task: dict[str, Any], *overrides: str, name: str = "flow") -> BuildConfig:
    path = folder / "build.yaml"
    path.write_text(yaml.safe_dump({"data": {"task": name}, "tasks": {name: task}}))
    return load_config(path, overrides=overrides)


def error_of(folder: Path, task: dict[str, Any], *overrides: str, name: str = "flow") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(folder, task, *overrides, name=name)
    assert caught.value.path in (str(folder / "build.yaml"), None)
    return caught.value


def changed(**keys: Any) -> dict[str, Any]:
    """A task whose layout has other keys; None takes one away."""
    layout = {**LAYOUT, **keys}
    return {"layout": {key: value for key, value in layout.items() if value is not None}}


# --- what becomes of it -------------------------------------------------------------------------------


def test_declared_task_is_what_its_layout_says(tmp_path: Path) -> None:
    declared = {"boundary": {"x": "periodic"}, "files": "run_*.h5", "layout": LAYOUT}
    task = load(tmp_path, declared).get_task("flow")
    assert (task.name, task.ndim, task.channels, task.steady) == ("flow", 2, ("vx", "vy", "p"), False)
    assert (task.boundary, task.test_part) == ({"x": "periodic"}, "last")
    assert task.files == {"all": ("run_*.h5",)}


def test_channels_that_only_the_file_counts_are_left_to_it(tmp_path: Path) -> None:
    fields = [{"dataset": "a/u", "axes": "sample x"}, {"dataset": "v", "axes": "sample x channel"}]
    task = load(tmp_path, {"layout": {"fields": fields}}).get_task("flow")
    assert (task.ndim, task.channels, task.steady) == (1, (), True)
    task = load(tmp_path, {"layout": {"fields": fields[:1]}}).get_task("flow")
    assert task.channels == ("u",)


def test_task_without_a_layout_knows_its_axes_only(tmp_path: Path) -> None:
    task = load(tmp_path, {"ndim": 3, "test_part": "first"}).get_task("flow")
    assert (task.ndim, task.channels, task.steady, task.layout) == (3, (), None, None)
    assert (task.test_part, task.declaration) == ("first", {})


def test_known_tasks_stay_known(tmp_path: Path) -> None:
    config = load(tmp_path, {"ndim": 1}, "data.tasks=[flow,burgers1d,active_matter]")
    assert config.data.tasks == ("flow", "burgers1d", "active_matter")
    assert config.get_task("burgers1d") is get_task("burgers1d")
    assert config.get_task("active_matter").ndim == 2


@pytest.mark.parametrize("axes", [" sample,time, x,y ", "(sample, time, x, y)", ["sample", "time", "x", "y"]])
def test_axes_mean_the_same_in_all_spellings(axes: object, tmp_path: Path) -> None:
    task = load(tmp_path, changed(fields=[{"dataset": "u", "axes": axes}])).get_task("flow")
    assert task.declaration["fields"][0]["axes"] == "sample time x y"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("a.h5,b.h5", {"all": ("a.h5", "b.h5")}),
        (["a.h5", "b*.h5"], {"all": ("a.h5", "b*.h5")}),
        ({"train": "a.h5", "valid": ["b.h5"]}, {"train": ("a.h5",), "val": ("b.h5",)}),
    ],
)
def test_files_are_of_all_splits_or_of_each(files: object, expected: object, tmp_path: Path) -> None:
    assert load(tmp_path, {"ndim": 1, "files": files}).get_task("flow").files == expected


def test_declaration_for_the_identity_is_what_decides_the_content(tmp_path: Path) -> None:
    plain = load(tmp_path, {"layout": LAYOUT}).get_task("flow").declaration
    assert load(tmp_path, {"files": "a.h5", "layout": LAYOUT}).get_task("flow").declaration == plain
    other = load(tmp_path, {"boundary": {"y": "wall"}, "layout": LAYOUT}).get_task("flow").declaration
    assert other == {**plain, "boundary": {"y": "wall"}}
    assert plain["coordinates"]["x"] == {"dataset": "grid/x", "start": 0.0}
    assert plain["parameters"] == {"nu": {"attribute": "viscosity"}}


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "key", "hint"),
    [
        ({"ndim": 1, "file": "a"}, "tasks.flow.file", "did you mean tasks.flow.files?"),
        (
            changed(fields=[{"datset": "u", "axes": "sample x"}]),
            "tasks.flow.layout.fields.0.datset",
            "did you mean tasks.flow.layout.fields.0.dataset?",
        ),
        (
            changed(coordinates={"t": {"dt": 0.1}}),
            "tasks.flow.layout.coordinates.t.dt",
            "known keys: tasks.flow.layout.coordinates.t.dataset, tasks.flow.layout.coordinates.t.step",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_key_names_the_nearest_known_one(
    task: dict[str, Any], key: str, hint: str, tmp_path: Path
) -> None:
    error = error_of(tmp_path, task)
    assert (error.kind, error.found) == ("unknown_key", repr(key))
    assert hint in str(error.hint)


def test_unknown_task_suggests_a_declared_one(tmp_path: Path) -> None:
    error = error_of(tmp_path, {"ndim": 1}, "data.tasks=flaw")
    assert (error.kind, error.hint) == ("unknown_task", "did you mean 'flow'?")
    assert "flow" in str(error.expected)


@pytest.mark.parametrize("name", ["a-b", ""])
def test_task_whose_name_makes_no_file_name_is_refused(name: str, tmp_path: Path) -> None:
    error = error_of(tmp_path, {"ndim": 1}, name=name)
    assert (error.problem, error.found) == ("tasks", repr(name))


@pytest.mark.parametrize("name", ["burgers1d"])
def test_task_that_there_is_already_is_refused(name: str, tmp_path: Path) -> None:
    error = error_of(tmp_path, {"ndim": 1}, name=name)
    assert "another name" in str(error.expected)


FIELD = {"dataset": "u", "axes": "sample time x"}


@pytest.mark.parametrize(
    ("task", "key", "expected"),
    [
        ({}, "", "ndim or layout"),
        ({"ndim": 4}, ".ndim", "1, 2 or 3"),
        ({"ndim": 1, "layout": LAYOUT}, "", "ndim 2, as the layout's fields have it"),
        ({"ndim": 1, "boundary": {"y": "wall"}}, "", "boundary of x"),
        ({"ndim": 1, "files": {"all": "a", "test": "b"}}, "", "files of all, or of each split"),
    ],
)
def test_task_that_makes_no_sense_is_refused(
    task: dict[str, Any], key: str, expected: str, tmp_path: Path
) -> None:
    error = error_of(tmp_path, task)
    assert error.problem == f"tasks.flow{key}"
    assert str(error.expected).startswith(expected)


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        ({"fields": [{"dataset": "u", "axes": 3}]}, "fields.0.axes", "a valid string"),
        ({"fields": [{**FIELD, "axes": "sample x x"}]}, "fields.0.axes", "every axis once"),
        ({"fields": [{**FIELD, "axes": "sample tme x"}]}, "fields.0.axes", "axes among"),
        ({"fields": [{**FIELD, "axes": "x component"}]}, "fields.0", "axis channel"),
        ({"fields": [{**FIELD, "channels": ["a", "b"]}]}, "fields.0", "one channel"),
        ({"fields": [{**FIELD, "axes": "sample time y"}]}, "", "fields with axes x"),
        ({"fields": [FIELD]}, "", "axes of the fields, x"),
        ({"coordinates": {"z": "z"}}, "", "axes of the fields, x y"),
        ({"coordinates": 3}, "coordinates", "keys and values"),
        ({"coordinates": {"x": {}}}, "coordinates.x", "either dataset or step"),
        ({"coordinates": {"x": {"step": 0}}}, "coordinates.x.step", "greater than 0"),
        (
            {"fields": [{**FIELD, "axes": "sample x y"}], "coordinates": {"t": "t"}, "arrays": None},
            "",
            "coordinates of axes of the fields",
        ),
        ({"arrays": {"k": {"dataset": "k", "axes": "x channel"}}}, "arrays.k", "axis component"),
        ({"arrays": {"fields": {"dataset": "k", "axes": "x"}}}, "arrays", "names of arrays"),
        ({"arrays": {"nu": {"dataset": "k", "axes": "x"}}}, "", "different names for arrays and parameters"),
        ({"parameters": {"a": {"attribute": "a", "dataset": "a"}}}, "parameters.a", "one of dataset, attrib"),
        ({"parameters": {"a": {"dataset": "a", "of": "b"}}}, "parameters.a", "of together with attribute"),
        ({"parameters": {"a": {"file_name": "nu"}}}, "parameters.a.file_name", "a regular expression with"),
        ({"parameters": {"a": {"file_name": "nu("}}}, "parameters.a.file_name", "a regular expression with"),
        ({"groups": "run*"}, "", "no axis sample in a sample's own group"),
    ],
)
def test_layout_that_makes_no_sense_is_refused(
    keys: dict[str, Any], key: str, expected: str, tmp_path: Path
) -> None:
    error = error_of(tmp_path, changed(**keys))
    assert error.problem == f"tasks.flow.layout.{key}".rstrip(".")
    assert str(error.expected).startswith(expected)


def test_override_reaches_into_a_declaration(tmp_path: Path) -> None:
    config = load(tmp_path, {"layout": LAYOUT}, "tasks.flow.layout.coordinates.t.step=0.25")
    layout = config.get_task("flow").layout
    assert layout is not None
    assert layout.coordinates["t"].step == 0.25


def test_override_of_one_item_of_a_list_is_refused(tmp_path: Path) -> None:
    error = error_of(tmp_path, {"layout": LAYOUT}, "tasks.flow.layout.fields.0.dataset=u")
    assert error.problem == "tasks.flow.layout.fields"
    assert error.hint == "say tasks.flow.layout.fields=[...], which replaces the list as a whole"


def test_list_in_the_place_of_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "build.yaml"
    path.write_text("data:\n  task: burgers1d\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=["data=[1]"])
    assert (caught.value.problem, caught.value.found) == ("data", "a list")
    assert caught.value.hint == "say data.<name>=..."
