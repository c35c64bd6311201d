"""`startup/cache_reused` is 1 only where the stores were there; a store's age is said to be its file's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from noted import noted
from operator_runs import build_here
from run_nodes import build_stores
from small_runs import make_small_run

from ups.config import load_config
from ups.pipeline.config_checks import check_config
from ups.train.run import run_stage

REUSED = "startup/cache_reused"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        run = make_small_run(folder)
        run_stage("autoencoder", load_config(run))
    return folder


@pytest.fixture
def run(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ups.pipeline.training.run_process", build_here)
    return Path("run.yaml")


def trained(run: Path, *overrides: str) -> tuple[float, list[str]]:
    config = load_config(run, overrides=overrides)
    with noted() as notes:
        report = run_stage("operator", config, restart=True)
    return report["startup"][REUSED], notes


def test_stage_says_whether_its_latents_were_there(run: Path) -> None:
    assert trained(run)[0] == 0.0  # built before the first step
    build_stores("latent-stores", run)
    assert trained(run)[0] == 1.0
    Path("latents/burgers1d_val.zarr.zip").unlink()
    assert trained(run)[0] == 0.0


def test_latents_in_memory_are_not_reused_and_have_no_path(run: Path) -> None:
    reused, notes = trained(run, "training.cache_mode=memory")
    assert (reused, [note for note in notes if "/proc/" in note]) == (0.0, [])
    assert any("in memory" in note for note in notes)


def test_age_is_that_of_the_file(run: Path) -> None:
    build_stores("latent-stores", run)
    (text,) = (line.text for line in check_config(run).checks if line.text.startswith("burgers1d train: "))
    assert "written" in text
    assert "ago, latents" in text
