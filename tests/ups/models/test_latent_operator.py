"""The latent operator: identity at first, equivariant on periodic axes, conditioned, of the paper's sizes.

What holds for all mixers is tested with each; what is attention's own, such as windows, with that one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from ups.errors import ShapeError
from ups.grid import PERIODIC, UNKNOWN_BOUNDARY
from ups.models.latent_operator import LatentOperator
from ups.models.operator_blocks import BlockPosition, ConvolutionMixer, SpectralMixer
from ups.models.operator_size import SIZES, Mixer, OperatorSize, TokenAxis
from ups.nn.layers import BOUNDARY_TYPES, Condition

B, D = 2, 4
MIXERS: tuple[Mixer, ...] = ("spectral", "convolution", "attention", "hybrid")
SMALL = OperatorSize(width=16, depths=(2, 2), num_heads=2)
ATTENTION = dataclasses.replace(SMALL, mixers=("attention",))
AXES = (TokenAxis(64, True), TokenAxis(16, True))


def with_mixer(mixer: Mixer, **changed: Any) -> OperatorSize:
    return dataclasses.replace(SMALL, mixers=(mixer,), **changed)


def condition(num: int = B, value: float = 0.01) -> Condition:
    return Condition(torch.zeros(num, dtype=torch.int64), torch.full((num, 1), value))


def untrained(size: OperatorSize = SMALL, axes: tuple[TokenAxis, ...] = AXES) -> LatentOperator:
    return LatentOperator(D, num_tasks=2, ranges=[(0.01, 0.1)], size=size, axes=axes)


def trained_like(
    size: OperatorSize = ATTENTION, axes: tuple[TokenAxis, ...] = AXES, *, std: float = 0.2
) -> LatentOperator:
    """An operator none of whose weights is zero, in double precision."""
    operator = untrained(size, axes).double()
    with torch.no_grad():
        for weight in operator.parameters():
            weight.normal_(std=std)
    return operator.eval()


def axes_of(grid: tuple[int, ...], *, has_ends: bool = False) -> tuple[TokenAxis, ...]:
    return tuple(TokenAxis(length, has_ends) for length in grid)


def advance(
    operator: LatentOperator,
    latent: Tensor,
    grid: tuple[int, ...],
    boundary: tuple[str, ...],
    **changed: Tensor,
) -> Tensor:
    dt = changed.get("dt", torch.full((len(latent),), 0.05, dtype=latent.dtype))
    given = Condition(
        torch.zeros(len(latent), dtype=torch.int64), torch.full((len(latent), 1), 0.01).to(latent)
    )
    return operator(latent, dt_B=dt, condition=given, grid=grid, boundary=boundary)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("grid", [(32,), (8, 16), (4, 8, 4)])
def test_untrained_operator_is_persistence(grid: tuple[int, ...], mixer: Mixer) -> None:
    operator = untrained(with_mixer(mixer), axes_of(grid))
    latent = torch.randn(B, torch.Size(grid).numel(), D)
    dt = torch.full((B,), 0.05)
    out = operator(latent, dt_B=dt, condition=condition(), grid=grid, boundary=(PERIODIC,) * len(grid))
    assert torch.equal(out, latent)


@pytest.mark.parametrize("adds_input", [False, True])
def test_output_of_a_steady_task_has_its_input_in_it_only_in_operators_of_before(adds_input: bool) -> None:
    operator = untrained(dataclasses.replace(SMALL, adds_input=adds_input), axes_of((8, 8), has_ends=True))
    given = {"dt_B": torch.full((B,), 0.05), "condition": condition(), "grid": (8, 8)}
    latent = torch.randn(B, 64, D)
    out = operator(latent, boundary=("dirichlet",) * 2, steady=True, **given)
    assert torch.equal(out, latent if adds_input else torch.zeros_like(latent))


@pytest.mark.parametrize("grid", [(32,), (64,), (16, 16)])
def test_operator_commutes_with_shifts_by_whole_windows_along_periodic_axes(grid: tuple[int, ...]) -> None:
    """A window at the bottom of the U covers window * 2^levels tokens."""
    operator, boundary = trained_like(), (PERIODIC,) * len(grid)
    latent = torch.randn(B, *grid, D, dtype=torch.float64)
    step = SMALL.window * 2
    shifted = latent.roll(step, 1)
    out = advance(operator, latent.flatten(1, -2), grid, boundary).unflatten(1, grid)
    out_shifted = advance(operator, shifted.flatten(1, -2), grid, boundary).unflatten(1, grid)
    torch.testing.assert_close(out_shifted, out.roll(step, 1))
    assert not torch.allclose(out, latent)


def test_operator_of_one_window_commutes_with_every_shift_that_halving_allows() -> None:
    operator, grid = trained_like(with_mixer("attention", window=32)), (32,)
    latent = torch.randn(B, 32, D, dtype=torch.float64)
    out = advance(operator, latent, grid, (PERIODIC,))
    for step in (2, 6, 14):
        rolled = advance(operator, latent.roll(step, 1), grid, (PERIODIC,))
        torch.testing.assert_close(rolled, out.roll(step, 1))


@pytest.mark.parametrize("mixer", ["spectral", "convolution"])
@pytest.mark.parametrize("grid", [(32,), (6, 9), (4, 5, 6)])
def test_operator_of_one_level_commutes_with_every_shift_of_tokens_along_periodic_axes(
    grid: tuple[int, ...], mixer: Mixer
) -> None:
    operator = trained_like(with_mixer(mixer, depths=(2,)), axes_of(grid))
    boundary, latent = (PERIODIC,) * len(grid), torch.randn(B, *grid, D, dtype=torch.float64)
    out = advance(operator, latent.flatten(1, -2), grid, boundary).unflatten(1, grid)
    for axis in range(1, 1 + len(grid)):
        shifted = advance(operator, latent.roll(1, axis).flatten(1, -2), grid, boundary).unflatten(1, grid)
        torch.testing.assert_close(shifted, out.roll(1, axis))


@pytest.mark.parametrize("mixer", MIXERS)
def test_operator_between_walls_does_not_commute_with_shifts(mixer: Mixer) -> None:
    operator, step = trained_like(with_mixer(mixer)), SMALL.window * 2
    latent = torch.randn(B, 64, D, dtype=torch.float64)
    out = advance(operator, latent, (64,), ("wall",))
    assert not torch.allclose(advance(operator, latent.roll(step, 1), (64,), ("wall",)), out.roll(step, 1))


@pytest.mark.parametrize("mixer", MIXERS)
def test_operator_sees_time_step_parameter_task_boundary_and_steadiness(mixer: Mixer) -> None:
    operator = trained_like(with_mixer(mixer))
    latent = torch.randn(B, 32, D, dtype=torch.float64)
    dt = torch.full((B,), 0.05, dtype=torch.float64)
    zeros = torch.zeros(B, dtype=torch.int64)
    nu = torch.full((B, 1), 0.01, dtype=torch.float64)
    plain = {"dt_B": dt, "condition": Condition(zeros, nu), "boundary": (PERIODIC,)}
    others = [
        {**plain, "dt_B": 2 * dt},
        {**plain, "condition": Condition(zeros, 10 * nu)},
        {**plain, "condition": Condition(zeros + 1, nu)},
        {**plain, "boundary": ("wall",)},
        {**plain, "steady": True},
    ]
    out = operator(latent, grid=(32,), **plain)
    for changed in others:
        assert not torch.allclose(operator(latent, grid=(32,), **changed), out)


def test_operator_tells_boundary_types_apart_and_on_which_axis_they_are() -> None:
    operator, latent = trained_like(), torch.randn(B, 64, D, dtype=torch.float64)
    named = [(kind, kind) for kind in BOUNDARY_TYPES]
    named += [("neumann", "dirichlet"), ("dirichlet", "neumann"), (PERIODIC, "wall"), ("wall", PERIODIC)]
    outputs = [advance(operator, latent, (8, 8), boundary) for boundary in named]
    for number, out in enumerate(outputs):
        assert not any(torch.allclose(out, other) for other in outputs[:number]), named[number]


def test_boundary_of_a_name_that_the_operator_does_not_know_is_the_unknown_one() -> None:
    operator, latent = trained_like(), torch.randn(B, 32, D, dtype=torch.float64)
    out = advance(operator, latent, (32,), (UNKNOWN_BOUNDARY,))
    assert torch.equal(advance(operator, latent, (32,), ("slip",)), out)
    assert not torch.allclose(advance(operator, latent, (32,), ("dirichlet",)), out)


def test_operator_given_boundary_types_of_another_number_of_axes_is_refused() -> None:
    with pytest.raises(ShapeError, match="boundary types of a grid") as caught:
        advance(trained_like(), torch.randn(B, 32, D, dtype=torch.float64), (32,), (PERIODIC, PERIODIC))
    assert (caught.value.expected, caught.value.found) == (1, 2)


@pytest.mark.parametrize("mixer", MIXERS)
def test_operator_serves_grids_of_one_and_two_axes_alike(mixer: Mixer) -> None:
    operator = trained_like(with_mixer(mixer))
    latent = torch.randn(B, 32, D, dtype=torch.float64)
    line = advance(operator, latent, (32,), (PERIODIC,))
    plane = advance(operator, latent, (32, 1), (PERIODIC, PERIODIC))
    torch.testing.assert_close(line, plane)


@pytest.mark.parametrize("mixer", MIXERS)
def test_operator_gradient_is_that_of_finite_differences(mixer: Mixer) -> None:
    operator = trained_like(with_mixer(mixer, width=8, depths=(1, 1)))
    latent = torch.randn(1, 16, D, dtype=torch.float64, requires_grad=True)

    def function(z: Tensor) -> Tensor:
        return advance(operator, z, (16,), ("wall",))

    assert torch.autograd.gradcheck(function, latent, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("shape", [(B, 31, D), (B, 32, D + 1)])
def test_operator_given_tokens_that_do_not_fill_the_grid_is_refused(shape: tuple[int, ...]) -> None:
    operator = untrained()
    with pytest.raises(ShapeError, match="latent tokens"):
        advance(operator, torch.randn(shape), (32,), (PERIODIC,))


@pytest.mark.parametrize(("name", "millions"), [("S", 33), ("B", 130), ("L", 518)])
def test_sizes_are_those_of_the_paper(name: str, millions: float) -> None:
    """Holzschuh et al. 2025: within 10 %, since tokens here aren't patches."""
    with torch.device("meta"):
        size = dataclasses.replace(SIZES[name], mixers=("attention",))
        operator = LatentOperator(8, num_tasks=2, ranges=[(0, 1)] * 2, size=size, axes=axes_of((16, 16)))
    num = sum(weight.numel() for weight in operator.parameters())
    assert num == pytest.approx(millions * 1e6, rel=0.1)


@pytest.mark.parametrize("mixer", MIXERS)
def test_drop_path_drops_whole_branches_only_while_training(mixer: Mixer) -> None:
    operator = trained_like(with_mixer(mixer, drop_path=0.5))
    latent = torch.randn(B, 32, D, dtype=torch.float64)
    once, again = (advance(operator, latent, (32,), (PERIODIC,)) for _ in range(2))
    assert torch.equal(once, again)
    operator.train()
    once, again = (advance(operator, latent, (32,), (PERIODIC,)) for _ in range(2))
    assert not torch.equal(once, again)


def test_levels_have_mixers_of_their_own() -> None:
    operator = untrained(dataclasses.replace(SMALL, mixers=("convolution", "attention")))
    kinds = [type(blocks[0]).__name__ for blocks in (*operator.down, *operator.up)]
    assert kinds == ["MixingBlock", "AttentionBlock", "MixingBlock"]


@pytest.mark.parametrize(("mixer", "is_normed"), [("spectral", False), ("attention", True)])
def test_operator_without_layer_norm_sees_how_large_a_state_is(mixer: Mixer, is_normed: bool) -> None:
    """Its tokens are a linear function of the state up to activations; a norm forgets their size."""
    operator = trained_like(with_mixer(mixer, depths=(1,)), axes_of((16,)))
    latent = 1e6 * torch.randn(B, 16, D, dtype=torch.float64)
    change, twice = (advance(operator, z, (16,), (PERIODIC,)) - z for z in (latent, 2 * latent))
    assert (twice.std() / change.std() < 1.1) == is_normed


# --- walls -------------------------------------------------------------------------------------------------


def mixer_between_walls(length: int, padding: float) -> SpectralMixer:
    place = BlockPosition(2, 1, axes_of((length,), has_ends=True), is_shifted=False)
    return SpectralMixer(place, modes=None, padding=padding).double()


@torch.no_grad()
def test_spectral_mixing_between_walls_is_linear_convolution_of_what_fits_into_the_padding() -> None:
    """A kernel of 5 places behind a token needs 4 zeros, or the other wall would be reached."""
    length, room = 16, 4
    kernel = torch.randn(room + 1, 2, 2, dtype=torch.float64)
    x = torch.randn(1, length, 2, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for place in range(length):
        for step in range(min(place, room) + 1):
            expected[0, place] += x[0, place - step] @ kernel[step]

    def mixed(padding: float) -> Tensor:
        mixer = mixer_between_walls(length, padding)
        whole = length + round(padding * length)
        spectrum = torch.fft.rfft(kernel, n=whole, dim=0)
        mixer.conv.weight.copy_(torch.stack([spectrum.real, spectrum.imag], dim=-2)[:, None])
        return mixer(x, periodic=(False,))

    torch.testing.assert_close(mixed(room / length), expected)
    too_few = mixed((room - 1) / length)
    torch.testing.assert_close(too_few[:, 1:], expected[:, 1:])
    assert not torch.allclose(too_few[:, 0], expected[:, 0])  # token 15 reaches round to token 0


@torch.no_grad()
def test_convolution_between_walls_does_not_reach_round() -> None:
    mixer = ConvolutionMixer(BlockPosition(2, 1, axes_of((16,)), is_shifted=False)).double()
    x = torch.randn(1, 16, 2, dtype=torch.float64, requires_grad=False)
    changed = x.clone()
    changed[:, -1] += 1
    difference = (mixer(changed, periodic=(False,)) - mixer(x, periodic=(False,))).abs().sum(-1)[0]
    assert (difference > 0).nonzero().flatten().tolist() == [13, 14, 15]
    difference = (mixer(changed, periodic=(True,)) - mixer(x, periodic=(True,))).abs().sum(-1)[0]
    assert (difference > 0).nonzero().flatten().tolist() == [0, 1, 13, 14, 15]


@torch.no_grad()
def test_convolution_is_a_sum_along_the_axes() -> None:
    mixer = ConvolutionMixer(BlockPosition(2, 1, axes_of((6, 7)), is_shifted=False)).double()
    x = torch.randn(1, 6, 7, 2, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for axis, layer in enumerate(mixer.along, start=1):
        weight = layer.weight.unflatten(1, (2, 5))  # out, in, place
        for step in range(-2, 3):
            expected += x.roll(-step, axis) @ weight[..., step + 2].T
    torch.testing.assert_close(mixer(x, periodic=(True, True)), expected)


def test_operator_knows_where_walls_are_on_the_axes_that_have_them() -> None:
    operator = trained_like(with_mixer("spectral", depths=(1,), padding=0.0))
    added = operator.walls(operator.geometry((8, 6), ("wall", PERIODIC), steady=False))
    assert added is not None
    assert added.shape == (1, 8, 1, 16)
    assert (added.std(dim=1) > 0.01).all()
    assert not torch.allclose(added[:, 0], added[:, -1])  # lower and upper wall are told apart
    assert operator.walls(operator.geometry((8, 6), (PERIODIC, PERIODIC), steady=False)) is None
    both = operator.walls(operator.geometry((8, 6), ("wall", "wall"), steady=False))
    assert both is not None
    assert both.shape == (1, 8, 6, 16)


def test_conditions_made_once_serve_all_steps() -> None:
    operator, grid, boundary = trained_like(SMALL), (8, 16), ("wall", PERIODIC)
    latent, dt = torch.randn(B, 128, D, dtype=torch.float64), torch.full((B,), 0.05, dtype=torch.float64)
    geometry = operator.geometry(grid, boundary, steady=False)
    given = Condition(0, torch.full((B, 1), 0.01, dtype=torch.float64))
    conditions, once = operator.conditions(given, dt, geometry), latent
    for _ in range(3):
        once = operator.advance(once, conditions, geometry)
        latent = advance(operator, latent, grid, boundary)
    torch.testing.assert_close(once, latent)


def test_weights_of_before_with_a_modulation_in_every_block_are_taken() -> None:
    operator, other = trained_like(with_mixer("hybrid")), trained_like(with_mixer("hybrid"))
    tensors = operator.state_dict()
    sizes = [len(block.kinds) * block.width for _, block in operator.blocks()]
    for kind in ("weight", "bias"):
        parts = tensors.pop(f"modulation.{kind}").split(sizes)
        for (name, _), part in zip(operator.blocks(), parts, strict=True):
            tensors[f"{name}.modulation.{kind}"] = part
    other.load_state_dict(tensors)
    latent = torch.randn(B, 32, D, dtype=torch.float64)
    found = advance(other, latent, (32,), (PERIODIC,))
    assert torch.equal(found, advance(operator, latent, (32,), (PERIODIC,)))


def test_operator_of_periodic_tasks_has_no_weights_for_walls() -> None:
    assert not list(untrained(axes=axes_of((16, 16))).walls.parameters())


# --- as part of a run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", MIXERS)
def test_operator_trains_under_autocast(mixer: Mixer) -> None:
    operator = untrained(with_mixer(mixer))
    torch.nn.init.normal_(operator.out.weight, std=0.1)
    latent, dt = torch.randn(B, 32, D), torch.full((B,), 0.05)
    given = {"dt_B": dt, "condition": condition(), "grid": (32,), "boundary": ("wall",)}
    exact = operator(latent, **given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = operator(latent, **given)
    torch.testing.assert_close(rough.float(), exact, atol=0.1, rtol=0.1)
    rough.float().square().mean().backward()
    found = [weight.grad for weight in operator.parameters() if weight.grad is not None]
    assert torch.stack([grad.isfinite().all() for grad in found]).all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_weight_has_a_gradient(mixer: Mixer) -> None:
    """Those of axes that are too short to be halved aside, a rank would wait for the others' otherwise."""
    operator = trained_like(with_mixer(mixer), axes_of((32, 16), has_ends=True))
    latent = torch.randn(B, 32 * 16, D, dtype=torch.float64)
    advance(operator, latent, (32, 16), ("wall", "wall")).square().mean().backward()
    assert [name for name, weight in operator.named_parameters() if weight.grad is None] == []


def test_ends_of_a_parameters_range_are_told_apart_however_close_they_are() -> None:
    """So that the model tells viscosities apart from its first steps on; values outside go on."""
    torch.manual_seed(0)
    embed = untrained().embed.condition
    features: list[torch.Tensor] = []
    embed.parameters_in.register_forward_hook(lambda layer, given, out: features.append(given[0]))
    for value in (0.01, 0.1, 0.001, torch.nan):
        embed(condition(1, value), array="latent")
    low, high, beyond, absent = (each[0].tolist() for each in features)
    assert low == pytest.approx([1, -0.3, -0.3])
    assert high == pytest.approx([1, 0.3, 0.3])
    assert beyond[1] < -0.89  # a decade below a range of one decade
    assert absent == [0, 0, 0]
    one_value = LatentOperator(D, num_tasks=2, ranges=[(0.3, 0.3)], size=SMALL, axes=AXES).embed.condition
    one_value.parameters_in.register_forward_hook(lambda layer, given, out: features.append(given[0]))
    one_value(condition(1, 0.3), array="latent")
    assert features[-1][0].tolist() == [1, 0, 0]


def test_size_of_a_file_of_before_adds_the_input_of_steady_tasks() -> None:
    values = SMALL.to_json()
    assert OperatorSize.from_json(values) == SMALL
    del values["adds_input"]
    assert OperatorSize.from_json(values) == dataclasses.replace(SMALL, adds_input=True)
