"""`create`: its arguments, and what it makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import (
    IDENTITY,
    begin,
    mixed_constants,
    mixed_values,
    names_in,
    specs_of,
)

import ups_store
from ups_store import ArraySpec, SpecError, StoreNotFoundError
from ups_store.writing import plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


# --- arguments ----------------------------------------------------------------------------------------

U = {"u": ArraySpec((2, 3), "float32")}


@pytest.mark.parametrize(
    ("arguments", "kind", "array"),
    [
        ({"arrays": {"u": ArraySpec((), "float32")}}, "shape", "u"),
        ({"arrays": {"u": ArraySpec((2, -1), "float32")}}, "shape", "u"),
        ({"arrays": {"u": ArraySpec((2.5, 3), "float32")}}, "shape", "u"),
        ({"arrays": {"u": ArraySpec((1,) * 33, "float32")}}, "shape", "u"),
        ({"arrays": {"u": ArraySpec((2, 1 << 60), "float32")}}, "shape", "u"),
        ({"arrays": {"u": ArraySpec((1 << 60, 0), "float32")}}, "shape", "u"),
        ({"arrays": {"u": ArraySpec((2,), "complex64")}}, "dtype", "u"),
        ({"arrays": {"u": ArraySpec((2,), "no such dtype")}}, "dtype", "u"),
        ({"arrays": {"u": ArraySpec((2,), object)}}, "dtype", "u"),
        ({"arrays": {"u": ArraySpec((2, 3), "int8", dims=("sample",))}}, "dims", "u"),
        ({"arrays": {"u": ArraySpec((2, 3), "int8", dims=("x", "sample"))}}, "dims", "u"),
        ({"arrays": {"u": ArraySpec((2, 2), "int8", dims=("sample", "sample"))}}, "dims", "u"),
        ({"arrays": {"u": ArraySpec((2, 2, 2), "int8", dims=("sample", "x", "x"))}}, "dims", "u"),
        ({"arrays": {"u": ArraySpec((2, 3), "int8", dims=("sample", ""))}}, "dims", "u"),
        ({"arrays": {"u": ArraySpec((2,), "int8"), "v": ArraySpec((3,), "int8")}}, "dims", "v"),
        ({"arrays": {"zarr.json": ArraySpec((2,), "int8")}}, "name", None),
        ({"arrays": {"../u": ArraySpec((2,), "int8")}}, "name", None),
        ({"constants": {"x": np.zeros(3)}, "dims": {"x": ("sample",)}}, "dims", "x"),
        ({"constants": {"x": np.zeros(3)}, "dims": {"x": ("x", "y")}}, "dims", "x"),
        ({"constants": {"x": np.zeros(3), "y": np.zeros(4)}, "dims": {"y": ("x",)}}, "dims", "y"),
        ({"constants": {"x": np.zeros(3)}, "dims": {"y": ("x",)}}, "arrays", None),
        ({"constants": {"u": np.zeros(3)}}, "arrays", None),
        ({"constants": {"x": np.array(["a"])}}, "dtype", "x"),
        ({"identity": {"viscosity": float("nan")}}, "not_canonical", None),
        ({"identity": {"seed": 2**53}}, "not_canonical", None),
        ({"attrs": {"when": object()}}, "not_canonical", None),
        ({"attrs": {"ups_store": {}}}, "attrs", None),
        ({"durability": "sometimes"}, "spec", None),
        ({"on_mismatch": "ignore"}, "spec", None),
    ],
)
def test_create_refuses_arguments_of_no_valid_store(
    path: Path, arguments: dict[str, Any], kind: str, array: str | None
) -> None:
    with pytest.raises(SpecError) as caught:
        ups_store.create(path, **{"arrays": U, "identity": {}, **arguments})
    assert (caught.value.kind, caught.value.array) == (kind, array)
    assert names_in(path.parent) == []


def test_create_refuses_more_bytes_than_a_file_can_have(path: Path) -> None:
    arrays = {name: ArraySpec((1000, 1 << 50), "float64") for name in "uv"}
    with pytest.raises(SpecError) as caught:
        ups_store.create(path, arrays, identity={})
    assert (caught.value.kind, caught.value.expected) == ("limits", 2**62 - 1)
    assert caught.value.found > 2**63


def test_create_refuses_metadata_beyond_the_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_JSON_BYTES", 8192)
    begin(path, mixed_values(), attrs={"note": "x" * 3000}).close()
    with pytest.raises(SpecError) as caught:
        begin(path, mixed_values(), attrs={"note": "x" * 8000})
    assert (caught.value.kind, caught.value.clause) == ("limits", "9.1")


def test_create_refuses_more_arrays_than_the_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_ARRAYS", 4)
    with pytest.raises(SpecError, match="at most 4, found 5") as caught:
        begin(path, mixed_values())
    assert (caught.value.kind, caught.value.clause) == ("limits", "9.1")


def test_create_in_no_folder_says_which(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError) as caught:
        ups_store.create(tmp_path / "none" / "a.zarr.zip", U, identity={})
    assert caught.value.path == str(tmp_path / "none")


def test_dimensions_are_named_after_the_array_unless_given(path: Path) -> None:
    constants = {"x": [0.0, 1.0], "box": [[0.0, 1.0]], "gravity": 9.81, "t": np.zeros(3)}
    with ups_store.create(path, U, constants=constants, dims={"t": ("time",)}, identity={}) as writer:
        writer.commit_many([0, 1], {"u": np.zeros((2, 3), np.float32)})
        writer.finish()
    with ups_store.open(path) as store:
        assert store.dims == {
            "box": ("box_dim_0", "box_dim_1"),
            "gravity": (),
            "t": ("time",),
            "u": ("sample", "u_dim_1"),
            "x": ("x",),
        }
        assert store.constants["gravity"] == 9.81
        assert store.verify().ok


def test_attributes_of_group_and_arrays_are_kept(path: Path) -> None:
    attrs = {"boundary": {"x": "periodic"}, "lengths": [1.0]}
    spec = ArraySpec((0, 3), np.dtype(">f8"), dims=("sample", "x"), attrs={"channels": ["density"]})
    with ups_store.create(path, {"u": spec}, identity={}, attrs=attrs) as writer:
        writer.finish()
    with ups_store.open(path) as store:
        assert store.attrs == attrs
        assert store.arrays["u"] == ArraySpec((0, 3), np.dtype("<f8"), ("sample", "x"), spec.attrs)


def test_identity_of_is_what_create_writes(path: Path) -> None:
    values, constants = mixed_values(0), mixed_constants()
    expected = plan.identity_of(specs_of(values), constants=constants, identity=IDENTITY)
    with begin(path, values, constants=constants, dims={}) as writer:
        writer.finish()
    with ups_store.open(path) as store:
        assert store.identity_document == expected
