"""Stores as sources that say themselves what they hold, and stores that can't be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import ups_store
from ups_store.building.config import BuildConfig
from ups_store.errors import SourceError, StoreClosedError
from ups_store.sources import Source, open_source
from ups_store.sources.tasks import get_task


def array(*shape: int, dtype: Any = "float32") -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def write(folder: Path, fields: Any, *dims: str, **attrs: Any) -> Path:
    path = folder / "own.zarr.zip"
    ups_store.write(path, {"fields": fields}, dims={"fields": dims}, attrs=attrs)
    return path


def test_channels_have_their_names_wherever_their_axis_is(tmp_path: Path) -> None:
    fields = array(5, 2, 8)
    with open_source(write(tmp_path, fields, "channel", "x", channels=["u", "v"])) as source:
        assert source.info.channels == ("u", "v")
        np.testing.assert_array_equal(source.read([3])["fields"][0, 0], fields[3].T)


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    fields = array(5, 8, dtype=ml_dtypes.bfloat16)
    with open_source(write(tmp_path, fields, "x")) as source:
        values = source.read([1])["fields"]
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values[0, 0, :, 0], fields[1].astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "dims", "attrs", "kind"),
    [
        ((5, 8, 4), ("x", "z"), {}, "unknown_layout"),
        ((5, 8), ("y",), {}, "unknown_layout"),
        ((5, 3, 2), ("time", "channel"), {}, "unknown_layout"),
        ((5, 8, 2), ("x", "component"), {}, "unknown_layout"),
        ((5, 8, 2), ("x", "channel"), {"channels": ["u"]}, "wrong_length"),
        ((5, 8, 2), ("x", "channel"), {"channels": 2}, "wrong_length"),
        ((5, 8), ("x",), {"boundary": "periodic"}, "bad_parameter"),
    ],
)
def test_what_makes_no_fields_is_refused(
    tmp_path: Path, shape: tuple[int, ...], dims: tuple[str, ...], attrs: dict[str, Any], kind: str
) -> None:
    path = write(tmp_path, array(*shape), *dims, **attrs)
    with pytest.raises(SourceError) as caught:
        open_source(path)
    assert caught.value.kind == kind


def test_ragged_fields_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [array(num, 8) for num in (3, 4)], "time", "x")
    with pytest.raises(SourceError, match="ragged"):
        open_source(path)


def declared(folder: Path, arrays: dict[str, Any], layout: dict[str, Any], **options: Any) -> Source:
    """A store of these arrays as the source of a task that is declared so."""
    path = folder / "own_Re42.zarr.zip"
    ups_store.write(path, arrays, **options).close()
    values = {
        "data": {"tasks": ["mine"], "root": folder},
        "cache": {"dir": folder},
        "tasks": {"mine": {"files": path.name, "layout": layout}},
    }
    build = BuildConfig.model_validate(values, context={"tasks": ("mine",)})
    return open_source(path, task=build.get_task("mine"))


U = {"fields": [{"dataset": "u", "axes": "sample x"}]}


def test_declared_numbers_are_attributes_constants_and_parts_of_the_name(tmp_path: Path) -> None:
    layout = {
        **U,
        "coordinates": {"x": {"start": 1.0, "step": 0.5}},
        "parameters": {
            "nu": {"attribute": "nu"},
            "c": {"dataset": "c"},
            "re": {"file_name": "Re([0-9]+)"},
            "k": {"dataset": "k"},
        },
    }
    arrays = {"u": array(5, 4), "k": array(5)}
    with declared(tmp_path, arrays, layout, attrs={"nu": 0.1}, constants={"c": 3.0}) as source:
        assert source.info.parameters == {"nu": 0.1, "c": 3.0, "re": 42.0}
        np.testing.assert_array_equal(source.info.constants["x"], [1.0, 1.5, 2.0, 2.5])
        np.testing.assert_allclose(source.read([2])["k"], arrays["k"][[2]])


@pytest.mark.parametrize(
    ("arrays", "layout", "kind"),
    [
        ({"u": array(5, 8, 8)}, {"fields": [{"dataset": "u", "axes": "sample x y"}]}, None),
        (
            {"u": array(5, 8, 2)},
            {"fields": [{"dataset": "u", "axes": "sample x channel", "channels": ["a"]}]},
            "wrong_length",
        ),
        (
            {"u": array(5, 8), "v": array(5, 9)},
            {"fields": [{"dataset": "u", "axes": "sample x"}, {"dataset": "v", "axes": "sample x"}]},
            "shapes_differ",
        ),
        ({"u": [array(3), array(4)]}, U, "wrong_rank"),
        ({"u": array(5, 8)}, {**U, "coordinates": {"x": "x"}}, "missing_dataset"),
        ({"u": array(5, 8)}, {**U, "coordinates": {"x": "c"}}, "wrong_length"),
        ({"u": array(5, 8)}, {**U, "parameters": {"nu": {"attribute": "nu"}}}, "bad_parameter"),
    ],
    ids=["order", "channels", "sizes", "ragged", "no coordinate", "coordinate", "parameter"],
)
def test_declarations_that_the_store_doesn_t_fit_are_refused(
    tmp_path: Path, arrays: dict[str, Any], layout: dict[str, Any], kind: str | None
) -> None:
    options = {"dims": {"u": ("y", "x")}} if kind is None else {}
    with pytest.raises(SourceError) as caught:
        declared(tmp_path, arrays, layout, constants={"c": 3.0}, **options)
    assert kind in (None, caught.value.kind)
    assert kind is not None or "another order" in str(caught.value)


def test_closed_source_reads_nothing(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, array(5, 8), "x"))
    source.close()
    source.close()
    with pytest.raises(StoreClosedError):
        source.read([0])


def test_file_that_is_no_store_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "own.zarr.zip"
    path.write_bytes(b"no store")
    with pytest.raises(SourceError) as caught:
        open_source(path)
    assert caught.value.kind == "unreadable"


def test_store_of_another_number_of_axes_is_not_of_the_task(tmp_path: Path) -> None:
    path = write(tmp_path, array(5, 8, 8), "x", "y")
    with pytest.raises(SourceError, match="can't be of task 'burgers1d'"):
        open_source(path, task=get_task("burgers1d"))
