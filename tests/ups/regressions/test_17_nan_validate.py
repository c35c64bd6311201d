"""What training refuses, `ups validate data` refuses."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from ups.config import load_config
from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.data.statistics import measure_statistics
from ups.errors import ConfigError
from ups.pipeline.data_checks import check_data


def test_values_that_a_store_keeps_and_training_refuses_are_a_problem_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_dataset("burgers1d", tmp_path / "data", num_samples=20, points=32, frames=6, nu=0.1)
    (path,) = (tmp_path / "data").glob("*.hdf5")
    with h5py.File(path, "r+") as file:
        file["tensor"][:, :, 3:5] = np.nan
    given = [
        "data.tasks=burgers1d",
        "data.root=data",
        "data.on_nan=keep",
        "encoder.patch_size=4",
        "latent.tokens=8",
    ]
    report = check_data(None, given)
    assert ("not_finite", 3) in [(check.kind, check.exit_code) for check in report.problems]
    train = open_fields(load_config(overrides=given).build, "burgers1d", "train")
    with pytest.raises(ConfigError) as caught:
        measure_statistics(train)
    assert caught.value.kind == "not_finite"
