"""What is known of the tasks of a simulator: their laws, on their grids."""

from __future__ import annotations

from collections.abc import Mapping

from ups.config import RunConfig
from ups.laws import laws_of, lengths_of
from ups.physics.task_physics import TaskPhysics
from ups.trained.specs import SimulatorSpec


def physics_of(
    config: RunConfig, spec: SimulatorSpec, task: str, *, lengths: Mapping[str, float] | None, cell: int
) -> TaskPhysics:
    """What is known of a task that a simulator knows, on a domain of these lengths by axis name."""
    known = spec.tasks[task]
    return TaskPhysics(
        laws=laws_of(task, config.own_laws),
        channels=known.channels,
        boundary=known.boundary,
        lengths=lengths_of(lengths, ndim=known.grid.ndim),
        conditions=tuple(known.parameters),
        cell=cell,
    )
