"""The latent operator: identity at first, equivariant on periodic axes, conditioned, of the paper's sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ups.errors import ShapeError
from ups.grid import PERIODIC, UNKNOWN_BOUNDARY
from ups.models.latent_operator import SIZES, LatentOperator, OperatorSize
from ups.nn.layers import BOUNDARY_TYPES, Condition

B, D = 2, 4
SMALL = OperatorSize(width=16, depths=(2, 2), num_heads=2)


def condition(num: int = B, value: float = 0.01) -> Condition:
    return Condition(torch.zeros(num, dtype=torch.int64), torch.full((num, 1), value))


def trained_like(size: OperatorSize = SMALL) -> LatentOperator:
    """An operator none of whose weights is zero, in double precision."""
    operator = LatentOperator(D, num_tasks=2, num_parameters=1, size=size).double()
    with torch.no_grad():
        for weight in operator.parameters():
            weight.normal_(std=0.2)
    return operator.eval()


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


@pytest.mark.parametrize("grid", [(32,), (8, 16)])
def test_untrained_operator_is_persistence(grid: tuple[int, ...]) -> None:
    operator = LatentOperator(D, num_tasks=2, num_parameters=1, size=SMALL)
    latent = torch.randn(B, torch.Size(grid).numel(), D)
    dt = torch.full((B,), 0.05)
    out = operator(latent, dt_B=dt, condition=condition(), grid=grid, boundary=(PERIODIC,) * len(grid))
    assert torch.equal(out, latent)


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
    operator, grid = trained_like(OperatorSize(width=16, depths=(2, 2), num_heads=2, window=32)), (32,)
    latent = torch.randn(B, 32, D, dtype=torch.float64)
    out = advance(operator, latent, grid, (PERIODIC,))
    for step in (2, 6, 14):
        rolled = advance(operator, latent.roll(step, 1), grid, (PERIODIC,))
        torch.testing.assert_close(rolled, out.roll(step, 1))


def test_operator_between_walls_does_not_commute_with_shifts() -> None:
    operator, step = trained_like(), SMALL.window * 2
    latent = torch.randn(B, 64, D, dtype=torch.float64)
    out = advance(operator, latent, (64,), ("wall",))
    assert not torch.allclose(advance(operator, latent.roll(step, 1), (64,), ("wall",)), out.roll(step, 1))


def test_operator_sees_time_step_parameter_task_boundary_and_steadiness() -> None:
    operator = trained_like()
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


def test_operator_serves_grids_of_one_and_two_axes_alike() -> None:
    operator = trained_like()
    latent = torch.randn(B, 32, D, dtype=torch.float64)
    line = advance(operator, latent, (32,), (PERIODIC,))
    plane = advance(operator, latent, (32, 1), (PERIODIC, PERIODIC))
    torch.testing.assert_close(line, plane)


def test_operator_gradient_is_that_of_finite_differences() -> None:
    operator = trained_like(OperatorSize(width=8, depths=(1, 1), num_heads=2))
    latent = torch.randn(1, 16, D, dtype=torch.float64, requires_grad=True)

    def function(z: Tensor) -> Tensor:
        return advance(operator, z, (16,), ("wall",))

    assert torch.autograd.gradcheck(function, latent, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("shape", [(B, 31, D), (B, 32, D + 1)])
def test_operator_given_tokens_that_do_not_fill_the_grid_is_refused(shape: tuple[int, ...]) -> None:
    operator = LatentOperator(D, num_tasks=1, num_parameters=1, size=SMALL)
    with pytest.raises(ShapeError, match="latent tokens"):
        advance(operator, torch.randn(shape), (32,), (PERIODIC,))


@pytest.mark.parametrize(("name", "millions"), [("S", 33), ("B", 130), ("L", 518)])
def test_sizes_are_those_of_the_paper(name: str, millions: float) -> None:
    """Holzschuh et al. 2025: within 10 %, since tokens here aren't patches."""
    with torch.device("meta"):
        operator = LatentOperator(8, num_tasks=2, num_parameters=2, size=SIZES[name])
    num = sum(weight.numel() for weight in operator.parameters())
    assert num == pytest.approx(millions * 1e6, rel=0.1)


def test_drop_path_drops_whole_branches_only_while_training() -> None:
    operator = trained_like(OperatorSize(width=16, depths=(2, 2), num_heads=2, drop_path=0.5))
    latent = torch.randn(B, 32, D, dtype=torch.float64)
    once, again = (advance(operator, latent, (32,), (PERIODIC,)) for _ in range(2))
    assert torch.equal(once, again)
    operator.train()
    once, again = (advance(operator, latent, (32,), (PERIODIC,)) for _ in range(2))
    assert not torch.equal(once, again)
