"""The baselines: persistence at first, equivariant where axes are periodic, able to learn."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from ups.errors import ConfigError
from ups.eval.baselines import FourierNeuralOperator, SpectralConv, UNet

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
@pytest.mark.parametrize("periodic", [(True,), (False,), (True, True), (False, True)])
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


@pytest.mark.parametrize("ndim", [1, 2])
def test_spectral_conv_keeps_the_lowest_modes_only(ndim: int) -> None:
    conv = SpectralConv(1, modes=3, ndim=ndim)
    out = conv(torch.randn(1, 1, *GRIDS[ndim]))
    spectrum = torch.fft.rfftn(out, dim=tuple(range(2, 2 + ndim)), norm="forward").abs()[0, 0]
    assert (spectrum[..., 3:] < 1e-6).all()
    if ndim == 2:
        assert (spectrum[4:-3] < 1e-6).all()  # mode -3 of a real field has a twin, mode 3
        assert (spectrum[-3:, :3] > 0).any()


def test_spectral_conv_is_the_same_operator_at_every_resolution() -> None:
    conv = SpectralConv(1, modes=4, ndim=1)
    coarse, fine = (torch.sin(2 * torch.pi * torch.arange(num) / num)[None, None] for num in (32, 64))
    torch.testing.assert_close(conv(fine)[..., ::2], conv(coarse), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("grid", [(16,), (15,), (8, 12), (7, 12), (8, 11), (9, 11)])
@torch.no_grad()
def test_spectral_conv_is_the_sum_over_modes(grid: tuple[int, ...]) -> None:
    """Li et al. 2021, eq. 5, by sums in double precision; the layer computes in single precision."""
    modes, ndim, num = 3, len(grid), math.prod(grid)
    conv, x = SpectralConv(2, modes=modes, ndim=ndim), torch.randn(B, 2, *grid)
    weights = torch.view_as_complex(conv.weight).to(torch.complex128)
    places = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), -1).reshape(num, ndim)
    expected = torch.zeros(B, 2, num, dtype=torch.float64)
    for mode in itertools.product(*[range(-modes, modes)] * (ndim - 1), range(modes)):
        corner = int(mode[0] < 0)  # negative modes of the first of two axes have weights of their own
        phase = 2 * torch.pi * (places.double() @ (torch.tensor(mode) / torch.tensor(grid).double()))
        wave = torch.polar(torch.ones_like(phase), phase)
        spectrum = x.flatten(2).to(wave.dtype) @ wave.conj() / num
        change = torch.einsum("bi,io->bo", spectrum, weights[(corner, ..., *mode)])
        twice = 1 + (mode[-1] > 0)  # a mode and its conjugate, which isn't stored
        expected += twice * (change[..., None] * wave).real
    torch.testing.assert_close(conv(x).flatten(2).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["fno", "unet"])
def test_untrained_baseline_of_whole_fields_is_zero(kind: str) -> None:
    field = torch.randn(B, C, 32)
    assert torch.equal(make(kind, (True,), predicts_change=False)(field, torch.ones(B, P)), 0 * field)
