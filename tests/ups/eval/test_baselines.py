"""The baselines: persistence at first, equivariant where axes are periodic, able to learn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ups.errors import ConfigError
from ups.models.grid_networks import FourierNeuralOperator, UNet

B, C, P = 2, 2, 1
GRIDS = {1: (32,), 2: (16, 32)}


def make(kind: str, periodic: tuple[bool, ...], **options: bool) -> nn.Module:
    if kind == "fno":
        return FourierNeuralOperator(
            C, num_parameters=P, periodic=periodic, width=8, modes=4, depth=2, **options
        )
    return UNet(C, num_parameters=P, periodic=periodic, width=8, levels=3, **options)


def awake(model: nn.Module) -> nn.Module:
    """With an output layer that isn't zero."""
    for weight in model.out.parameters():
        nn.init.normal_(weight, std=0.1)
    return model.eval()


@pytest.mark.parametrize("kind", ["fno", "unet"])
@pytest.mark.parametrize("periodic", [(True,), (False, True)])
def test_untrained_baseline_is_persistence(kind: str, periodic: tuple[bool, ...]) -> None:
    field = torch.randn(B, C, *GRIDS[len(periodic)])
    assert torch.equal(make(kind, periodic)(field, torch.ones(B, P)), field)


@pytest.mark.parametrize(("kind", "shift"), [("fno", 5), ("unet", 4)])
@pytest.mark.parametrize("ndim", [1, 2])
def test_baseline_commutes_with_shifts_along_periodic_axes(kind: str, shift: int, ndim: int) -> None:
    model, field = awake(make(kind, (True,) * ndim)), torch.randn(B, C, *GRIDS[ndim])
    given = torch.ones(B, P)
    shifted = model(field.roll(shift, -1), given)
    torch.testing.assert_close(shifted, model(field, given).roll(shift, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["fno", "unet"])
def test_baseline_sees_parameters_and_walls(kind: str) -> None:
    model, field = awake(make(kind, (False,))), torch.randn(B, C, 32)
    out = model(field, torch.zeros(B, P))
    assert not torch.allclose(model(field, torch.ones(B, P)), out)
    assert not torch.allclose(model(field.roll(4, -1), torch.zeros(B, P)), out.roll(4, -1), atol=1e-4)


@pytest.mark.parametrize("kind", ["fno", "unet"])
def test_baseline_learns_a_shift(kind: str) -> None:
    model = make(kind, (True,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(32) / 32
    losses = []
    for _ in range(60):
        phase = torch.rand(8, C, 1, generator=generator)
        field = torch.sin(2 * torch.pi * (places + phase))
        loss = (model(field, torch.zeros(8, P)) - field.roll(2, -1)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]


def test_baselines_of_three_axes_are_refused() -> None:
    with pytest.raises(ConfigError, match="1D and 2D"):
        UNet(C, num_parameters=P, periodic=(True,) * 3)


@pytest.mark.parametrize("kind", ["fno", "unet"])
def test_untrained_baseline_of_whole_fields_is_zero(kind: str) -> None:
    field = torch.randn(B, C, 32)
    assert torch.equal(make(kind, (True,), predicts_change=False)(field, torch.ones(B, P)), 0 * field)
