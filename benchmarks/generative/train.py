"""One seed of one task: operator, corrector and student trained, and all of them measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.generative.questions import KICKED, Task
from benchmarks.generative.rows import (
    CORRECTOR,
    CORRECTOR_STEPS,
    MEMBER_SEED,
    MEMBERS,
    OPERATOR,
    STUDENTS,
    TRUTH,
)
from benchmarks.generative.truth import TrueFutures
from benchmarks.models.data import hash_of, make_all_data, run_values
from benchmarks.models.questions import TEST
from ups.config import RunConfig, load_config
from ups.data.trajectories import Trajectories, open_trajectories
from ups.eval.ensembles import Climate, EnsembleErrors, roll_out_members, roll_out_point
from ups.eval.forecasters import CorrectedForecaster, Forecaster, OperatorForecaster, has_members
from ups.output import Note, appears_whole, discard, write_atomically
from ups.train.run import run_stage
from ups.trained.corrected_files import load_corrected
from ups.trained.simulator import load_simulator

STAGES = ("operator", "diff_residual", "consistency_distill")
Make = Callable[[], Forecaster]


def stages_of(task: Task) -> tuple[str, ...]:
    """What is trained for a task, in order; linear latents need no training, but their stage."""
    is_latent = "operator.state=latent" in task.question.overrides
    return ("autoencoder", *STAGES) if is_latent else STAGES


def measure(task: Task, seed: int, folder: Path, *, note: Note) -> dict[str, EnsembleErrors]:
    """Errors of all rows on the test split by name; what isn't measured yet is trained first."""
    config = _config(task, seed, folder, note=note)
    checkpoints = _checkpoints(task, seed, folder)
    for stage in stages_of(task):
        report = checkpoints / f"{stage}.report.json"
        if not report.exists():
            note(f"{task.question.name}: {stage}, seed {seed}")
            found = run_stage(stage, config, note=note)
            write_atomically(report, json.dumps(found, indent=1, default=str).encode())
    trajectories = _test_trajectories(task, config)
    makes = _makes(task, checkpoints)
    return {name: _measured(name, make, trajectories, checkpoints, note=note) for name, make in makes.items()}


def reports_of(task: Task, seed: int, folder: Path) -> dict[str, Mapping[str, Any]]:
    """Reports of the stages of a seed, by stage."""
    checkpoints = _checkpoints(task, seed, folder)
    return {
        stage: json.loads((checkpoints / f"{stage}.report.json").read_text()) for stage in stages_of(task)
    }


def forecasters_of(task: Task, seed: int, folder: Path) -> tuple[dict[str, Forecaster], Trajectories]:
    """The trained rows, without the truth, and the test trajectories: for measuring costs."""
    makes = _makes(task, _checkpoints(task, seed, folder))
    trajectories = _test_trajectories(task, _config(task, seed, folder, note=discard))
    return {name: make() for name, make in makes.items() if name != TRUTH}, trajectories


def _identity(task: Task) -> str:
    """Hash of what decides the results, as far as it is said here."""
    question = task.question
    keys = [question.key(name) for name in question.sets]
    values = run_values(question, Path("data"))
    asked = [task.num_trajectories, task.horizon, MEMBERS, MEMBER_SEED, CORRECTOR_STEPS]
    return hash_of([keys, list(question.overrides), list(task.overrides), values, asked])


def _checkpoints(task: Task, seed: int, folder: Path) -> Path:
    return folder / task.question.name / f"{seed}-{_identity(task)}"


def _config(task: Task, seed: int, folder: Path, *, note: Note) -> RunConfig:
    path = make_all_data(task.question, folder / task.question.name, note=note)
    place = json.dumps(str(_checkpoints(task, seed, folder)))
    chosen = [*task.question.overrides, *task.overrides, f"seed={seed}", f"checkpoint.dir={place}"]
    return load_config(path, overrides=chosen, note=note)


def _test_trajectories(task: Task, config: RunConfig) -> Trajectories:
    name, num = task.question.task, task.num_trajectories
    return open_trajectories(config.build, name, TEST, horizon=task.horizon, max_trajectories=num)


def _makes(task: Task, checkpoints: Path) -> dict[str, Make]:
    """What makes the forecaster of each row."""
    operator, corrector = checkpoints / "operator.safetensors", checkpoints / "corrector.safetensors"
    found: dict[str, Make] = {
        OPERATOR: lambda: OperatorForecaster(load_simulator(operator)),
        CORRECTOR: lambda: _corrected(corrector, CORRECTOR_STEPS, kind="corrector"),
    }
    for num_steps, name in STUDENTS.items():
        student = partial(_corrected, checkpoints / "student.safetensors", kind="student")
        found[name] = partial(student, num_steps)
    if task is KICKED:
        found[TRUTH] = lambda: TrueFutures(task.question)
    return found


def _corrected(path: Path, num_steps: int, *, kind: str) -> Forecaster:
    return CorrectedForecaster(load_corrected(path, kind=kind), num_sampler_steps=num_steps)


def _measured(
    name: str, make: Make, trajectories: Trajectories, checkpoints: Path, *, note: Note
) -> EnsembleErrors:
    """The errors of a row, read from its file if it is there."""
    path = checkpoints / f"errors-{name.replace(', ', '-').replace(' ', '-')}.npz"
    if not path.exists():
        note(f"{checkpoints.parent.name}: measures {name}")
        forecaster, climate = make(), Climate.of(trajectories)
        if has_members(forecaster):
            rollout = roll_out_members(forecaster, trajectories, climate, members=MEMBERS, seed=MEMBER_SEED)
        else:
            rollout = roll_out_point(forecaster, trajectories, climate)
        _save(rollout.errors, path)
    return _load(path)


def _save(errors: EnsembleErrors, path: Path) -> None:
    arrays = {name: value.numpy() for name, value in errors.tensors().items()}
    with appears_whole(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, num_members=errors.num_members, **arrays)


def _load(path: Path) -> EnsembleErrors:
    with np.load(path) as found:
        num_members = int(found["num_members"])
        tensors = {name: torch.from_numpy(found[name]) for name in found.files if name != "num_members"}
    return EnsembleErrors(num_members, None if num_members == 1 else MEMBER_SEED, **tensors)
