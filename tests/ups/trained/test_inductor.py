"""What Inductor, the backend of torch.compile, makes of encoder and operator; needs a C++ compiler."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from burgers_encoder import T, X, make_checkpoint
from test_compiled_encoder import N, encoder_of
from test_simulator import fields_of, make_simulator

from ups.device import compiled_or_eager

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # of the compiler's own imports
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run compiled says nothing about the compiler."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()


def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    fields = random.standard_normal((N, T, X, 1)).astype(np.float32)
    return {"fields": fields, "nu": random.uniform(0.001, 0.01, N)}


def test_latents_of_a_compiled_encoder_are_those_of_the_model(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    plain, compiled, again = (
        encoder.encode(batch(), samples=np.arange(N))["latent"].astype(np.float64)
        for encoder in (encoder_of(path), encoder_of(path, compile=True), encoder_of(path, compile=True))
    )
    np.testing.assert_allclose(compiled, plain, rtol=2e-3, atol=1e-4)  # 2 steps of float16
    np.testing.assert_array_equal(again, compiled)


def test_compiled_operator_has_the_states_and_gradients_of_the_plain_one() -> None:
    simulator = make_simulator("fields")
    compiled = compiled_or_eager(simulator, mode="default")
    values, parameters = torch.from_numpy(fields_of()), torch.tensor([[torch.nan, 0.02]] * 2)
    state, dt_B = simulator.encode(values, parameters, task="burgers1d"), torch.full((2,), 0.1)
    found = []
    for model in (simulator, compiled):
        simulator.zero_grad()
        states = model(state, parameters, task="burgers1d", dt_B=dt_B)
        states.square().mean().backward()
        weights = [weight.grad for weight in simulator.operator.parameters() if weight.grad is not None]
        found.append([states.detach(), *weights])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-5)  # float32, sums in another order
