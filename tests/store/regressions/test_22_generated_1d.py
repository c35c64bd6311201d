"""Point 22: PDEBench's own 1D output, `tensor` (1, sample, time, x), was taken for Darcy flow."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from ups_store import SourceError
from ups_store.sources import get_task, open_source

VALUES = np.arange(10 * 4 * 8, dtype="f4").reshape(10, 4, 8)


@pytest.mark.parametrize("task", ["advection1d", None])
def test_generated_tensor_of_four_axes_is_read_as_one_dimension(tmp_path: Path, task: str | None) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tensor"], file["x-coordinate"] = VALUES[None], np.arange(8, dtype="f4")
    with open_source(tmp_path / "a.h5", task=task and get_task(task)) as source:
        np.testing.assert_array_equal(source.read([2, 3, 9])["fields"][..., 0], VALUES[[2, 3, 9]])


def test_other_four_axes_are_an_error_about_the_axes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tensor"] = VALUES[..., None]
    with pytest.raises(SourceError, match=r"expected \(sample, time, x\), found shape \(10, 4, 8, 1\)"):
        open_source(tmp_path / "a.h5", task=get_task("advection1d"))
