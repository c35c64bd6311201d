"""Point 5: dtypes of Hugging Face, names of classes, units and coordinates were changed or dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from command_line import run_ups_store

import ups_store
from ups_store import SourceError, SpecError, write

VALUES = 280 + np.arange(6 * 4, dtype="f8").reshape(6, 4) / 8
PACKED = ((VALUES - 280) * 8).astype("i2")
SAID = {"units": "K", "long_name": "temperature"}
ENCODED = {"scale_factor": 0.125, "add_offset": 280.0, "_FillValue": np.int16(-9)}


def test_hugging_face_dtypes_and_names_of_classes_are_kept(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "v": datasets.List(datasets.Value("float64")),
            "a": datasets.Array2D((2, 2), "float64"),
            "i": datasets.List(datasets.Value("int32")),
            "ragged": datasets.List(datasets.Value("int16")),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    columns: dict[str, Any] = {
        "v": VALUES.tolist(),
        "a": VALUES.reshape(6, 2, 2).tolist(),
        "i": PACKED.tolist(),
    }
    columns |= {"ragged": [[1] * (i + 1) for i in range(6)], "label": [0, 1] * 3}
    store = write(tmp_path / "a.zarr.zip", datasets.Dataset.from_dict(columns, features=features))
    dtypes = {name: str(store.arrays[name].dtype) for name in columns}
    assert dtypes == {"v": "float64", "a": "float64", "i": "int32", "ragged": "int16", "label": "int64"}
    np.testing.assert_array_equal(store["v"], VALUES)
    assert store.arrays["label"].attrs == {"names": ["cat", "dog"]}


def test_xarray_keeps_attributes_coordinates_and_times(tmp_path: Path) -> None:
    xr = pytest.importorskip("xarray")
    times = np.datetime64("2020-01-01", "ns") + np.arange(6) * np.timedelta64(6, "h")
    data = xr.Dataset(
        {"t": (("time", "lat"), VALUES, SAID)},
        coords={
            "time": times,
            "lat": ("lat", np.arange(4.0), {"units": "degrees_north"}),
            "lead": ("lat", np.arange(4) * np.timedelta64(1, "h")),
            "station": ("lat", ["a", "b", "c", "d"]),
        },
    )
    store = write(tmp_path / "a.zarr.zip", data, identity={"v": 1})
    again = store.to_xarray()
    assert (again["t"].attrs, again["lat"].attrs) == (SAID, {"units": "degrees_north"})
    np.testing.assert_array_equal(again["time"], times)
    np.testing.assert_array_equal(again["lead"], data["lead"])
    assert store.attrs["text_coordinates"]["station"] == {"dims": ["lat"], "values": ["a", "b", "c", "d"]}
    assert run_ups_store("concat", store.path, store.path, tmp_path / "c.zarr.zip").exit_code == 0
    assert ups_store.open(tmp_path / "c.zarr.zip").to_xarray()["lat"].attrs == {"units": "degrees_north"}
    alone = write(tmp_path / "b.zarr.zip", data["t"], identity={"v": 1})
    assert {"t", "time", "lat", "lead"} == alone.to_xarray().variables.keys()
    assert alone.arrays["t"].attrs == SAID


@pytest.mark.parametrize("kind", ["group of Zarr 3", "group of Zarr 2", "HDF5", "with text", "constant"])
def test_encoded_arrays_are_decoded_and_keep_their_other_attributes(tmp_path: Path, kind: str) -> None:
    true, packed = VALUES.copy(), PACKED.copy()
    true[2, 1], packed[2, 1] = np.nan, -9
    given: Any
    if kind.startswith("group"):
        zarr = pytest.importorskip("zarr")
        given = zarr.open_group(tmp_path / "z", mode="w", zarr_format=int(kind[-1]))
        fill = {"fill_value": -9} if kind[-1] == "2" else {}
        array = given.create_array("t", shape=(6, 4), dtype="i2", chunks=(6, 4), **fill)
        array[:] = packed
        named = {"_ARRAY_DIMENSIONS": ["sample", "x"]} if kind[-1] == "2" else {"_FillValue": -9}
        array.attrs.update(SAID | {"scale_factor": 0.125, "add_offset": 280.0} | named)
    else:
        file = h5py.File(tmp_path / "a.h5", "w")
        file["t"] = packed
        file["t"].attrs.update(SAID | ENCODED)
        given = file if kind == "HDF5" else {"t": file["t"], "text": list("abcdef")}
    if kind == "constant":
        options: dict[str, Any] = {"constants": {"t": file["t"]}}
        store = write(tmp_path / "a.zarr.zip", {"x": VALUES}, identity={"v": 1}, **options)
    else:
        store = write(tmp_path / "a.zarr.zip", given, identity={"v": 1})
    np.testing.assert_array_equal(store["t"], true.astype("f4"))
    assert store.to_xarray()["t"].attrs == SAID


def test_attribute_that_can_not_be_kept_is_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = VALUES
        file["t"].attrs["other"] = file["t"].ref
        with pytest.raises(SpecError, match="attribute 'other' can't be stored") as caught:
            write(tmp_path / "a.zarr.zip", file, identity={"v": 1})
    assert caught.value.array == "t"


def test_hdf5_that_was_never_written_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("t", (6, 4), "f4")
        with pytest.raises(SourceError, match="never written"):
            ups_store.write(tmp_path / "a.zarr.zip", file, identity={"v": 1})
