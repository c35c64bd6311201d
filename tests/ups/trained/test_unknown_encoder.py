"""An operator that was trained on latents of which nothing says what encoded them: it is never decoded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from operator_runs import configure, made_once, shared_run

import ups
import ups_store
from ups.errors import ConfigError
from ups.eval.evaluate import evaluate
from ups.eval.predict import PredictionRequest, predict_store
from ups.eval.runs import Run
from ups.train.run import run_stage
from ups.trained.specs import SimulatorSpec

torch.set_num_threads(1)


def forget_encoder(path: Path) -> None:
    """The same store, as an import of `.pt` files leaves it."""
    with ups_store.open(path) as store:
        num, arrays, specs = len(store), store.gather(range(len(store))), dict(store.arrays)
        given: dict[str, Any] = {"constants": store.constants, "attrs": store.attrs}
        given["dims"] = {name: store.dims[name] for name in store.constants}
        content = {**store.identity, "encoder": "unknown"}
    path.unlink()
    with ups_store.create(path, specs, **given, identity=content) as writer:
        writer.commit_many(range(num), arrays)
        writer.finish()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that was allowed to train on such latents, and its report; no source is left."""
    report: dict[str, Any] = {}

    prepared = shared_run(tmp_path_factory)

    def make(folder: Path) -> None:
        shutil.copytree(prepared, folder, dirs_exist_ok=True)
        for split in ("train", "val", "test"):
            forget_encoder(folder / "latents" / f"burgers1d_{split}.zarr.zip")
        (folder / "data").rename(folder / "gone")
        (folder / "cache").rename(folder / "stores")
        config = configure(folder, "data.tasks=[burgers1d]", "training.allow_unknown_encoder=true")
        report.update(run_stage("operator", config))

    return made_once(tmp_path_factory, make), report


@pytest.fixture
def folder(trained: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained[0])
    return trained[0]


def test_training_validates_on_latents_and_says_so(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, report = trained
    assert report["nrmse_of"] == "latents"
    assert report["floor_nrmse"] == {}
    assert report["score"] < report["persistence_nrmse"]["burgers1d"]
    records = map(json.loads, (folder / "checkpoints" / "operator.jsonl").read_text().splitlines())
    names = {name for record in records for name in record if name.startswith("val/")}
    assert names == {"val/latent_nrmse/burgers1d"}


def test_checkpoint_remembers_it_and_refuses_to_decode(folder: Path) -> None:
    simulator = ups.load(folder / "checkpoints" / "operator.safetensors")
    spec = simulator.spec
    assert (spec.is_encoder_known, spec.autoencoder_sha256) == (False, None)
    assert SimulatorSpec.from_json(spec.to_json()) == spec
    calls = (
        lambda: simulator.rollout(np.ones((1, 32, 1), np.float32), 2),
        lambda: simulator.decode(torch.zeros(1, 8, 2), torch.zeros(1, 1), task="burgers1d"),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="of an unknown encoder") as caught:
            call()
        assert caught.value.kind == "unknown_encoder"
        assert "`ups evaluate`" in str(caught.value)


def test_evaluation_without_the_flag_compares_latents(folder: Path) -> None:
    simulator = ups.load(folder / "checkpoints" / "operator.safetensors")
    (task,) = evaluate(configure(folder, "data.tasks=[burgers1d]"), [Run(simulator)]).tasks
    assert task.space == "latent"
    assert [row.name for row in task.rows] == ["operator", "persistence", "mean"]
    assert "frmse_low" not in task.rows[0].scores.metrics
    assert "Errors are of latents" in task.protocol


def test_prediction_is_refused_before_a_file_is_begun(folder: Path, tmp_path: Path) -> None:
    request = PredictionRequest(
        source=folder / "stores" / "burgers1d_test.zarr.zip",
        checkpoint=folder / "checkpoints" / "operator.safetensors",
        out=tmp_path / "out.zarr.zip",
        device="cpu",
    )
    with pytest.raises(ConfigError) as caught:
        predict_store(request)
    assert caught.value.kind == "unknown_encoder"
    assert list(tmp_path.iterdir()) == []


def test_validation_needs_the_latents_of_its_split(folder: Path, tmp_path: Path) -> None:
    (folder / "latents" / "burgers1d_val.zarr.zip").rename(tmp_path / "val.zarr.zip")
    overrides = (
        "data.tasks=[burgers1d]",
        "training.allow_unknown_encoder=true",
        f"checkpoint.dir={tmp_path}",
    )
    try:
        with pytest.raises(ConfigError, match="no latent store of burgers1d val") as caught:
            run_stage(
                "operator",
                configure(folder, *overrides, "latent.checkpoint=checkpoints/autoencoder.safetensors"),
            )
    finally:
        (tmp_path / "val.zarr.zip").rename(folder / "latents" / "burgers1d_val.zarr.zip")
    assert "import those of this split" in str(caught.value)
