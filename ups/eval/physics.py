"""What is known of the tasks of a simulator: their laws, on their grids, and how well the data keep them."""

from __future__ import annotations

from collections.abc import Mapping

from ups.config import RunConfig
from ups.data.fields import Fields, evenly_spread, laws_of_fields, times_of
from ups.data.windows import Trajectories
from ups.errors import ConfigError
from ups.laws import laws_of, lengths_of
from ups.physics.priors import Step, TaskPhysics
from ups.trained.specs import SimulatorSpec

MOST_FLOOR = 0.25  # of the change over a step, that true frames may miss an equation by
_NUM_SAMPLES = 8  # whose first step is looked at


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


def residual_floor(config: RunConfig, fields: Fields) -> float | None:
    """By how much true frames miss the equation of their task: the least that a residual prior can reach.

    Returns:
        Root mean square of the residual over that of the change in a step, or over Darcy's source, the median
        of some samples; None where the equation isn't known.
    """
    laws = laws_of_fields(fields.info, config.own_laws)
    if laws.why_not("residual") is not None:
        return None
    physics = TaskPhysics(**vars(laws), cell=config.training.physics_priors.cell)
    some = Trajectories(fields, stored_t=times_of(fields), stride=config.training.stride, horizon=1)
    batch = some.read(evenly_spread(len(some), _NUM_SAMPLES))
    given, solution = batch.given.double(), batch.truth[:, 0].double()
    dt_B = given.new_full((len(batch),), some.dt or 1.0)
    step = Step(given, solution, given, batch.parameters, dt_B)
    missed_B = physics.error("residual", step) / physics.scale("residual", step)
    return float(missed_B.median().sqrt())


def shown_floor(floor: float | None) -> str:
    """A floor for people; empty where there is none."""
    return "" if floor is None else f"True frames miss the equation by {floor:.2%} of its change in a step."


def check_residual_floor(floor: float | None, *, task: str) -> None:
    """Refuse a residual prior of an equation that the data break."""
    if floor is not None and not floor <= MOST_FLOOR:
        raise ConfigError(
            f"training.physics_priors.residual: the true frames of {task} miss the equation",
            kind="broken_law",
            expected=f"by at most {MOST_FLOOR:.0%} of their change in a step",
            found=f"{floor:.0%}",
            hint="check coordinates, times and parameters of the source, or leave the prior out",
        )
