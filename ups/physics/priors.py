"""Laws of a task as numbers: conserved quantities, divergence, boundary values, and losses made of them.

A law holds for stored data up to a floor: their solver's error, the quadrature's, and on latents that of the
decoder. So what a prior minimises is what a prediction's error has beyond that of the true frames of the
same window, which is 0 for a perfect prediction, and no prior pulls away from the data. Boundary values are
compared at faces half a cell beyond the first and the last point.

Letters: B batch, K steps, X the axes of the grid, N their number, C channels, F the points of a face, Q
quantities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.conditions import BOUNDARY_VALUE
from ups.grid import PERIODIC, axis_names
from ups.laws import EQUATIONS, PRIORS, Prior, TaskLaws
from ups.physics.residual import LINE_EQUATIONS, darcy_residual, line_residual


def prior_losses(
    physics: TaskPhysics,
    weights: Mapping[str, float],
    *,
    predicted_BKXC: Tensor,
    truth_BKXC: Tensor,
    given_BXC: Tensor,
    values: Mapping[str, Tensor],
    dt_B: Tensor,
) -> dict[str, Tensor]:
    """Weighted excess of each prior's error over that of the truth, relative.

    Args:
        physics: Of the task.
        weights: By prior; those that say nothing about the task are passed over.
        predicted_BKXC: Decoded predictions, physical units, shape (B, K, X..., C).
        truth_BKXC: The frames that they predict, restored by the same decoder.
        given_BXC: The frame that they start from, without noise; of a steady task its input.
        values: Parameters and boundary values by name, each (B,).
        dt_B: Time of a step, shape (B,).

    Returns:
        Scalars "physics/<prior>", means over batch and steps.
    """
    steps = [
        _pairs(frames.float(), given_BXC.float(), values, dt_B)
        for frames in (predicted_BKXC, truth_BKXC.detach())
    ]
    found = {}
    for prior in PRIORS:
        if weights.get(prior) and physics.why_not(prior) is None:
            found[f"physics/{prior}"] = weights[prior] * excess(physics, prior, *steps).mean()
    return found


def excess(physics: TaskPhysics, prior: Prior, predicted: Step, truth: Step) -> Tensor:
    """What a prior's error of predictions has beyond that of the truth, relative, at least 0, shape (B,)."""
    with torch.no_grad():
        floor_B, scale_B = physics.error(prior, truth), physics.scale(prior, truth)
    return (physics.error(prior, predicted) - floor_B).relu() / scale_B


def _pairs(frames_BKXC: Tensor, given_BXC: Tensor, values: Mapping[str, Tensor], dt_B: Tensor) -> Step:
    """Frames as steps side by side, the K of a sample one after another."""
    num = frames_BKXC.shape[1]
    if num == 1:
        before_BKXC = given_BXC.unsqueeze(1)
    else:
        before_BKXC = torch.cat([given_BXC.unsqueeze(1), frames_BKXC[:, :-1]], dim=1)
    return Step(
        before=before_BKXC.flatten(0, 1),
        after=frames_BKXC.flatten(0, 1),
        start=given_BXC.repeat_interleave(num, dim=0),
        values={name: column.repeat_interleave(num) for name, column in values.items()},
        dt=dt_B.repeat_interleave(num),
    )


# Ends of each axis, the lower one first; conditions `bc_left`, `bc_right`, ... are about them.
ENDS: Mapping[str, tuple[str, str]] = {
    "x": ("left", "right"),
    "y": ("bottom", "top"),
    "z": ("front", "back"),
}
# Values at the face, and slopes towards the inside times the spacing, out of the three nearest points.
_VALUE, _SLOPE = (1.875, -1.25, 0.375), (-2.0, 3.0, -1.0)  # third and second order


def boundary_errors(
    fields_BXC: Tensor,
    boundary: Sequence[str],
    *,
    values: Mapping[str, Tensor],
    channels: Sequence[int] | None = None,
) -> Tensor | None:
    """Value at every `dirichlet` face less the boundary value, and the slope at every `neumann` face.

    The boundary value of a face is the condition `bc_left`, `bc_right`, `bc_bottom`, ... of the sample, or
    `bc_left_0`, `bc_left_1`, ... by channel; 0 where it has none. Slopes are per cell, in units of the field.

    Args:
        fields_BXC: Physical units, at least 3 points along each axis, shape (B, X..., C).
        boundary: Boundary type of each axis; other types than these two say nothing here.
        values: Conditions of the samples by name, each (B,).
        channels: Numbers of the channels that this is about; by default all.

    Returns:
        Shape (B, F, C'), all faces one after another; None where no axis has such a boundary.
    """
    chosen = list(range(fields_BXC.shape[-1])) if channels is None else list(channels)
    errors = []
    for axis, (name, kind) in enumerate(zip(axis_names(len(boundary)), boundary, strict=True), start=1):
        if kind not in ("dirichlet", "neumann"):
            continue
        for end, points in zip(ENDS[name], ((0, 1, 2), (-1, -2, -3)), strict=True):
            weights = _VALUE if kind == "dirichlet" else _SLOPE
            nearest = (fields_BXC[..., chosen].select(axis, point) for point in points)
            face_BFC = sum(w * u for w, u in zip(weights, nearest, strict=True))
            assert isinstance(face_BFC, Tensor)
            face_BFC = face_BFC.reshape(len(face_BFC), -1, len(chosen))
            if kind == "dirichlet":
                face_BFC = face_BFC - _boundary_value(end, values, chosen, like=face_BFC)
            errors.append(face_BFC)
    return torch.cat(errors, dim=1) if errors else None


def _boundary_value(
    end: str, values: Mapping[str, Tensor], channels: Sequence[int], *, like: Tensor
) -> Tensor:
    """Of one face, shape (B, 1, C')."""
    name, zero = f"{BOUNDARY_VALUE}{end}", like.new_zeros(len(like))
    columns = [values.get(f"{name}_{channel}", values.get(name, zero)) for channel in channels]
    return torch.stack([column.to(like) for column in columns], dim=-1)[:, None]


def densities(fields_BXC: Tensor, quantities: Sequence[str], channels: Sequence[str]) -> Tensor:
    """Each quantity at every point: a channel, or a product of channels.

    Args:
        fields_BXC: Physical units, shape (B, X..., C).
        quantities: Such as "density" and "density*Vx".
        channels: Names of the C channels.

    Returns:
        Shape (B, X..., Q).
    """
    factors = [[channels.index(name) for name in quantity.split("*")] for quantity in quantities]
    return torch.stack([fields_BXC[..., each].prod(-1) for each in factors], dim=-1)


def grid_mean(fields_BXC: Tensor) -> Tensor:
    """Mean over the grid, shape (B, C)."""
    return fields_BXC.flatten(1, -2).mean(1)


def drift(
    fields_BXC: Tensor, reference_BXC: Tensor, quantities: Sequence[str], channels: Sequence[str]
) -> Tensor:
    """Change of each quantity's mean over its root mean square in the reference, shape (B, Q)."""
    now_BXQ = densities(fields_BXC, quantities, channels)
    then_BXQ = densities(reference_BXC, quantities, channels)
    scale_BQ = grid_mean(then_BXQ.square()).sqrt() + torch.finfo(then_BXQ.dtype).tiny
    return (grid_mean(now_BXQ) - grid_mean(then_BXQ)) / scale_BQ


def project_means(
    fields_BXC: Tensor, reference_BXC: Tensor, quantities: Sequence[str], channels: Sequence[str]
) -> Tensor:
    """The nearest fields, in mean square, whose conserved channels have the reference's mean.

    That is a constant added to each of them. Products of channels are left as they are.

    Returns:
        Shape (B, X..., C), new.
    """
    single = torch.tensor([name in quantities for name in channels], device=fields_BXC.device)
    change_BC = (grid_mean(reference_BXC) - grid_mean(fields_BXC)) * single
    return fields_BXC + change_BC.reshape(len(change_BC), *(1,) * (fields_BXC.ndim - 2), -1)


def divergence(velocity_BXN: Tensor, *, lengths: Sequence[float], periodic: Sequence[bool]) -> Tensor:
    """Divergence by central differences, second order, at the points that have both neighbours.

    Args:
        velocity_BXN: Components in the order of the axes of the grid, shape (B, X..., N).
        lengths: Length of the domain along each axis.
        periodic: Whether each axis is; of others the first and the last point are left out.

    Returns:
        Shape (B, X...), smaller by 2 along axes that aren't periodic.
    """
    total = torch.zeros_like(velocity_BXN[..., 0])
    for axis, length in enumerate(lengths, start=1):
        component, spacing = velocity_BXN[..., axis - 1], length / velocity_BXN.shape[axis]
        total = total + (component.roll(-1, axis) - component.roll(1, axis)) / (2 * spacing)
    for axis, wraps in enumerate(periodic, start=1):
        if not wraps:
            total = total.narrow(axis, 1, total.shape[axis] - 2)
    return total


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
