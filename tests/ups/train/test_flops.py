"""Counted floating-point operations against counts by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from small_simulators import configure, make_data, make_simulator
from torch import Tensor
from torch.nn import functional

from ups.models.grid_networks import FourierNeuralOperator, UNet
from ups.train.flops import count_flops, fft_flops

B, W, G = 3, 4, 16


def both_passes(work: Callable[[], Tensor]) -> int:
    return count_flops(lambda: work().abs().sum().backward())


@pytest.mark.parametrize("axes", [(2,), (2, 3)])
def test_fft_takes_5_n_log_n_and_half_of_it_for_real_numbers(axes: tuple[int, ...]) -> None:
    x = torch.randn(B, W, 8, 16)
    num_points = math.prod(x.shape[axis] for axis in axes)
    num_transforms = x.numel() // num_points
    expected = num_transforms * 5 * num_points * math.log2(num_points)
    spectrum = torch.fft.rfftn(x, dim=axes)
    back = {"s": [x.shape[axis] for axis in axes], "dim": axes}
    assert count_flops(lambda: torch.fft.fftn(x.to(torch.complex64), dim=axes)) == expected
    assert count_flops(lambda: torch.fft.rfftn(x, dim=axes)) == expected / 2
    assert count_flops(lambda: torch.fft.irfftn(spectrum, **back)) == expected / 2


def test_gradient_of_an_fft_is_an_fft() -> None:
    """Of a real transform PyTorch computes it by a complex one; of its inverse by a real one."""
    x = torch.randn(B, W, G, requires_grad=True)
    complex_flops = B * W * 5 * G * math.log2(G)
    assert both_passes(lambda: torch.fft.rfft(x)) == complex_flops / 2 + complex_flops
    spectrum = torch.fft.rfft(x).detach().requires_grad_()
    assert both_passes(lambda: torch.fft.irfft(spectrum, n=G)) == complex_flops


def test_a_transform_of_one_point_costs_nothing() -> None:
    assert fft_flops((5, 1), (1,), is_real=False) == 0


def test_complex_products_are_four_real_ones() -> None:
    x, weight = torch.randn(B, W, 5, dtype=torch.complex64), torch.randn(W, 7, 5, dtype=torch.complex64)
    product = count_flops(lambda: torch.einsum("bim,iom->bom", x, weight))
    assert product == 4 * count_flops(lambda: torch.einsum("bim,iom->bom", x.real, weight.real))
    assert product == 8 * B * W * 7 * 5
    a, b = torch.randn(3, 4, dtype=torch.complex64), torch.randn(4, 6, dtype=torch.complex64)
    assert count_flops(lambda: a @ b) == 8 * 3 * 4 * 6


def test_attention_counts_its_products_whichever_kernel_computes_it() -> None:
    heads, length, dim = 2, 8, 4
    q, k, v = (torch.randn(B, heads, length, dim, requires_grad=True) for _ in range(3))
    once = 2 * B * heads * length * length * dim
    counted = []
    for kernel in (torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH):
        with torch.nn.attention.sdpa_kernel(kernel):
            counted.append(both_passes(lambda: functional.scaled_dot_product_attention(q, k, v)))
    assert counted == [6 * once, 6 * once]


def test_step_of_the_fno_is_the_sum_of_its_layers() -> None:
    """Forward: lift, per layer two real FFTs, a complex product of the modes and a pointwise one, and out."""
    modes, depth = 3, 2
    model = FourierNeuralOperator(1, num_parameters=0, periodic=(True,), width=W, modes=modes, depth=depth)
    field, parameters = torch.randn(B, 1, G), torch.zeros(B, 0)
    fft = B * W * 2.5 * G * math.log2(G)
    mixed, local = 8 * B * W * W * modes, 2 * B * G * W * W
    ends = 2 * B * G * (W + 4 * W * W + 4 * W)
    forward = ends + depth * (2 * fft + mixed + local)
    assert count_flops(lambda: model(field, parameters)) == forward
    # Backward: each product twice (of the input and of the weights; the data needs none), and of the FFTs a
    # complex and a real one.
    backward = 2 * ends - 2 * B * G * W + depth * (3 * fft + 2 * mixed + 2 * local)
    assert both_passes(lambda: model(field, parameters)) == forward + backward


def test_step_of_the_unet_is_the_sum_of_its_convolutions() -> None:
    model = UNet(1, num_parameters=0, periodic=(True,), width=W, levels=1)
    forward = 2 * B * G * (3 * W + 3 * W * W + W)
    assert count_flops(lambda: model(torch.randn(B, 1, G), torch.zeros(B, 0))) == forward


def test_step_of_the_operator_grows_with_its_steps_and_rows(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = configure(make_data(tmp_path_factory.mktemp("data")))
    simulator = make_simulator(config).train()

    def count(rows: int, steps: int) -> int:
        state, parameters = torch.randn(rows, 8, 4), torch.full((rows, 1), 0.1)
        dt = torch.ones(rows)
        return count_flops(
            lambda: simulator(state, parameters, task="burgers1d", dt_B=dt, steps=steps).sum().backward()
        )

    assert count(6, 1) - count(4, 1) == count(4, 1) - count(2, 1) > 0
    # Conditions are embedded once for all steps, and the first step's input needs no gradient.
    into = 2 * 2 * 8 * simulator.operator.into.weight.numel()
    assert count(2, 3) - count(2, 2) == count(2, 2) - count(2, 1)
    assert into < count(2, 2) - count(2, 1) < count(2, 1) + into
