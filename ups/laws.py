"""`Laws`: what holds for the solutions of a task, by its name. No torch here, for configurations use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ups.errors import ConfigError
from ups.grid import PERIODIC, axis_names

Prior = Literal["conservation", "divergence", "residual", "boundary"]
PRIORS: tuple[Prior, ...] = get_args(Prior)

# Equations whose residual `ups.physics.residual` can take, and the parameters that each needs.
EQUATIONS: Mapping[str, tuple[str, ...]] = {
    "advection1d": ("beta",),
    "burgers1d": ("nu",),
    "reacdiff1d": ("nu", "rho"),
    "darcy2d": ("beta",),
}
_ON_LINES = ("advection1d", "burgers1d", "reacdiff1d")


@dataclass(frozen=True)
class Laws:
    """What holds for every solution of a task.

    Attributes:
        conserved: Quantities whose mean over the domain stays: a channel ("u"), or a product of channels
            ("density*Vx"), where nothing crosses the boundary.
        is_closed: Whether that holds for any boundary type; else where all axes are periodic alone.
        divergence_free: Channels of a velocity without divergence, in the order x, y, z; none elsewhere.
        equation: One of `EQUATIONS`, whose parameters the task has; None where there is none of these.
        at_walls: Channels that `dirichlet` and `neumann` are about; empty for all.
        is_forced: Whether something has its place in space, such as a source: then a solution that is shifted
            or reflected is none.
    """

    conserved: tuple[str, ...] = ()
    is_closed: bool = False
    divergence_free: tuple[str, ...] = ()
    equation: str | None = None
    at_walls: tuple[str, ...] = ()
    is_forced: bool = False

    def conserved_with(self, boundary: Sequence[str]) -> tuple[str, ...]:
        """What is conserved where the axes have these boundary types."""
        is_closed = self.is_closed or all(kind == PERIODIC for kind in boundary)
        return self.conserved if is_closed else ()


# PDEBench's tasks and those that `ups make-data` adds. Reaction-diffusion conserves nothing.
LAWS: Mapping[str, Laws] = {
    "advection1d": Laws(conserved=("u",), equation="advection1d"),
    "burgers1d": Laws(conserved=("u",), equation="burgers1d"),
    "reacdiff1d": Laws(equation="reacdiff1d"),
    "cfd1d": Laws(conserved=("density", "density*Vx")),
    "cfd2d": Laws(conserved=("density", "density*Vx", "density*Vy")),
    "cfd3d": Laws(conserved=("density", "density*Vx", "density*Vy", "density*Vz")),
    "darcy2d": Laws(equation="darcy2d"),
    # Its waves don't reach the open ends in the stored time: measured drift of the mass below 1e-9.
    "shallow_water2d": Laws(conserved=("h",), is_closed=True),
    # From frame 1 on there is no divergence; walls are about the velocity, not the particles.
    "navier_stokes2d": Laws(divergence_free=("Vx", "Vy"), at_walls=("Vx", "Vy")),
    "incompressible2d": Laws(conserved=("vorticity",)),
}


def laws_of(task: str, own: Mapping[str, Laws] | None = None) -> Laws:
    """What holds for a task: what the configuration says of it, else the table, else nothing."""
    return (own or {}).get(task) or LAWS.get(task, Laws())


@dataclass(frozen=True)
class TaskLaws:
    """The laws of a task on its grid.

    Attributes:
        laws: What holds.
        channels: Names of the channels.
        boundary: Boundary type of each axis.
        lengths: Length of the domain along each axis; None where it isn't known.
        conditions: Names of the parameters and boundary values of its samples.
    """

    laws: Laws
    channels: tuple[str, ...]
    boundary: tuple[str, ...]
    lengths: tuple[float, ...] | None
    conditions: tuple[str, ...]

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

    def _without_lengths(self) -> str | None:
        return None if self.lengths is not None else "the length of its domain isn't known"

    def _why_no_residual(self) -> str | None:
        equation = self.laws.equation
        if equation is None:
            return "its equation isn't one of ours"
        if missing := [name for name in EQUATIONS[equation] if name not in self.conditions]:
            return f"its samples have no {' and no '.join(missing)}"
        if equation in _ON_LINES and self.boundary != (PERIODIC,):
            return "the residual is of periodic lines"
        if equation in _ON_LINES and len(self.channels) != 1:
            return f"the equation is of one channel, not of {len(self.channels)}"
        if equation == "darcy2d" and self.boundary != ("dirichlet", "dirichlet"):
            return "the residual is of squares with dirichlet boundaries"
        return self._without_lengths()


def lengths_of(named: Mapping[str, Any] | None, *, ndim: int) -> tuple[float, ...] | None:
    """Lengths of a domain in the order of its axes, from those that a store names; None if it lacks one."""
    lengths = [(named or {}).get(axis) for axis in axis_names(ndim)]
    return tuple(float(length) for length in lengths if length is not None) if all(lengths) else None


def check_priors(weights: Mapping[str, float], tasks: Mapping[str, TaskLaws]) -> list[str]:
    """Refuse physics priors that say nothing.

    Args:
        weights: Of the priors that are wanted.
        tasks: Those that are trained.

    Returns:
        For people, the priors that say nothing about some tasks.
    """
    notes = []
    for prior in PRIORS:
        if prior not in weights:
            continue
        reasons = {name: why for name, task in tasks.items() if (why := task.why_not(prior))}
        said = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        if len(reasons) == len(tasks):
            raise ConfigError(
                f"training.physics_priors.{prior} says nothing about any task ({said})",
                kind="no_law",
                hint=f"leave it out, or say under `laws` what holds for {' or '.join(tasks)}",
            )
        if reasons:
            notes.append(f"training.physics_priors.{prior} is left out of some tasks: {said}")
    return notes
