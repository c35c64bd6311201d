"""What is linear in an operator's own step: neighbours of tokens, the fit, and noise that is left alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ups_store
from ups.data.seams import measure_seams
from ups.nn.patches import NeighbourMap, with_neighbours

PREDICTED, RESIDUAL = "predicted", "residual"


def make_store(path: Path, predicted: torch.Tensor, residual: torch.Tensor) -> ups_store.Store:
    arrays = {PREDICTED: predicted.numpy(), RESIDUAL: residual.numpy()}
    specs = {name: ups_store.ArraySpec(values.shape, "float32") for name, values in arrays.items()}
    with ups_store.create(path, specs, identity={"kind": "test"}, attrs={}) as writer:
        writer.commit_many(np.arange(len(predicted)), arrays)
        writer.finish()
    store = ups_store.open(path)
    assert isinstance(store, ups_store.Store)
    return store


def simulator_of(dim: int, tokens: tuple[int, ...], periodic: tuple[bool, ...], *, own_dim: int) -> Any:
    task = SimpleNamespace(tokens=tokens, is_periodic=periodic)
    return SimpleNamespace(
        spec=SimpleNamespace(tasks={"toy": task}, state_dim=dim), own_dim=lambda task: own_dim
    )


def test_neighbours_wrap_around_periodic_axes_and_are_zero_beyond_walls() -> None:
    tokens = torch.arange(6.0).reshape(1, 6, 1)
    found = with_neighbours(tokens, (2, 3), (False, True)).reshape(2, 3, 5)
    assert found[0, 0].tolist() == [0, 0, 3, 2, 1]  # itself, along the first axis, along the second
    assert found[1, 2].tolist() == [5, 2, 0, 4, 3]


def test_map_of_the_prediction_is_found_and_leaves_sigma(tmp_path: Path) -> None:
    torch.manual_seed(0)
    true = NeighbourMap(3, grid=(8,), periodic=(True,))
    true.weight.copy_(0.3 * torch.randn_like(true.weight))
    predicted = torch.randn(200, 8, 3)
    residual = true(predicted) + 0.1 * torch.randn(200, 8, 3)
    store = make_store(tmp_path / "s.zarr.zip", predicted, residual)
    found = measure_seams(store, simulator_of(3, (8,), (True,), own_dim=3), "toy")
    torch.testing.assert_close(found.weight, true.weight, rtol=0, atol=0.02)
    assert found.sigma == pytest.approx(0.1, rel=0.05)


def test_residuals_that_have_nothing_to_do_with_the_prediction_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    predicted, residual = torch.randn(6, 4, 4), torch.randn(6, 4, 4)
    residual[..., 3] = predicted[..., 3] = 0  # padding
    store = make_store(tmp_path / "s.zarr.zip", predicted, residual)
    found = measure_seams(store, simulator_of(4, (4,), (True,), own_dim=3), "toy")
    assert not found.weight.any()
    assert found.sigma == pytest.approx(float(residual[..., :3].square().mean().sqrt()), rel=1e-5)
