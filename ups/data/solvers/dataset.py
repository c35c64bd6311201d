"""Data sets by name: pick a problem, draw and solve its samples in batches, write one file."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ups.data.solvers.advection1d import Advection1D
from ups.data.solvers.burgers1d import Burgers1D
from ups.data.solvers.darcy2d import Darcy2D
from ups.data.solvers.problem import Problem, Trajectories, check_at_least
from ups.data.solvers.reaction_diffusion2d import ReactionDiffusion2D
from ups.data.solvers.shallow_water2d import ShallowWater2D
from ups.data.solvers.vorticity2d import Vorticity2D
from ups.output import appears_whole
from ups_store.errors import ConfigError, did_you_mean

# By the task names of `ups_store`'s registry.
SOLVERS: dict[str, type[Problem]] = {
    "advection1d": Advection1D,
    "burgers1d": Burgers1D,
    "darcy2d": Darcy2D,
    "diffreact2d": ReactionDiffusion2D,
    "incompressible2d": Vorticity2D,
    "shallow_water2d": ShallowWater2D,
}
_SPLITS = ("train", "val", "test")


def make_dataset(
    task_name: str,
    out_dir: Path,
    *,
    num_samples: int,
    seed: int = 0,
    split: str | None = None,
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
        split: "train", "val" or "test", of which the whole file is, as its name then says. By default the
            file is named as PDEBench's, which a build shares out.
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
    path = Path(out_dir) / _file_name(problem, task_name, split)
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


def make_datasets(
    task_name: str,
    out_dir: Path,
    *,
    settings: Mapping[str, float | Sequence[float]],
    progress: Callable[[Path, int], None] | None = None,
    **common: Any,
) -> list[Path]:
    """Make a file for each combination of the settings that have several values, such as viscosities.

    A build makes one store of them, with the parameter for every sample. Files of one seed start from the
    same states, as PDEBench's do; a build cuts all of them alike, so these stay within one split.

    Args:
        task_name: Key of `SOLVERS`.
        out_dir: Folder for the files; made if missing.
        settings: Fields of the problem, each a value or several; several of those in the file's name only.
        progress: Called after every batch with the file and the number of its samples solved so far.
        common: What else `make_dataset` takes, `num_samples` above all.

    Returns:
        Paths in the order of the values.
    """
    values = [value if isinstance(value, Sequence) else (value,) for value in settings.values()]
    combinations: list[dict[str, Any]] = [
        dict(zip(settings, each, strict=True)) for each in itertools.product(*values)
    ]
    names = [make_problem(task_name, **each).file_name for each in combinations]
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"{count} files would be called {name}",
                kind="same_file",
                hint="give one value each to settings that aren't in the name, and use a folder for each",
            )
    paths = []
    for name, each in zip(names, combinations, strict=True):
        own = None if progress is None else functools.partial(progress, Path(name))
        paths.append(make_dataset(task_name, out_dir, progress=own, **common, **each))
    return paths


def _file_name(problem: Problem, task_name: str, split: str | None) -> str:
    if split is None:
        return problem.file_name
    if split not in _SPLITS:
        raise ConfigError(f"split {split!r}", kind="unknown_split", expected=f"one of {', '.join(_SPLITS)}")
    return f"{task_name}_{split}_{problem.file_name}"


def make_problem(task_name: str, **settings: float) -> Problem:
    """Build the problem of a task."""
    if task_name not in SOLVERS:
        raise ConfigError(
            "unknown task",
            kind="unknown_task",
            expected=f"one of {', '.join(SOLVERS)}",
            found=repr(task_name),
            hint=did_you_mean(task_name, SOLVERS),
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
