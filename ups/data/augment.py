"""Augmentation by symmetries of the equations: the result could as well be a solution.

Letters: B batch, T time steps, X the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ups.conditions import has_boundary_values
from ups.laws import Laws

# Equations that are the same for -u(-x): the velocity changes its sign with the axis.
_ODD_REFLECTION = frozenset({"burgers1d"})


@dataclass(frozen=True)
class Symmetries:
    """How solutions of a task may be changed, and be solutions.

    Attributes:
        shifts: Whether along each axis of the grid.
        reflects: Whether along the first one, with the sign.
    """

    shifts: tuple[bool, ...]
    reflects: bool = False

    @classmethod
    def of(
        cls, laws: Laws, *, periodic: tuple[bool, ...], conditions: Iterable[str], has_source: bool = False
    ) -> Symmetries:
        """Say what the laws of a task leave.

        Args:
            periodic: Whether each axis is.
            conditions: Of a sample; a boundary value belongs to one end of an axis.
            has_source: Whether samples have a field beside the solution, which isn't changed with it.
        """
        if laws.is_forced or has_source:
            return cls((False,) * len(periodic))
        reflects = laws.equation in _ODD_REFLECTION and not has_boundary_values(conditions)
        return cls(periodic, reflects)


@dataclass(frozen=True)
class Draws:
    """Random numbers for some rows of a batch, the same whichever ranks share it.

    Single numbers are drawn for all rows, then cut; arrays of them by each row for itself.

    Attributes:
        generator: Source of randomness, on the CPU; a function of the batch's number.
        num_rows: Rows of the whole batch.
        first: The first of these rows in it.
        num: B, how many these are.
    """

    generator: torch.Generator
    num_rows: int
    first: int
    num: int

    @classmethod
    def of_batch(cls, num_rows: int, *, seed: int) -> Draws:
        """For all rows of a batch."""
        return cls(torch.Generator().manual_seed(seed), num_rows, 0, num_rows)

    def integers(self, limit: int) -> Tensor:
        """From 0 to `limit` - 1, int64, shape (B,)."""
        return self.of_rows(torch.randint(limit, (self.num_rows,), generator=self.generator))

    def uniform(self) -> Tensor:
        """From 0 to 1, float32, shape (B,)."""
        return self.of_rows(torch.rand(self.num_rows, generator=self.generator))

    def normal(self, shape: torch.Size) -> Tensor:
        """Of mean 0 and deviation 1, float32, shape (B, *shape); no other rows are made.

        A counter-based generator (Salmon et al. 2011) has a stream of its own for each place in the batch.
        """
        key = int(torch.randint(2**63 - 1, (), generator=self.generator))
        rows = np.empty((self.num, *shape), np.float32)
        for number in range(self.num):
            philox = np.random.Philox(key=key, counter=[0, 0, 0, self.first + number])
            rows[number] = np.random.Generator(philox).standard_normal(shape, np.float32)
        return torch.from_numpy(rows)

    def order(self, num: int) -> Tensor:
        """The numbers from 0 to `num` - 1 at random, the same for all rows, int64, shape (num,)."""
        return torch.randperm(num, generator=self.generator)

    def of_rows(self, values: Tensor) -> Tensor:
        """Those of these rows among values that were drawn for the whole batch, shape (num_rows, ...)."""
        return values[self.first : self.first + self.num]


def augment(values_BXC: Tensor, symmetries: Symmetries, *, draws: Draws) -> Tensor:
    """Shift every frame by a random number of points, and reflect half of them, where that may be.

    Args:
        values_BXC: Frames in physical units, shape (B, X..., C).
        draws: Random numbers for these rows.

    Returns:
        Frames of the same shape; new ones, or `values_BXC` itself where there is no symmetry.
    """
    values_BXC = shift_periodic(values_BXC, symmetries.shifts, first_axis=1, draws=draws)
    if symmetries.reflects:
        chosen_B = draws.uniform().to(values_BXC.device) < 0.5
        chosen = chosen_B.reshape(-1, *(1,) * (values_BXC.ndim - 1))
        values_BXC = torch.where(chosen, -values_BXC.flip(1), values_BXC)
    return values_BXC


def augment_trajectories(values_BTXC: Tensor, symmetries: Symmetries, *, draws: Draws) -> Tensor:
    """As `augment`, all frames of a trajectory alike.

    Args:
        values_BTXC: Trajectories, or windows of them, in physical units, shape (B, T, X..., C).
        draws: Random numbers for these rows.

    Returns:
        Trajectories of the same shape; they share the memory of `values_BTXC` where nothing is changed.
    """
    # Time steps are channels meanwhile, so that all of a trajectory share their shift.
    values_BXTC = values_BTXC.movedim(1, -2)
    changed = augment(values_BXTC.flatten(-2), symmetries, draws=draws)
    return changed.unflatten(-1, values_BXTC.shape[-2:]).movedim(-2, 1)


def shift_periodic(values: Tensor, periodic: tuple[bool, ...], *, first_axis: int, draws: Draws) -> Tensor:
    """Roll each item of a batch along its periodic axes by a random number of points.

    Args:
        values: Shape (B, ...).
        periodic: Whether each axis of the grid is.
        first_axis: Where the axes of the grid begin in `values`.
        draws: Random numbers for these rows.

    Returns:
        New values of the same shape; `values` itself where no axis is periodic.
    """
    for axis, wraps in enumerate(periodic, start=first_axis):
        if wraps:
            shift_B = draws.integers(values.shape[axis]).to(values.device)
            values = shift_frames(values, shift_B, axis=axis)
    return values


def shift_frames(values: Tensor, shift_B: Tensor, *, axis: int) -> Tensor:
    """Roll each item along an axis by its own number of points."""
    num_points = values.shape[axis]
    shape = [1] * values.ndim
    shape[0], shape[axis] = len(values), num_points
    index = (torch.arange(num_points, device=values.device) - shift_B[:, None]) % num_points
    return values.gather(axis, index.reshape(shape).expand_as(values))
