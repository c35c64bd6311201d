"""Data sets by name: pick a problem, draw and solve its samples in batches, write one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ups.data.solvers.advection1d import Advection1D
from ups.data.solvers.burgers1d import Burgers1D
from ups.data.solvers.darcy2d import Darcy2D
from ups.data.solvers.problem import Problem, Trajectories, check_at_least
from ups.data.solvers.reaction_diffusion2d import ReactionDiffusion2D
from ups.output import appears_whole
from ups_store.errors import ConfigError

# By the task names of `ups_store`'s registry.
SOLVERS: dict[str, type[Problem]] = {
    "advection1d": Advection1D,
    "burgers1d": Burgers1D,
    "darcy2d": Darcy2D,
    "diffreact2d": ReactionDiffusion2D,
}


def make_dataset(
    task_name: str,
    out_dir: Path,
    *,
    num_samples: int,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
    **settings: float,
) -> Path:
    """Solve `num_samples` samples of a task and write them as PDEBench would.

    The file appears under its name when it is complete. The same arguments give the same bytes, and sample i
    is the same for every `num_samples`.

    Args:
        task_name: Key of `SOLVERS`.
        out_dir: Folder for the file; made if missing.
        num_samples: Samples N, >= 1.
        seed: Seed of the data set, >= 0.
        overwrite: Replace a file that is there.
        progress: Called after every batch with the number of samples solved so far.
        settings: Fields of the problem, such as `nu`, `points`, `frames`.

    Returns:
        Path of the file.

    Raises:
        ConfigError: Unknown task or setting, value out of range, file already there, or a solution that isn't
            finite.
        OSError: The folder or file can't be written.
    """
    problem = make_problem(task_name, **settings)
    check_at_least(1, num_samples=num_samples)
    check_at_least(0, seed=seed)
    path = Path(out_dir) / problem.file_name
    if path.exists() and not overwrite:
        raise ConfigError(
            "is already there",
            kind="output_exists",
            path=path,
            hint="replace it with --force (overwrite=True)",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with appears_whole(path) as partial:
        batches = _solve_batches(problem, num_samples=num_samples, seed=seed, progress=progress)
        problem.write(partial, batches, num_samples=num_samples)
    return path


def make_problem(task_name: str, **settings: float) -> Problem:
    """Build the problem of a task.

    Raises:
        ConfigError: Unknown task, setting that the problem doesn't have, or value out of range.
    """
    if task_name not in SOLVERS:
        raise ConfigError(
            f"unknown task {task_name!r}", kind="unknown_task", expected=f"one of {', '.join(SOLVERS)}"
        )
    problem_class = SOLVERS[task_name]
    known = [field.name for field in dataclasses.fields(problem_class)]
    for name in settings.keys() - set(known):
        raise ConfigError(
            f"{task_name} has no setting {name!r}",
            kind="unknown_setting",
            expected=f"one of {', '.join(known)}",
        )
    return problem_class(**settings)


def _solve_batches(
    problem: Problem, *, num_samples: int, seed: int, progress: Callable[[int], None] | None
) -> Iterator[Trajectories]:
    for first in range(0, num_samples, problem.batch_size):
        indices = range(first, min(first + problem.batch_size, num_samples))
        # Overflow is found below, with a message that says what to do.
        with np.errstate(over="ignore", invalid="ignore"):
            batch = problem.sample(indices, seed=seed)
        if not np.isfinite(batch.fields).all():
            raise ConfigError(
                f"{problem} has no finite solution", kind="diverged", hint="choose smaller parameters"
            )
        yield batch
        if progress is not None:
            progress(indices.stop)
