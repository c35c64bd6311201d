"""Spectral convolution against sums over modes, at any length, resolution and number of axes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from ups.nn.spectral import SpectralConv, num_modes, padding_behind

B, W = 2, 4
Complex = npt.NDArray[np.complex128]
GRIDS = [(8,), (9,), (6, 8), (5, 7), (6, 7), (4, 5, 6), (3, 4, 5)]


def double(modes: tuple[int, ...], *, groups: int = 1) -> SpectralConv:
    return SpectralConv(W, modes=modes, groups=groups).double()


def matrix_of(conv: SpectralConv, mode: tuple[int, ...]) -> Complex:
    """The complex matrix of a mode, W x W, from the weights; negative modes lie at the end of an axis."""
    groups = conv.weight.detach().numpy()[mode]
    whole = np.zeros((W, W), np.complex128)
    each = W // conv.groups
    for number, block in enumerate(groups):
        rows = slice(number * each, (number + 1) * each)
        whole[rows, rows] = block[:, 0] + 1j * block[:, 1]
    return whole


def summed(conv: SpectralConv, x: Tensor) -> npt.NDArray[np.float64]:
    """Li et al. 2021, eq. 5, as a sum over modes of a direct Fourier sum."""
    grid = tuple(x.shape[2:])
    ndim, num = len(grid), math.prod(grid)
    places = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(num, ndim)
    flat = x.flatten(2).numpy()
    out = np.zeros((len(x), W, num))
    ranges = [
        range(-min(m, n // 2), min(m, (n + 1) // 2)) for m, n in zip(conv.modes[:-1], grid[:-1], strict=True)
    ]
    for mode in itertools.product(*ranges, range(min(conv.modes[-1], grid[-1] // 2 + 1))):
        wave = np.exp(2j * np.pi * (places @ (np.array(mode) / np.array(grid))))
        coefficient = flat @ wave.conj() / num
        changed = coefficient @ matrix_of(conv, mode)
        is_own_conjugate = mode[-1] in (0, grid[-1] / 2)  # of others the conjugate is added
        out += (1 if is_own_conjugate else 2) * (changed[..., None] * wave).real
    return out.reshape(x.shape)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("grid", GRIDS)
@torch.no_grad()
def test_spectral_conv_of_all_modes_is_the_sum_over_them(grid: tuple[int, ...], groups: int) -> None:
    conv, x = double(num_modes(grid), groups=groups), torch.randn(B, W, *grid, dtype=torch.float64)
    np.testing.assert_allclose(conv(x).numpy(), summed(conv, x), atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS)
@torch.no_grad()
def test_spectral_conv_of_some_modes_is_the_sum_over_them(grid: tuple[int, ...]) -> None:
    conv, x = double((2,) * len(grid)), torch.randn(B, W, *grid, dtype=torch.float64)
    np.testing.assert_allclose(conv(x).numpy(), summed(conv, x), atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS)
@torch.no_grad()
def test_spectral_conv_of_more_modes_than_a_grid_has_uses_those_it_has(grid: tuple[int, ...]) -> None:
    conv, x = double((9,) * len(grid)), torch.randn(B, W, *grid, dtype=torch.float64)
    np.testing.assert_allclose(conv(x).numpy(), summed(conv, x), atol=1e-12)


@pytest.mark.parametrize("modes", [3, 9])
@pytest.mark.parametrize("grid", GRIDS)
@torch.no_grad()
def test_spectral_conv_commutes_with_every_shift(grid: tuple[int, ...], modes: int) -> None:
    conv, x = double((modes,) * len(grid)), torch.randn(B, W, *grid, dtype=torch.float64)
    for axis in range(2, x.ndim):
        torch.testing.assert_close(conv(x.roll(1, axis)), conv(x).roll(1, axis))


@pytest.mark.parametrize("ndim", [1, 2, 3])
@torch.no_grad()
def test_spectral_conv_is_the_same_operator_at_every_resolution(ndim: int) -> None:
    """Of what is below the coarse grid's last mode, which that grid can't tell from its negative."""
    coarse, fine = (8,) * ndim, (16,) * ndim
    conv = double(num_modes(coarse))
    low = double((4,) * ndim)(torch.randn(B, W, *fine, dtype=torch.float64))
    # of every axis but the last the modes -4 .. 3 are kept: leave out -4
    spectrum = torch.fft.fftn(low, dim=tuple(range(2, 2 + ndim)))
    for axis in range(2, 2 + ndim):
        spectrum = spectrum.movedim(axis, 0)
        spectrum[4:13] = 0
        spectrum = spectrum.movedim(0, axis)
    band_limited = torch.fft.ifftn(spectrum, dim=tuple(range(2, 2 + ndim))).real
    every_second = (slice(None), slice(None), *(slice(None, None, 2),) * ndim)
    assert band_limited.std() > 0.01
    torch.testing.assert_close(conv(band_limited)[every_second], conv(band_limited[every_second]))


@pytest.mark.parametrize("grid", [(7,), (4, 5), (3, 4, 4)])
def test_gradients_of_spectral_conv_are_those_of_finite_differences(grid: tuple[int, ...]) -> None:
    conv = double((2,) * len(grid))
    x = torch.randn(1, W, *grid, dtype=torch.float64, requires_grad=True)
    given = (x, conv.weight)
    assert torch.autograd.gradcheck(lambda x, _: conv(x), given, fast_mode=True)


def test_spectral_conv_computes_in_single_precision_under_autocast() -> None:
    conv, x = SpectralConv(W, modes=(5,)), torch.randn(B, W, 16)
    expected = conv(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(conv(x), expected)
        half = conv(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.02, rtol=0.02)


def test_zeros_behind_are_a_share_of_the_length_of_axes_with_ends() -> None:
    assert padding_behind((32, 6, 8), (False, True, False), share=0.125) == [0, 1, 0, 0, 0, 4]
    assert padding_behind((4,), (False,), share=0.0) == [0, 0]
