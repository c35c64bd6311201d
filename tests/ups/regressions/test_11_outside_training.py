"""Parameters and time steps that training knew nothing like are refused, unless they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_simulators import configure, make_data, make_simulator

import ups
import ups_store
from ups.errors import ConfigError
from ups.eval.predict import PredictionRequest, predict_store
from ups.trained.simulator import Simulator, save_simulator


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and an operator that knew nu = 0.1 and one time step."""
    root = make_data(tmp_path_factory.mktemp("data"))
    config = configure(root)
    settings = config.model_dump(mode="json")
    save_simulator(root / "operator.safetensors", make_simulator(config), config=settings, report={})
    return root


@pytest.mark.parametrize(
    "asked", [{"parameters": {"nu": 5.0}}, {"parameters": {"nu": torch.tensor([0.1, 0.2])}}, {"dt": 7.0}]
)
def test_rollout_outside_the_training_is_refused_unless_it_is_asked_for(
    root: Path, asked: dict[str, Any]
) -> None:
    simulator, fields = ups.load(root / "operator.safetensors"), torch.randn(2, 32, 1)
    assert isinstance(simulator, Simulator)
    with pytest.raises(ConfigError, match="in training") as caught:
        simulator.rollout(fields, 2, **asked)
    assert caught.value.kind == "outside_training"
    assert simulator.rollout(fields, 2, extrapolate=True, **asked).shape == (2, 2, 32, 1)
    dt = simulator.spec.tasks["burgers1d"].dt
    assert simulator.rollout(fields, 2, parameters={"nu": 0.1 + 1e-9}, dt=dt * (1 + 1e-6)).shape[1] == 2


def test_prediction_outside_the_training_is_refused_or_says_so_in_its_store(
    root: Path, tmp_path: Path, notes: list[str]
) -> None:
    (source,) = root.glob("*Burgers*.hdf5")
    given: dict[str, Any] = {"source": source, "checkpoint": root / "operator.safetensors", "split": "test"}
    given |= {"out": tmp_path / "a.zarr.zip", "parameters": {"nu": 5.0}, "dt": 7.0, "device": "cpu"}
    with pytest.raises(ConfigError) as caught:
        predict_store(PredictionRequest(**given))
    assert caught.value.kind == "outside_training"
    assert not given["out"].exists()
    predict_store(PredictionRequest(**given, extrapolate=True))
    with ups_store.open(given["out"]) as store:
        nu, dt = store.identity["extrapolated"]
        assert nu == "nu = 5, in training 0.1"
        assert dt.startswith("dt = 7, in training")
    assert any(note.startswith("warning: outside the training") for note in notes)
