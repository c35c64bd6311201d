"""`TaskPhysics`: how far fields of a task are from what its laws say, a number per sample.

Letters: B batch, X the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ups.grid import PERIODIC
from ups.laws import EQUATIONS, Laws
from ups.physics.boundary import boundary_errors
from ups.physics.conservation import divergence, drift, project_means
from ups.physics.residual import LINE_EQUATIONS, darcy_residual, line_residual

Prior = Literal["conservation", "divergence", "residual", "boundary"]
PRIORS: tuple[Prior, ...] = ("conservation", "divergence", "residual", "boundary")
_LEAST_COEFFICIENT = 1e-6  # of the largest: a decoder may leave a coefficient that isn't positive
_FAINT = 1e-4  # share of the fields' mean square that counts as a change


@dataclass(frozen=True)
class Step:
    """Two frames of each sample, one step apart; of a steady task its input and its solution.

    Attributes:
        before: Physical units, float32 or float64, shape (B, X..., C).
        after: Shape (B, X..., C).
        start: The frame whose conserved quantities hold, shape (B, X..., C).
        values: Parameters and boundary values by name, each (B,).
        dt: Time of the step, shape (B,).
    """

    before: Tensor
    after: Tensor
    start: Tensor
    values: Mapping[str, Tensor]
    dt: Tensor


@dataclass(frozen=True)
class TaskPhysics:
    """The laws of a task on its grid.

    Attributes:
        laws: What holds.
        channels: Names of the channels.
        boundary: Boundary type of each axis.
        lengths: Length of the domain along each axis; None where it isn't known.
        conditions: Names of the parameters and boundary values of its samples.
        cell: Points of a control volume along each axis; 0 for the points themselves.
    """

    laws: Laws
    channels: tuple[str, ...]
    boundary: tuple[str, ...]
    lengths: tuple[float, ...] | None
    conditions: tuple[str, ...]
    cell: int = 1

    @property
    def conserved(self) -> tuple[str, ...]:
        """Quantities whose mean stays, of those whose channels there are."""
        named = self.laws.conserved_with(self.boundary)
        return tuple(each for each in named if {*each.split("*")} <= {*self.channels})

    def why_not(self, prior: Prior) -> str | None:
        """Why a prior says nothing about the task; None if it does."""
        if prior == "conservation":
            return None if self.conserved else "nothing is known to be conserved"
        if prior == "divergence":
            velocity = self.laws.divergence_free
            is_there = len(velocity) == len(self.boundary) and {*velocity} <= {*self.channels}
            return self._without_lengths() if is_there else "no velocity is known to be free of divergence"
        if prior == "boundary":
            has_walls = not {"dirichlet", "neumann"}.isdisjoint(self.boundary)
            return None if has_walls else "no axis has a dirichlet or neumann boundary"
        return self._why_no_residual()

    def error(self, prior: Prior, step: Step) -> Tensor:
        """Mean square of what the laws say is 0, relative or in units of the fields, shape (B,)."""
        if prior == "conservation":
            return drift(step.after, step.start, self.conserved, self.channels).square().mean(1)
        if prior == "divergence":
            return self._divergence(step.after)
        if prior == "boundary":
            names = self.laws.at_walls
            at_walls = [self.channels.index(name) for name in names] if names else None
            errors = boundary_errors(step.after, self.boundary, values=step.values, channels=at_walls)
            assert errors is not None
            return errors.square().flatten(1).mean(1)
        return self.residual(step).square().flatten(1).mean(1)

    def scale(self, prior: Prior, step: Step) -> Tensor:
        """Mean square that `error` is compared with where it isn't relative, shape (B,).

        Of a residual the change over the step, or Darcy's source; of a boundary the fields.
        """
        if prior in ("conservation", "divergence"):
            return torch.ones_like(step.dt, dtype=step.after.dtype)
        if prior == "residual" and self.laws.equation == "darcy2d":
            return step.values["beta"].to(step.after).square()
        power_B = step.after.square().flatten(1).mean(1) + torch.finfo(step.after.dtype).tiny
        if prior == "boundary":
            return power_B
        # Where hardly anything changes, rounding would count.
        return (step.after - step.before).square().flatten(1).mean(1) + _FAINT * power_B

    def residual(self, step: Step) -> Tensor:
        """Of the equation, at every point or control volume, shape (B, ...)."""
        assert self.laws.equation is not None
        assert self.lengths is not None
        values = {name: step.values[name].to(step.after) for name in EQUATIONS[self.laws.equation]}
        if self.laws.equation == "darcy2d":
            return darcy_residual(
                step.after[..., 0],
                _positive(step.before[..., 0]),
                beta_B=values["beta"],
                lengths=(self.lengths[0], self.lengths[1]),
                cell=max(1, self.cell),
            )
        return line_residual(
            step.before[..., 0],
            step.after[..., 0],
            LINE_EQUATIONS[self.laws.equation],
            values=values,
            dt_B=step.dt.to(step.after),
            length=self.lengths[0],
            cell=self.cell,
        )

    def project(self, after_BXC: Tensor, start_BXC: Tensor) -> Tensor:
        """The nearest fields whose conserved channels have the mean that they began with."""
        return project_means(after_BXC, start_BXC, self.conserved, self.channels)

    def _divergence(self, fields_BXC: Tensor) -> Tensor:
        """Mean square divergence over that of the velocity per cell."""
        assert self.lengths is not None
        names: Sequence[str] = self.laws.divergence_free[::-1]  # the axes are z, y, x
        velocity_BXN = fields_BXC[..., [self.channels.index(name) for name in names]]
        points = velocity_BXN.shape[1:-1]
        periodic = [kind == PERIODIC for kind in self.boundary]
        found = divergence(velocity_BXN, lengths=self.lengths, periodic=periodic)
        spacing = min(abs(length) / num for length, num in zip(self.lengths, points, strict=True))
        power_B = velocity_BXN.square().flatten(1).mean(1)
        tiny = torch.finfo(power_B.dtype).tiny
        return spacing**2 * found.square().flatten(1).mean(1) / (power_B + tiny)

    def _without_lengths(self) -> str | None:
        return None if self.lengths is not None else "the length of its domain isn't known"

    def _why_no_residual(self) -> str | None:
        equation = self.laws.equation
        if equation is None:
            return "its equation isn't one of ours"
        if missing := [name for name in EQUATIONS[equation] if name not in self.conditions]:
            return f"its samples have no {' and no '.join(missing)}"
        if equation in LINE_EQUATIONS and self.boundary != (PERIODIC,):
            return "the residual is of periodic lines"
        if equation in LINE_EQUATIONS and len(self.channels) != 1:
            return f"the equation is of one channel, not of {len(self.channels)}"
        if equation == "darcy2d" and self.boundary != ("dirichlet", "dirichlet"):
            return "the residual is of squares with dirichlet boundaries"
        return self._without_lengths()


def _positive(coefficient_BYX: Tensor) -> Tensor:
    return coefficient_BYX.clamp(min=_LEAST_COEFFICIENT * coefficient_BYX.amax((1, 2), keepdim=True))
