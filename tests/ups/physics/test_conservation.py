"""Conserved quantities, projection, divergence, boundary values; the table of laws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ups.laws import EQUATIONS, LAWS, Laws, laws_of
from ups.physics.priors import boundary_errors, divergence, drift, project_means
from ups.physics.residual import LINE_EQUATIONS
from ups_store.sources import get_task

CHANNELS = ("density", "pressure", "Vx")


def fields(num: int = 8, channels: int = 3) -> Tensor:
    return torch.rand(2, num, channels, dtype=torch.float64) + 0.5


def test_laws_name_tasks_channels_and_equations_that_there_are() -> None:
    assert set(EQUATIONS) == {*LINE_EQUATIONS, "darcy2d"}
    for name, laws in LAWS.items():
        if name == "incompressible2d":  # of `ups make-data`
            continue
        task = get_task(name)
        named = {part for each in laws.conserved for part in each.split("*")}
        assert named | {*laws.divergence_free, *laws.at_walls} <= {*task.channels}
        if laws.equation:
            assert {*EQUATIONS[laws.equation]} <= {*task.parameters}


def test_walls_let_pass_what_is_conserved_unless_they_are_said_to_be_closed() -> None:
    assert laws_of("burgers1d").conserved_with(("periodic",)) == ("u",)
    assert laws_of("burgers1d").conserved_with(("dirichlet",)) == ()
    assert laws_of("shallow_water2d").conserved_with(("outflow", "outflow")) == ("h",)
    assert laws_of("mine") == Laws()
    assert laws_of("burgers1d", {"burgers1d": Laws(conserved=())}).conserved == ()


def test_drift_sees_means_and_products_alone() -> None:
    given = fields()
    moved = given.roll(3, dims=1)
    quantities = ("density", "density*Vx")
    torch.testing.assert_close(drift(moved, given, quantities, CHANNELS), torch.zeros(2, 2).double())
    heavier = given.clone()
    heavier[..., 0] *= 1.5
    mean, scale = given[..., 0].mean(1), given[..., 0].square().mean(1).sqrt()
    found = drift(heavier, given, quantities, CHANNELS)
    torch.testing.assert_close(found[:, 0], 0.5 * mean / scale)
    assert (found[:, 1] > 0.1).all()


def test_projection_restores_single_channels_and_nothing_else() -> None:
    given, found = fields(), fields() + 1
    projected = project_means(found, given, ("density", "density*Vx"), CHANNELS)
    torch.testing.assert_close(projected[..., 0].mean(1), given[..., 0].mean(1))
    torch.testing.assert_close(projected[..., 1:], found[..., 1:])
    torch.testing.assert_close(projected[..., 0].diff(dim=1), found[..., 0].diff(dim=1))


@pytest.mark.parametrize("periodic", [(True, True), (False, True), (False, False)])
def test_divergence_of_a_stream_function_vanishes_with_the_grid(periodic: tuple[bool, bool]) -> None:
    def largest(num: int, *, compressible: float = 0.0) -> float:
        points = 2 * math.pi * (torch.arange(num, dtype=torch.float64) + 0.5) / num
        y, x = torch.meshgrid(points, points, indexing="ij")
        # In the order of the axes: Vy, Vx of the stream function sin(2 x) cos(y).
        velocity = torch.stack([-2 * torch.cos(2 * x) * torch.cos(y), -torch.sin(2 * x) * torch.sin(y)], -1)
        velocity[..., 1] += compressible * torch.sin(x)
        found = divergence(velocity[None], lengths=(2 * math.pi,) * 2, periodic=periodic)
        assert found.shape == (1, *(num if wraps else num - 2 for wraps in periodic))
        return float(found.abs().max())

    assert largest(32, compressible=1.0) > 0.9
    assert largest(64) < 0.3 * largest(32) < 0.15


def test_boundary_values_of_walls() -> None:
    """A quadratic is extrapolated exactly, for values and for slopes."""
    x = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
    u = (2 - x + 3 * x**2).expand(2, -1)[..., None]
    values = {"bc_left": torch.tensor([2.0, 1.0]), "bc_right_0": torch.tensor([4.0, 4.0])}
    errors = boundary_errors(u, ("dirichlet",), values=values)
    assert errors is not None
    torch.testing.assert_close(errors[..., 0], torch.tensor([[0.0, 0.0], [1.0, 0.0]]).double())
    slopes = boundary_errors(u, ("neumann",), values={})
    assert slopes is not None
    torch.testing.assert_close(16 * slopes[0, :, 0], torch.tensor([-1.0, -5.0]).double())
    assert boundary_errors(u, ("periodic",), values=values) is None
    assert boundary_errors(u, ("outflow",), values=values) is None


def test_faces_of_a_plane_and_channels_that_they_are_about() -> None:
    velocity = torch.zeros(3, 5, 7, 2, dtype=torch.float64)
    velocity[..., 1] = 9.0
    errors = boundary_errors(velocity, ("neumann", "dirichlet"), values={}, channels=[0])
    assert errors is not None
    assert errors.shape == (3, 2 * 7 + 2 * 5, 1)
    assert not errors.any()
    both = boundary_errors(velocity, ("neumann", "dirichlet"), values={})
    assert both is not None
    assert both[:, 14:, 1].mean() == 9.0


def test_gradients() -> None:
    given, found = fields(5), fields(5).requires_grad_()
    quantities = ("density", "density*Vx")
    assert torch.autograd.gradcheck(lambda u: drift(u, given, quantities, CHANNELS), found)
    assert torch.autograd.gradcheck(lambda u: boundary_errors(u, ("dirichlet",), values={}), found)
    plane = torch.rand(1, 4, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda u: divergence(u, lengths=(1.0, 2.0), periodic=(True, False)), plane
    )
