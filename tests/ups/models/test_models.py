"""Encoder and decoder: equivariance, any resolution, and agreement with plain forms of their parts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from ups.errors import ShapeError
from ups.grid import GridSpec, cut_grid
from ups.models.any_point_decoder import AnyPointDecoder, Neighbourhood, grid_queries
from ups.models.grid_encoder import GridEncoder, pixel_unshuffle
from ups.nn.layers import Condition, GridConv, GroupPooling

torch.set_num_threads(1)

# Points, periodic axes, patch size, tokens.
GRIDS = {
    "1d": ((32,), (True,), 4, 8),
    "1d pooled": ((32,), (True,), 4, 4),
    "1d with ends": ((32,), (False,), 4, 4),
    "2d": ((16, 8), (True, True), 2, 8),
    "2d mixed": ((8, 8), (True, False), 2, 4),
    "3d": ((8, 8, 8), (True, True, True), 2, 8),
}
BATCH = 3


def make_models(name: str, *, channels: int = 2) -> tuple[GridEncoder, AnyPointDecoder]:
    points, periodic, patch_size, num_tokens = GRIDS[name]
    grid = GridSpec(points, periodic, (("fields", channels), ("coefficient", 1)))
    cut = cut_grid(grid, patch_size=patch_size, num_tokens=num_tokens)
    torch.manual_seed(0)
    sizes = {"latent_dim": 3, "width": 16, "num_heads": 4, "num_tasks": 2, "num_parameters": 2}
    encoder = GridEncoder(grid, cut=cut, depth=2, **sizes).double()
    decoder = AnyPointDecoder(grid, cut=cut, depth=2, **sizes).double()
    for module in (encoder, decoder):
        _let_conditions_act(module)
    return encoder, decoder


def _let_conditions_act(module: nn.Module) -> None:
    """Modulations start at zero; any other value shows whether they reach the result."""
    for name, parameter in module.named_parameters():
        if "modulation" in name:
            nn.init.normal_(parameter, std=0.1)


def make_condition(*, task: int = 0, value: float = 0.01) -> Condition:
    parameters = torch.tensor([[value, math.nan]] * BATCH, dtype=torch.float64)
    return Condition(torch.full((BATCH,), task), parameters)


def make_values(encoder: GridEncoder, *, array: str = "fields") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, *encoder.grid.points, dict(encoder.grid.channels)[array])
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def make_tokens(encoder: GridEncoder) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(BATCH, math.prod(encoder.cut.tokens), 3, generator=generator, dtype=torch.float64)


def shift_tokens(tokens_BLD: Tensor, encoder: GridEncoder, *, axis: int) -> Tensor:
    return tokens_BLD.unflatten(1, encoder.cut.tokens).roll(1, dims=1 + axis).flatten(1, -2)


PERIODIC_AXES = [(name, axis) for name, grid in GRIDS.items() for axis, wraps in enumerate(grid[1]) if wraps]


@pytest.mark.parametrize(("name", "axis"), PERIODIC_AXES)
def test_field_shifted_by_a_token_gives_tokens_shifted_by_one(name: str, axis: int) -> None:
    encoder, _ = make_models(name)
    values = make_values(encoder)
    points = encoder.cut.points_per_token[axis]
    tokens = encoder(values, make_condition())
    shifted = encoder(values.roll(points, dims=1 + axis), make_condition())
    torch.testing.assert_close(shifted, shift_tokens(tokens, encoder, axis=axis), rtol=0, atol=1e-12)
    assert not torch.allclose(shifted, tokens, atol=1e-3)


@pytest.mark.parametrize(("name", "axis"), PERIODIC_AXES)
def test_queries_and_tokens_shifted_together_read_the_same(name: str, axis: int) -> None:
    encoder, decoder = make_models(name)
    tokens = make_tokens(encoder)
    query = torch.rand(20, encoder.grid.ndim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    moved = query.clone()
    moved[:, axis] += 1 / encoder.cut.tokens[axis]
    values = decoder(tokens, query, make_condition())
    shifted = decoder(shift_tokens(tokens, encoder, axis=axis), moved, make_condition())
    torch.testing.assert_close(shifted, values, rtol=0, atol=1e-11)


def test_periodic_axis_reads_the_same_a_period_later() -> None:
    encoder, decoder = make_models("2d mixed")
    tokens = make_tokens(encoder)
    query = torch.rand(20, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    later = query + torch.tensor([2.0, 0.0])
    torch.testing.assert_close(
        decoder(tokens, later, make_condition()), decoder(tokens, query, make_condition()), rtol=0, atol=1e-11
    )


def test_axis_with_ends_knows_where_it_ends() -> None:
    encoder, decoder = make_models("1d with ends")
    values = torch.ones(BATCH, 32, 2, dtype=torch.float64)
    tokens = encoder(values, make_condition())
    assert (tokens[:, 0] - tokens[:, 2]).abs().max() > 1e-3
    same = tokens[:, :1].expand(-1, 4, -1)
    left, middle = decoder(same, torch.tensor([[0.125], [0.375]]).double(), make_condition()).unbind(1)
    assert (left - middle).abs().max() > 1e-4


@pytest.mark.parametrize("name", GRIDS)
def test_values_have_no_jump_where_the_neighbours_change(name: str) -> None:
    encoder, decoder = make_models(name)
    tokens = make_tokens(encoder)
    edge = torch.full((1, encoder.grid.ndim), 0.5, dtype=torch.float64)  # between two tokens on every axis
    query = torch.cat([edge - 1e-7, edge + 1e-7])
    before, after = decoder(tokens, query, make_condition()).unbind(1)
    torch.testing.assert_close(before, after, rtol=0, atol=1e-5)
    nearby = decoder(tokens, edge + 0.01, make_condition())[:, 0]
    assert (nearby - after).abs().max() > 1e-3


def test_queries_per_frame_read_as_shared_ones() -> None:
    encoder, decoder = make_models("2d")
    tokens, query = make_tokens(encoder), grid_queries((4, 6)).double()
    shared = decoder(tokens, query, make_condition())
    per_frame = decoder(tokens, query.expand(BATCH, -1, -1), make_condition())
    torch.testing.assert_close(per_frame, shared)
    order = torch.randperm(len(query), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(decoder(tokens, query[order], make_condition()), shared[:, order])


def test_decoder_reads_at_any_resolution_the_same_function() -> None:
    encoder, decoder = make_models("1d")
    tokens = make_tokens(encoder)
    coarse = decoder(tokens, grid_queries((32,)).double(), make_condition())
    fine = decoder(tokens, grid_queries((96,)).double(), make_condition())
    torch.testing.assert_close(fine[:, 1::3], coarse)  # every third cell has the centre of a coarse one


@pytest.mark.parametrize("name", GRIDS)
def test_frames_become_tokens_and_values_of_the_stated_shapes(name: str) -> None:
    encoder, decoder = make_models(name)
    for array, channels in encoder.grid.channels:
        tokens = encoder(make_values(encoder, array=array), make_condition(), array=array)
        assert tokens.shape == (BATCH, math.prod(encoder.cut.tokens), 3)
        values = decoder(
            tokens, grid_queries((5,) * encoder.grid.ndim).double(), make_condition(), array=array
        )
        assert values.shape == (BATCH, 5**encoder.grid.ndim, channels)


@pytest.mark.parametrize("condition", [make_condition(task=1), make_condition(value=0.1)])
def test_task_and_parameters_reach_tokens_and_values(condition: Condition) -> None:
    encoder, decoder = make_models("1d")
    values, query = make_values(encoder), grid_queries((32,)).double()
    tokens = encoder(values, make_condition())
    assert (encoder(values, condition) - tokens).abs().max() > 1e-6
    decoded = decoder(tokens, query, make_condition())
    assert (decoder(tokens, query, condition) - decoded).abs().max() > 1e-6


def test_one_frame_does_not_depend_on_the_others_of_its_batch() -> None:
    encoder, _ = make_models("2d mixed")
    values, condition = make_values(encoder), make_condition()
    alone = encoder(values[:1], Condition(condition.task[:1], condition.parameters[:1]))
    torch.testing.assert_close(alone, encoder(values, condition)[:1])


@pytest.mark.parametrize("name", GRIDS)
def test_models_are_fully_built_and_every_weight_has_a_gradient(name: str) -> None:
    encoder, decoder = make_models(name)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    assert not any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters)
    query = grid_queries((7,) * encoder.grid.ndim).double()
    loss = torch.zeros((), dtype=torch.float64)
    for array in encoder.grid.arrays:
        tokens = encoder(make_values(encoder, array=array), make_condition(), array=array)
        loss = loss + decoder(tokens, query, make_condition(), array=array).square().mean()
    loss.backward()
    without = [
        name
        for module in (encoder, decoder)
        for name, parameter in module.named_parameters()
        if parameter.grad is None
    ]
    assert without == []


def test_decoder_gradient_agrees_with_finite_differences() -> None:
    encoder, decoder = make_models("1d pooled")
    query = torch.rand(4, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    tokens = make_tokens(encoder).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: decoder(z, query, make_condition()), (tokens,))


def test_frames_off_the_grid_are_refused_with_both_shapes() -> None:
    encoder, decoder = make_models("1d")
    with pytest.raises(ShapeError, match=r"fields: expected \(B, 32, 2\), found \(3, 16, 2\)"):
        encoder(torch.zeros(3, 16, 2), make_condition())
    with pytest.raises(ShapeError, match="no array 'density'"):
        encoder(torch.zeros(3, 32, 2), make_condition(), array="density")
    with pytest.raises(ShapeError, match=r"latent tokens: expected \(B, 8, 3\)"):
        decoder(torch.zeros(3, 9, 3), grid_queries((32,)), make_condition())
    with pytest.raises(ShapeError, match="query points"):
        decoder(make_tokens(encoder), torch.zeros(4, 2), make_condition())


# --- parts and their plain forms -----------------------------------------------------------------------


def test_pixel_unshuffle_agrees_with_pytorch_in_two_dimensions() -> None:
    values = torch.randn(2, 6, 9, 4, generator=torch.Generator().manual_seed(0))
    ours = pixel_unshuffle(values, patch_size=3).unflatten(1, (9, 4)).transpose(1, 2).flatten(1, 2)
    torch.testing.assert_close(ours, nn.PixelUnshuffle(3)(values.movedim(-1, 1)), rtol=0, atol=0)


def test_circular_convolution_agrees_with_pytorch() -> None:
    torch.manual_seed(0)
    ours = GridConv(2, 3, periodic=(True, True))
    theirs = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    theirs.load_state_dict(ours.conv.state_dict())
    values = torch.randn(2, 2, 5, 4)
    torch.testing.assert_close(ours(values), theirs(values))


def test_mixed_padding_agrees_with_plain_wrapping() -> None:
    torch.manual_seed(0)
    conv = GridConv(1, 1, periodic=(False, True)).double()
    values = torch.randn(1, 1, 4, 5, dtype=torch.float64)
    ours = conv(values)
    for y, x in itertools.product(range(4), range(5)):
        total = conv.conv.bias[0].clone()
        for dy, dx in itertools.product(range(-1, 2), repeat=2):
            if 0 <= y + dy < 4:
                total = total + conv.conv.weight[0, 0, 1 + dy, 1 + dx] * values[0, 0, y + dy, (x + dx) % 5]
        torch.testing.assert_close(ours[0, 0, y, x], total)


def test_neighbours_agree_with_counting_them_out() -> None:
    encoder, _ = make_models("2d mixed")  # 2 x 2 tokens, periodic in y only
    query = torch.tensor([[0.1, 0.9]], dtype=torch.float64)
    near = Neighbourhood(encoder.cut, (True, False), radius=1)(query[None])
    expected = []
    for dy, dx in itertools.product(range(-1, 2), repeat=2):
        token = (0 + dy, 1 + dx)
        offset = (0.2 - token[0] - 0.5, 1.8 - token[1] - 0.5)
        expected.append(((token[0] % 2) * 2 + min(max(token[1], 0), 1), offset, 0 <= token[1] <= 1))
    assert near.index[0, 0].tolist() == [index for index, _, _ in expected]
    torch.testing.assert_close(near.offset[0, 0], torch.tensor([o for _, o, _ in expected]).double())
    assert near.log_window[0, 0].isfinite().tolist() == [inside for _, _, inside in expected]


def test_query_on_the_upper_boundary_belongs_to_the_last_token() -> None:
    encoder, _ = make_models("1d with ends")
    near = Neighbourhood(encoder.cut, (False,), radius=1)(torch.tensor([[[1.0]]]))
    assert near.index[0, 0, 1] == 3
    assert near.offset[0, 0, 1, 0] == 0.5


def test_pooling_of_single_patches_looks_at_nothing_else() -> None:
    torch.manual_seed(0)
    pooling = GroupPooling(8, groups=(1,), tokens=(6,), num_heads=2)
    values = torch.randn(2, 8, 6)
    changed = values.clone()
    changed[:, :, 3] += 1
    differs = (pooling(changed) - pooling(values)).abs().amax(dim=(0, 1)) > 1e-6
    assert differs.tolist() == [False, False, False, True, False, False]


def test_pooling_gathers_the_patches_of_each_group() -> None:
    torch.manual_seed(0)
    pooling = GroupPooling(8, groups=(2, 3), tokens=(2, 2), num_heads=2)
    values = torch.randn(1, 8, 4, 6)
    changed = values.clone()
    changed[:, :, 2, 2] += 1  # in the second group of rows and the first of columns
    differs = (pooling(changed) - pooling(values)).abs().amax(dim=(0, 1)) > 1e-6
    assert differs.tolist() == [[False, False], [True, False]]
