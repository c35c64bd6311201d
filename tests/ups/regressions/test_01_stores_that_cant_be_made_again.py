"""A training replaces no store that no build made, and says so before anything is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_runs import make_small_run

import ups_store
from ups.config import load_config
from ups.data.stores import open_as
from ups.errors import ConfigError
from ups.pipeline.config_checks import check_config
from ups.pipeline.training import run_all
from ups_store.errors import StoreError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_small_run(tmp_path).relative_to(tmp_path)


def test_training_leaves_latents_that_no_build_made(run: Path) -> None:
    path = Path("latents/burgers1d_train.zarr.zip")
    path.parent.mkdir()
    ups_store.write(path, ({"latent": np.ones((6, 4, 2), "f2")} for _ in range(4)), identity={"mine": 1})
    before = path.read_bytes()
    with pytest.raises(StoreError) as caught:
        run_all(load_config(run), config_path=run, overrides=[])
    assert caught.value.kind == "not_built"
    assert (path.read_bytes() == before, Path("checkpoints").exists()) == (True, False)
    assert [line.kind for line in check_config(run).problems] == ["not_built"]


def test_residuals_take_no_place_of_another_kind_of_store(tmp_path: Path) -> None:
    path = tmp_path / "burgers1d_fit_residuals.zarr.zip"
    ups_store.write(path, ({"u": np.ones(3, "f4")} for _ in range(4)), identity={"mine": 1})
    with pytest.raises(ConfigError) as caught:
        open_as(path, {"kind": "residuals", "version": 1})
    assert caught.value.kind == "not_ours"
