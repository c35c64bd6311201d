"""The velocity network: corrects nothing at first, is conditioned on all that it is given, and trainable."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from ups.diffusion.paths import LAST_TIME, datum_of_velocity
from ups.diffusion.samplers import Sampler, sample
from ups.errors import ShapeError
from ups.grid import PERIODIC
from ups.models.corrector import VelocityNetwork
from ups.models.operator_blocks import TokenGeometry
from ups.models.operator_size import Mixer, OperatorSize, TokenAxis
from ups.nn.layers import Condition

B, L, D = 3, 16, 2
BOUNDARY = ("dirichlet",)


def untrained(mixer: Mixer = "spectral", *, num_given: int = 2) -> VelocityNetwork:
    size = OperatorSize(width=16, depths=(1, 1), num_heads=2, mixers=(mixer,))
    axes = (TokenAxis(L, True),)
    return VelocityNetwork(
        D, num_given=num_given, num_tasks=2, ranges=[(0.01, 0.1)], size=size, axes=axes
    ).eval()


def trained_like(mixer: Mixer = "spectral", *, num_given: int = 2) -> VelocityNetwork:
    network = untrained(mixer, num_given=num_given)
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.2)
    return network


def called(network: VelocityNetwork, **changed: Tensor | TokenGeometry) -> Tensor:
    torch.manual_seed(0)
    x, z, op = torch.randn(3, B, L, D)
    values = {
        "x": x,
        "t": torch.full((B,), 0.4),
        "z": z,
        "op": op,
        "dt": torch.full((B,), 0.1),
        "parameters": torch.full((B, 1), 0.02),
        "task": torch.zeros(B, dtype=torch.int64),
        "geometry": network.geometry((L,), BOUNDARY, steady=False),
        **changed,
    }
    geometry = values["geometry"]
    condition = Condition(values["task"], values["parameters"])
    conditions = network.conditions(condition, values["dt"], geometry)
    given = [values["z"], values["op"]][: network.dims[0] // D - 1]
    return network.velocity(values["x"], values["t"], given, conditions, geometry)


@pytest.mark.parametrize("mixer", ["spectral", "attention"])
@pytest.mark.parametrize("name", get_args(Sampler))
def test_flow_along_an_untrained_velocity_ends_at_zero(mixer: Mixer, name: Sampler) -> None:
    network = untrained(mixer)
    end = sample(lambda x, t: called(network, x=x, t=t), torch.randn(B, L, D), sampler=name, num_steps=6)
    assert not end.x.any()


@torch.no_grad()
def test_velocity_depends_on_everything_that_it_is_given() -> None:
    network = trained_like()
    plain = called(network)
    other = {
        "x": torch.randn(B, L, D),
        "t": torch.full((B,), 0.7),
        "z": torch.randn(B, L, D),
        "op": torch.randn(B, L, D),
        "dt": torch.full((B,), 0.2),
        "parameters": torch.full((B, 1), 0.09),
        "task": torch.ones(B, dtype=torch.int64),
        "geometry": network.geometry((L,), ("neumann",), steady=False),
    }
    for name, value in other.items():
        assert not torch.allclose(called(network, **{name: value}), plain, atol=1e-4), name


def test_wraps_around_periodic_axes() -> None:
    network = trained_like().double()
    geometry = network.geometry((L,), (PERIODIC,), steady=False).double()
    values = torch.randn(3, B, L, D, dtype=torch.float64)
    plain, moved = (
        called(network, x=x, z=z, op=op, geometry=geometry) for x, z, op in (values, values.roll(2, dims=2))
    )
    torch.testing.assert_close(plain.roll(2, dims=1), moved, rtol=1e-5, atol=1e-5)


def test_prior_is_given_one_state() -> None:
    network = trained_like(num_given=1)
    assert called(network).shape == (B, L, D)
    with pytest.raises(ShapeError):
        trained_like(num_given=2).velocity(
            torch.zeros(B, L, D),
            torch.zeros(B),
            [torch.zeros(B, L, D)],
            network.conditions(
                Condition(0, torch.zeros(B, 1)),
                torch.ones(B),
                network.geometry((L,), BOUNDARY, steady=True),
            ),
            network.geometry((L,), BOUNDARY, steady=True),
        )


def test_every_weight_has_a_gradient_once_the_output_moves() -> None:
    network = trained_like()
    called(network).square().mean().backward()
    without = [name for name, weight in network.named_parameters() if weight.grad is None]
    assert not without


def test_velocity_and_datum_say_the_same() -> None:
    network, t = trained_like(), torch.full((B,), LAST_TIME)
    torch.manual_seed(0)
    x, z, op = torch.randn(3, B, L, D)
    geometry = network.geometry((L,), BOUNDARY, steady=False)
    condition = Condition(torch.zeros(B, dtype=torch.int64), torch.full((B, 1), 0.02))
    conditions = network.conditions(condition, torch.full((B,), 0.1), geometry)
    velocity = network.velocity(x, t, [z, op], conditions, geometry)
    datum = network.datum(x, t, [z, op], conditions, geometry)
    torch.testing.assert_close(datum_of_velocity(x, velocity, t), datum)
