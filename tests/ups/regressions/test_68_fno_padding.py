"""What the FNO continues behind walls by zeros changes what it computes, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from ups.models.grid_networks import FourierNeuralOperator, UNet


def make(*, wall: bool, points: int = 32) -> tuple[FourierNeuralOperator, torch.Tensor]:
    """An FNO on a line of its own weights, and a field that differs at both ends."""
    torch.manual_seed(0)
    network = FourierNeuralOperator(
        1, width=8, modes=8, depth=2, num_parameters=0, periodic=(not wall,)
    ).double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.3)
    return network, torch.linspace(-1, 1, points, dtype=torch.float64).reshape(1, 1, points)


def shift_error(network: FourierNeuralOperator, field: torch.Tensor, *, num_beside: int) -> float:
    """By how much a roll of what is given fails to roll the output."""
    beside = torch.zeros(
        1, num_beside, field.shape[-1], dtype=field.dtype
    )  # a wall's coordinate says nothing
    rolled = network.advance(field.roll(5, -1), beside)
    return (rolled - network.advance(field, beside).roll(5, -1)).abs().max().item()


def test_walls_end_what_periodic_axes_go_on_with() -> None:
    around, field = make(wall=False)
    assert shift_error(around, field, num_beside=0) < 1e-10
    between, field = make(wall=True)
    assert shift_error(between, field, num_beside=1) > 1e-3  # without zeros behind the wall it would be 0


@pytest.mark.parametrize("points", [32, 40])
def test_length_of_the_zeros_is_an_eighth_of_the_axis(points: int) -> None:
    network, field = make(wall=True, points=points)
    lengths: list[int] = []
    for layer in network.spectral:
        layer.register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape[-1]))
    out = network(field, torch.zeros(1, 0, dtype=field.dtype))
    assert lengths == [points + points // 8] * 2
    assert out.shape == field.shape


def test_unet_ends_at_walls_too() -> None:
    torch.manual_seed(0)
    for periodic in (True, False):
        network = UNet(1, width=8, levels=2, num_parameters=0, periodic=(periodic,)).double()
        with torch.no_grad():
            network.out.weight.normal_()  # type: ignore[operator, union-attr]
        field = torch.randn(1, 1, 32, dtype=torch.float64)
        beside = torch.zeros(1, int(not periodic), 32, dtype=torch.float64)
        rolled, plain = network.advance(field.roll(8, -1), beside), network.advance(field, beside).roll(8, -1)
        assert torch.allclose(rolled, plain) == periodic
