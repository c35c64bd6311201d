"""Point 59: `scale_factor`, `add_offset` and fill values were passed over, and raw numbers became data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from inline_readers import in_this_process

import ups_store
from ups_store import SourceError
from ups_store.build import Watcher, build_all, load_config

read_here = pytest.fixture(autouse=True)(in_this_process)
TRUE = 280 + np.arange(12 * 4 * 6, dtype="f4").reshape(12, 4, 6) / 64
PACKED = ((TRUE - 280) * 64).astype("i2")


def built(folder: Path, values: Any, *overrides: str, **attrs: Any) -> ups_store.Store:
    with h5py.File(folder / "t2m_all.nc", "w") as file:
        file["x"] = (np.arange(6) + 0.5) / 6
        file["t2m"], file["soil"] = values, PACKED[:, 0]
        file["t2m"].attrs.update(attrs)
        file["soil"].attrs.update(scale_factor=1 / 64, add_offset=280.0)
    (folder / "c.yaml").write_text(
        f"data: {{tasks: t2m, root: {folder}, split: train, split_fractions: [1, 0, 0]}}\n"
        f"cache: {{dir: {folder / 'c'}}}\n"
        "tasks:\n"
        "  t2m:\n"
        "    files: t2m_*.nc\n"
        "    boundary: {x: periodic}\n"
        "    layout:\n"
        "      fields: [{dataset: t2m, axes: sample time x, channels: [t2m]}]\n"
        "      arrays: {soil: {dataset: soil, axes: sample x}}\n"
        "      coordinates: {x: x, t: {step: 1.0}}\n"
    )
    (report,) = build_all(load_config(folder / "c.yaml", overrides=overrides), watcher=Watcher()).stores
    return ups_store.open(report.path)


@pytest.mark.parametrize("stored", ["i2", ">i2", "f4", "f8"])
def test_packed_numbers_are_stored_as_what_they_mean(tmp_path: Path, stored: str) -> None:
    store = built(tmp_path, PACKED.astype(stored), scale_factor=1 / 64, add_offset=[280.0])
    np.testing.assert_array_equal(store["fields"][..., 0], TRUE)
    np.testing.assert_array_equal(store["soil"], TRUE[:, 0])


@pytest.mark.parametrize(("attribute", "stored"), [("_FillValue", "f4"), ("missing_value", ">f4")])
def test_fill_values_are_nan_and_so_on_nan_decides(tmp_path: Path, attribute: str, stored: str) -> None:
    filled = TRUE.copy()
    filled[3, 1, 2:4] = np.float32(9.96921e36)
    values, said = filled.astype(stored), {attribute: np.array([9.96921e36], stored)}
    with pytest.raises(SourceError, match=f"sample 3: 2 of 24 values .*{attribute}") as caught:
        built(tmp_path, values, **said)
    assert caught.value.kind == "not_finite"
    kept = built(tmp_path, values, "data.on_nan=keep", **said)["fields"][..., 0]
    np.testing.assert_array_equal(kept, np.where(filled > 1e30, np.nan, filled))


def test_attributes_without_effect_change_neither_numbers_nor_identity(tmp_path: Path) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.mkdir()
    other.mkdir()
    said = {"scale_factor": 1.0, "add_offset": 0.0, "_FillValue": np.float32("nan"), "units": "K"}
    first, second = built(plain, TRUE), built(other, TRUE, **said)
    np.testing.assert_array_equal(second["fields"][..., 0], TRUE)
    assert first.identity["decoded"] == second.identity["decoded"] == ["add_offset", "scale_factor"]


def test_attribute_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="attribute 'scale_factor': expected one number") as caught:
        built(tmp_path, PACKED, scale_factor="0.5")
    assert (caught.value.kind, caught.value.dataset) == ("bad_encoding", "t2m")
