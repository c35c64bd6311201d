"""`Laws`: what holds for the solutions of a task, by its name. No torch here, for configurations use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ups.grid import PERIODIC

# Equations whose residual `ups.physics.residual` can take, and the parameters that each needs.
EQUATIONS: Mapping[str, tuple[str, ...]] = {
    "advection1d": ("beta",),
    "burgers1d": ("nu",),
    "reacdiff1d": ("nu", "rho"),
    "darcy2d": ("beta",),
}


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
