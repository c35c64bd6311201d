"""Windows of a token grid: cut and joined, and attention compared with full attention under a mask."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ups.grid import window_size
from ups.nn import shifted_window
from ups.nn.shifted_window import (
    ShiftedWindowAttention,
    Windows,
    biased_attention,
    merge_windows,
    partition_windows,
    relative_offsets,
)


@pytest.mark.parametrize(
    ("length", "size"), [(1, 1), (8, 8), (16, 8), (12, 6), (32, 8), (20, 5), (14, 7), (13, 13), (22, 22)]
)
def test_window_size_divides_the_axis(length: int, size: int) -> None:
    assert window_size(length) == size


@pytest.mark.parametrize(("grid", "window"), [((16,), (4,)), ((8, 12), (4, 6)), ((4, 4, 6), (2, 4, 3))])
def test_partition_windows_and_merge_windows_are_inverse(
    grid: tuple[int, ...], window: tuple[int, ...]
) -> None:
    tokens = torch.randn(2, *grid, 3)
    windows = partition_windows(tokens, window)
    assert windows.shape == (2 * math.prod(grid) // math.prod(window), math.prod(window), 3)
    assert torch.equal(merge_windows(windows, window, grid), tokens)


def test_partition_windows_holds_neighbours() -> None:
    tokens = torch.arange(4 * 6).reshape(1, 4, 6, 1)
    assert partition_windows(tokens, (2, 3))[1, :, 0].tolist() == [3, 4, 5, 9, 10, 11]


def test_relative_offsets_around_a_circle_take_the_shorter_way() -> None:
    offsets = relative_offsets((4,), [True])[..., 0]
    assert offsets[0].tolist() == [0, -1, 2, 1]
    for step in range(4):
        assert torch.equal(offsets.roll([step, step], [0, 1]), offsets)


def full_attention(
    attention: ShiftedWindowAttention, tokens: Tensor, periodic: Sequence[bool], window: tuple[int, ...]
) -> Tensor:
    """The definition: every token attends to those of its window, found by coordinates, one by one."""
    grid = tuple(tokens.shape[1:-1])
    places = torch.cartesian_prod(*(torch.arange(length) for length in grid)).reshape(-1, len(grid))
    pairs = zip(grid, window, strict=True)
    shift = [size // 2 if attention.is_shifted and size < length else 0 for length, size in pairs]
    lengths, sizes = torch.tensor(grid), torch.tensor(window)
    rolled = (places - torch.tensor(shift)) % lengths
    sees = (rolled // sizes)[:, None].eq((rolled // sizes)[None]).all(-1)
    for axis, (step, wraps) in enumerate(zip(shift, periodic, strict=True)):
        if step and not wraps:  # the last window holds the two ends of the axis, which don't touch
            is_end = places[:, axis] < step
            sees &= is_end[:, None] == is_end[None]
    inside = rolled % sizes
    number = (inside * torch.tensor([math.prod(window[axis + 1 :]) for axis in range(len(window))])).sum(-1)
    windows = Windows(grid, periodic, largest=max(window))
    bias = attention.bias(windows.offsets)[:, number[:, None], number[None]]
    flat = tokens.flatten(1, -2)
    query, key, value = (
        part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for part in attention.qkv(flat).chunk(3, -1)
    )
    scale = attention.log_scale.exp()
    scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-1, -2) * scale + bias
    weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
    return attention.out((weights @ value).transpose(1, 2).flatten(2)).unflatten(1, grid)


@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize(
    ("grid", "periodic"),
    [
        ((16,), (True,)),
        ((16,), (False,)),
        ((4,), (True,)),
        ((8, 12), (True, True)),
        ((8, 12), (False, True)),
        ((8, 12), (False, False)),
        ((16, 1), (False, True)),
    ],
)
def test_window_attention_is_full_attention_under_a_mask(
    grid: tuple[int, ...], periodic: tuple[bool, ...], is_shifted: bool
) -> None:
    attention = ShiftedWindowAttention(12, num_heads=3, num_axes=len(grid), is_shifted=is_shifted)
    tokens = torch.randn(2, *grid, 12)
    window = tuple(min(4, length) for length in grid)
    expected = full_attention(attention, tokens, periodic, window)
    torch.testing.assert_close(
        attention(tokens, Windows(grid, periodic, largest=4)), expected, rtol=1e-4, atol=1e-5
    )


def test_mask_of_shifted_windows_is_one_for_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def watched(*args: Tensor, bias: Tensor) -> Tensor:
        seen.append(bias)
        return biased_attention(*args, bias=bias)

    monkeypatch.setattr(shifted_window, "biased_attention", watched)
    attention = ShiftedWindowAttention(8, num_heads=2, num_axes=1, is_shifted=True)
    attention(torch.randn(5, 16, 8), Windows((16,), (False,), largest=4))
    assert [mask.shape for mask in seen] == [(1, 4 * 2, 4, 4)]  # 4 windows, 2 heads


def test_attention_on_the_cpu_is_that_of_pytorch() -> None:
    query, key, value = torch.randn(3, 5, 2, 4, 8).unbind()
    bias = torch.randn(1, 2, 4, 4).masked_fill(torch.eye(4, dtype=torch.bool), -1e4)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
    torch.testing.assert_close(biased_attention(query, key, value, bias=bias), expected)


def test_window_attention_gives_gradients_to_every_parameter() -> None:
    attention = ShiftedWindowAttention(8, num_heads=2, num_axes=2, is_shifted=True)
    attention(torch.randn(1, 16, 16, 8), Windows((16, 16), (False, True))).square().sum().backward()
    without = [
        name for name, weight in attention.named_parameters() if weight.grad is None or not weight.grad.any()
    ]
    assert without == []
