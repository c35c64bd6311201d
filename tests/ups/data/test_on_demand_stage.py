"""The stage `operator` on latents that aren't there yet: what it learns doesn't depend on that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from operator_runs import configure, made_once, shared_run
from torch import Tensor

import ups_store
from ups.train.run import run_stage
from ups.trained.checkpoint import load_checkpoint

TASKS = ("burgers1d", "darcy2d")
SETTINGS = (
    "data.tasks=[burgers1d,darcy2d]",
    "stages.operator.epochs=2",
    "stages.operator.steps_per_epoch=null",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = shared_run(tmp_path_factory)
    return made_once(tmp_path_factory, lambda folder: shutil.copytree(source, folder, dirs_exist_ok=True))


def train(folder: Path, *overrides: str) -> dict[str, Tensor]:
    """Weights and statistics after two passes."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    shutil.copytree(folder / "checkpoints", folder / "runs")
    config = configure(folder, "checkpoint.dir=runs", *SETTINGS, *overrides)
    run_stage("operator", config)
    tensors, _ = load_checkpoint(folder / "runs" / "operator.safetensors", kind="operator")
    return tensors


def expect_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_training_is_the_same_to_the_bit_wherever_its_latents_come_from(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    expected = train(prepared)
    shutil.rmtree(prepared / "latents")
    expect_same(train(prepared, "training.cache_mode=memory"), expected)
    assert not (prepared / "latents").exists()
    expect_same(train(prepared), expected)
    for task in TASKS:
        with ups_store.open(prepared / "latents" / f"{task}_train.zarr.zip") as store:
            assert store.verify().ok


def test_training_without_any_store(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(prepared)
    shutil.rmtree(prepared / "latents", ignore_errors=True)
    weights = train(prepared, "training.cache_mode=none")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    assert not (prepared / "latents").exists()
