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
from ups_store.sources import open_source
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


def test_declared_axes_in_another_order_than_the_store_s_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, array(5, 8, 8), "y", "x")
    layout = {"fields": [{"dataset": "fields", "axes": "sample x y"}]}
    values = {
        "data": {"tasks": ["mine"], "root": tmp_path},
        "cache": {"dir": tmp_path},
        "tasks": {"mine": {"files": path.name, "layout": layout}},
    }
    build = BuildConfig.model_validate(values, context={"tasks": ("mine",)})
    with pytest.raises(SourceError, match="another order"):
        open_source(path, task=build.get_task("mine"))


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
