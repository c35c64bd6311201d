"""One seed of one task: operator, corrector and student trained, and all of them measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.generative.questions import (
    CORRECTOR,
    CORRECTOR_STEPS,
    KICKED,
    MEMBER_SEED,
    MEMBERS,
    OPERATOR,
    ROUNDS,
    STUDENTS,
    TIMED_MEMBERS,
    TIMED_STEPS,
    TRUTH,
    Task,
)
from benchmarks.models.data import Note, hash_of, make_all_data, run_values
from benchmarks.models.questions import TEST, Question
from ups.config import RunConfig, load_config
from ups.data.solvers.burgers1d import random_kicks, solve
from ups.data.splits import open_trajectories
from ups.data.windows import Trajectories
from ups.eval.ensembles import Climate, EnsembleErrors, roll_out_members, roll_out_point
from ups.eval.forecasters import (
    CorrectedForecaster,
    Forecaster,
    OperatorForecaster,
    Start,
    has_members,
)
from ups.eval.rollout import start_of
from ups.output import appears_whole, write_atomically
from ups.train.flops import count_flops
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
            found = run_stage(stage, config)
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
    trajectories = _test_trajectories(task, _config(task, seed, folder, note=lambda text: None))
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
    return load_config(path, overrides=chosen)


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


# --- the best that can be, and what a step costs ---


class TrueFutures:
    """The best that anybody can do on kicked Burgers: members that are solved with kicks of their own."""

    name, label = "truth", "the equation itself"
    note = "members solved as the data were, with kicks of their own"

    def __init__(self, question: Question) -> None:
        self._nu, self._kicks = float(question.settings["nu"]), float(question.settings["kicks"])
        self._max_wave_number = int(question.settings.get("max_wave_number", 3))

    def forecast(self, start: Start, steps: int) -> Tensor:
        """One future."""
        members = self.forecast_members(start, steps, members=1, seed=0)
        return torch.stack([step[:, 0] for step in members], dim=1)

    def forecast_members(self, start: Start, steps: int, *, members: int, seed: int) -> Iterator[Tensor]:
        """See `ups.eval.forecasters.EnsembleForecaster.forecast_members`."""
        assert start.dt is not None
        rng, num_points = np.random.default_rng(seed), start.given.shape[1]
        states_NX = start.given[..., 0].double().repeat_interleave(members, 0).numpy()
        for _ in range(steps):
            kicks_NX = random_kicks(
                rng,
                num=len(states_NX),
                num_points=num_points,
                max_wave_number=self._max_wave_number,
                size=self._kicks,
            )
            t = np.array([0.0, start.dt])
            states_NX = solve(states_NX + kicks_NX, nu=self._nu, t=t).fields[:, 1]
            yield torch.from_numpy(states_NX).float().reshape(len(start.given), members, num_points, 1)


@dataclass(frozen=True)
class Cost:
    """Of one time step of one member.

    Attributes:
        milliseconds: Wall time, decoding in it, where so many members are predicted together.
        flops: Counted operations, decoding in it.
    """

    milliseconds: float
    flops: float


def measure_costs(forecasters: Mapping[str, Forecaster], trajectories: Trajectories) -> dict[str, Cost]:
    """Costs of all forecasters; they take turns, so that what else the machine does meets all alike."""
    batch = next(iter(trajectories.batches(1)))
    start = start_of(batch, trajectories)
    seconds: dict[str, list[float]] = {name: [] for name in forecasters}
    for _ in range(1 + ROUNDS):  # the first one warms up
        for name, forecaster in forecasters.items():
            began = time.perf_counter()
            predict(forecaster, start, TIMED_STEPS, members=TIMED_MEMBERS)
            seconds[name].append(time.perf_counter() - began)
    return {
        name: Cost(
            milliseconds=1e3 * sorted(seconds[name][1:])[ROUNDS // 2] / TIMED_STEPS / TIMED_MEMBERS,
            flops=_flops(forecaster, start, 2) - _flops(forecaster, start, 1),
        )
        for name, forecaster in forecasters.items()
    }


def predict(forecaster: Forecaster, start: Start, steps: int, *, members: int) -> None:
    """So many members of a trajectory; of a forecaster without members, as many equal trajectories."""
    with torch.no_grad():
        if has_members(forecaster):
            for _ in forecaster.forecast_members(start, steps, members=members, seed=0):
                pass
        else:
            given = start.given.expand(members, *start.given.shape[1:])
            parameters = {name: value.expand(members) for name, value in start.parameters.items()}
            forecaster.forecast(Start(start.task, given, parameters, start.dt), steps)


def _flops(forecaster: Forecaster, start: Start, steps: int) -> int:
    return count_flops(lambda: predict(forecaster, start, steps, members=1))
