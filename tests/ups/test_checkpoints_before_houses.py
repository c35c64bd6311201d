"""Checkpoints, latents and a stopped training that commit e492260 made work as they did then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from before_houses import unpack_corpus
from command_line import run_ups, run_ups_store

import ups
import ups_store

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # other processors add up in another order

pytestmark = pytest.mark.filterwarnings("ignore::ups.errors.MissedGatesWarning")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def forecasts(corpus: Path) -> dict[str, npt.NDArray[Any]]:
    with np.load(corpus / "forecasts.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", ["joint", "operator", "corrector", "student"])
def test_rollouts_are_those_of_then(corpus: Path, forecasts: dict[str, npt.NDArray[Any]], name: str) -> None:
    model = ups.load(corpus / "checkpoints" / f"{name}.safetensors")
    members = {"members": 2} if name in ("corrector", "student") else {}
    fields = model.rollout(forecasts["first"], 3, parameters={"nu": forecasts["nu"]}, **members)
    np.testing.assert_allclose(np.asarray(fields), forecasts[name], **TOLERANCE)


@pytest.mark.parametrize(("name", "array"), [("operator", "fields"), ("prior", "members")])
def test_steady_predictions_are_those_of_then(
    corpus: Path, forecasts: dict[str, npt.NDArray[Any]], tmp_path: Path, name: str, array: str
) -> None:
    source, out = corpus / "data" / "2D_DarcyFlow_beta1.0_Train.hdf5", tmp_path / "predicted.zarr.zip"
    options = ["--observed", "8", "--members", "2"] if name == "prior" else []
    checkpoint = corpus / "darcy" / f"{name}.safetensors"
    command = ["predict", source, "--checkpoint", checkpoint, "--out", out, "--split", "test", "--limit", "1"]
    done = run_ups(*command, *options, "-q")
    assert done.exit_code == 0, done.output
    with ups_store.open(out) as store:
        np.testing.assert_allclose(store[0][array], forecasts[f"darcy_{name}"], **TOLERANCE)


def test_evaluation_scores_operator_and_baselines_as_then(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(corpus)
    done = run_ups("evaluate", "--config", "run.yaml", "--out", tmp_path, "--json", "-q")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    expected = json.loads(Path("expected.json").read_text())["evaluation"]
    assert {name: row["nrmse"]["mean"] for name, row in rows.items()} == pytest.approx(expected, rel=1e-4)


def test_latents_of_then_are_still_valid(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)
    options = ["--checkpoint", "checkpoints/autoencoder.safetensors", "--cache-dtype", "float16"]
    done = run_ups_store("build", "--config", "run.yaml", "--cache-dir", "latents", *options)
    assert done.exit_code == 0, done.output
    assert done.output.count("valid") == 3, done.output


def test_stopped_training_continues_to_the_score_of_then(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(corpus, folder)
    monkeypatch.chdir(folder)
    changes = ["checkpoint.dir=stopped", "stages.operator.epochs=10"]
    done = run_ups("train", "--config", "run.yaml", "--stage", "operator", "-q", *changes)
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in Path("stopped/operator.jsonl").read_text().splitlines()]
    expected = json.loads(Path("expected.json").read_text())["continued"]
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 1]
    assert events[-1]["step"] == expected["steps"]
    assert events[-1]["report"]["score"] == pytest.approx(expected["nrmse"], rel=1e-3)
