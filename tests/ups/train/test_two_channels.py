"""Two channels between walls, from data to prediction: no stage takes a field for one channel."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
from operator_runs import SETTINGS, build_here, configure, made_once

import ups
import ups_store
from ups.data.solvers import make_dataset
from ups.eval.predict import PredictionRequest, predict_store
from ups.pipeline.training import run_all
from ups.trained.autoencoder import load_autoencoder

torch.set_num_threads(1)

TASK, SOURCE = "diffreact2d", Path("data/2D_diff-react_NA_NA.h5")
NUM, FRAMES, POINTS = 20, 6, 16
NUM_NOISY = 2  # first frames that are left out: white noise has nothing to compress
OPERATOR = Path("checkpoints/operator.safetensors")


def train(folder: Path) -> None:
    """All stages and the evaluation, and a prediction of what the source holds."""
    make_dataset(
        TASK, Path("data"), num_samples=NUM, points=POINTS, frames=NUM_NOISY + FRAMES, du=0.01, dv=0.05
    )
    with h5py.File(SOURCE, "r+") as file:
        for sample in file.values():
            for holder, name in ((sample, "data"), (sample["grid"], "t")):
                values = holder[name][NUM_NOISY:]
                del holder[name]
                holder[name] = values
    settings = {**SETTINGS, "data": {"task": TASK, "root": "data"}, "latent": {"dim": 8, "tokens": 16}}
    settings["evaluation"] = {"enabled": True}
    settings["stages"] = {
        "autoencoder": {"epochs": 1, "steps_per_epoch": 120},
        "operator": {"epochs": 1, "steps_per_epoch": 60},
    }
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ups.pipeline.training.run_process", build_here)
        run_all(configure(folder), config_path=folder / "run.yaml", overrides=[])
    request = PredictionRequest(
        source=SOURCE,
        checkpoint=OPERATOR,
        out=Path("predicted.zarr.zip"),
        steps=3,
        split="train",
        limit=2,
        device="cpu",
    )
    predict_store(request)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, train)


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def training_fields() -> np.ndarray:
    """Fields of the training split, by PDEBench's rule: the last tenth is test, before it validation."""
    with h5py.File(SOURCE) as file:
        return np.stack([file[f"{sample:04}/data"][()] for sample in range(16)])


def rows() -> dict[str, Any]:
    (task,) = json.loads(Path("reports/run/report.json").read_text())["tasks"].values()
    found: dict[str, Any] = task["rows"]
    return found


def test_statistics_are_those_of_each_channel(folder: Path) -> None:
    fields = training_fields().astype(np.float64)
    task = load_autoencoder("checkpoints/autoencoder.safetensors").spec.tasks[TASK]
    assert task.channels == ("u", "v")
    assert task.grid.periodic == (False, False)
    statistics = task.statistics["fields"]
    np.testing.assert_allclose(statistics["mean"], fields.mean((0, 1, 2, 3)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(statistics["std"], fields.std((0, 1, 2, 3)), rtol=1e-5)
    assert abs(statistics["std"][0] - statistics["std"][1]) > 0.01


def test_latents_of_both_channels_are_stored_once(folder: Path) -> None:
    with ups_store.open("latents/diffreact2d_train.zarr.zip") as store:
        assert store.arrays["latent"].shape == (16, FRAMES, 16, 8)
        assert np.isfinite(store["latent"]).all()


def test_operator_is_better_than_persistence_and_reconstruction_than_the_mean(folder: Path) -> None:
    found = {name: row["nrmse"]["mean"] for name, row in rows().items()}
    assert all(math.isfinite(value) for value in found.values())
    assert found["operator"] < found["persistence"]
    assert found["autoencoder_floor"] < 1


def test_prediction_has_the_channels_by_name_and_starts_at_the_given_state(folder: Path) -> None:
    with ups_store.open("predicted.zarr.zip") as store:
        spec, fields = store.arrays["fields"], store["fields"]
        assert dict(spec.attrs or {}) == {"channels": ["u", "v"]}
        assert store.dims["fields"] == ("sample", "time", "y", "x", "channel")
    assert fields.shape == (2, 4, POINTS, POINTS, 2)
    np.testing.assert_array_equal(fields[:, 0], training_fields()[:2, 0].astype(np.float32))
    rollout = ups.load(OPERATOR).rollout(torch.from_numpy(fields[:, 0].copy()), 3)
    np.testing.assert_allclose(fields[:, 1:], rollout.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(fields[..., 0] - fields[..., 1]).mean() > 0.1
