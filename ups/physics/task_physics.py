"""`TaskPhysics`: how far fields of a task are from what its laws say, a number per sample.

Letters: B batch, X the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.grid import PERIODIC
from ups.laws import EQUATIONS, Prior, TaskLaws
from ups.physics.boundary import boundary_errors
from ups.physics.conservation import divergence, drift, project_means
from ups.physics.residual import LINE_EQUATIONS, darcy_residual, line_residual

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
class TaskPhysics(TaskLaws):
    """How far fields are from the laws of their task.

    Attributes:
        cell: Points of a control volume along each axis; 0 for the points themselves.
    """

    cell: int = 1

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


def _positive(coefficient_BYX: Tensor) -> Tensor:
    return coefficient_BYX.clamp(min=_LEAST_COEFFICIENT * coefficient_BYX.amax((1, 2), keepdim=True))
