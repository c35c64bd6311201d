"""One seed of one task: operator, corrector and student trained, and all of them measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from benchmarks.harness.commands import note
from benchmarks.models.questions import TEST, Question, hash_of
from benchmarks.models.training import make_data, run_values
from ups.config import load_config
from ups.data.solvers.burgers1d import random_kicks, solve
from ups.data.windows import Trajectories, open_trajectories
from ups.eval.ensembles import Climate, EnsembleErrors, roll_out_members
from ups.eval.forecasters import (
    CorrectedForecaster,
    Forecaster,
    OperatorForecaster,
    Start,
    has_members,
    start_of,
)
from ups.output import appears_whole, write_atomically
from ups.train.flops import count_flops
from ups.train.run import run_stage
from ups.trained.corrected import load_corrected
from ups.trained.simulator import load_simulator


class Trained(NamedTuple):
    """A seed of a task: reports of its stages, its rows, and the trajectories to measure them on."""

    reports: Mapping[str, Mapping[str, Any]]
    makers: Mapping[str, Callable[[], Forecaster]]  # by row
    trajectories: Trajectories
    checkpoints: Path

    def errors(self) -> dict[str, EnsembleErrors]:
        """Errors of all rows on the test split by name, measured unless their files are there."""
        return {name: _measured(self, name) for name in self.makers}


def trained(task: Task, seed: int, folder: Path) -> Trained:
    """Train the stages of a task that aren't trained yet."""
    question = task.question
    asked = [task.num_trajectories, task.horizon, MEMBERS, MEMBER_SEED, CORRECTOR_STEPS]
    keys = [question.key(name) for name in question.sets]
    values = run_values(question, Path("data"))
    identity = hash_of([keys, list(question.overrides), list(task.overrides), values, asked])
    checkpoints = folder / question.name / f"{seed}-{identity}"
    given = [*question.overrides, *task.overrides, f"seed={seed}"]
    given.append(f"checkpoint.dir={json.dumps(str(checkpoints))}")
    config = load_config(make_data(question, folder / question.name), overrides=given)
    stages = ["operator", "corrector", "student"]
    if "operator.state=latent" in question.overrides:
        stages.insert(0, "autoencoder")  # linear latents need no training, but their stage
    reports = {}
    for stage in stages:
        report = checkpoints / f"{stage}.report.json"
        if not report.exists():
            note(f"{question.name}: {stage}, seed {seed}")
            values = run_stage(stage, config)
            write_atomically(report, json.dumps(values, indent=1, default=str).encode())
        reports[stage] = json.loads(report.read_text())

    def corrected(kind: str, num_steps: int) -> Forecaster:
        model = load_corrected(checkpoints / f"{kind}.safetensors", kind=kind)
        return CorrectedForecaster(model, num_sampler_steps=num_steps)

    operator = checkpoints / "operator.safetensors"
    makers: dict[str, Callable[[], Forecaster]] = {
        OPERATOR: lambda: OperatorForecaster(load_simulator(operator)),
        CORRECTOR: partial(corrected, "corrector", CORRECTOR_STEPS),
        **{name: partial(corrected, "student", num_steps) for num_steps, name in STUDENTS.items()},
    }
    if task is KICKED:
        makers[TRUTH] = lambda: TrueFutures(question)
    trajectories = open_trajectories(
        config.build, question.task, TEST, horizon=task.horizon, max_trajectories=task.num_trajectories
    )
    return Trained(reports, makers, trajectories, checkpoints)


def _measured(seed: Trained, name: str) -> EnsembleErrors:
    path = seed.checkpoints / f"errors-{name.replace(', ', '-').replace(' ', '-')}.npz"
    if not path.exists():
        note(f"{seed.checkpoints.parent.name}: measures {name}")
        forecaster, climate = seed.makers[name](), Climate.of(seed.trajectories)
        num = MEMBERS if has_members(forecaster) else None
        rolled = roll_out_members(forecaster, seed.trajectories, climate, members=num, seed=MEMBER_SEED)
        errors = rolled.errors
        arrays = {key: value.numpy() for key, value in errors.tensors().items()}
        with appears_whole(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, num_members=errors.num_members, **arrays)
    with np.load(path) as saved:
        num_members = int(saved["num_members"])
        tensors = {key: torch.from_numpy(saved[key]) for key in saved.files if key != "num_members"}
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


class Cost(NamedTuple):
    """Of one time step of one member, decoding in it: wall time where so many are predicted together."""

    milliseconds: float
    flops: float


def measure_costs(seed: Trained) -> dict[str, Cost]:
    """Time all rows but the truth, in turns, so that what else the machine does meets all alike."""
    forecasters = {name: make() for name, make in seed.makers.items() if name != TRUTH}
    start = start_of(next(iter(seed.trajectories.batches(1))), seed.trajectories)
    seconds: dict[str, list[float]] = {name: [] for name in forecasters}
    for _ in range(1 + ROUNDS):  # the first one warms up
        for name, forecaster in forecasters.items():
            began = time.perf_counter()
            _predict(forecaster, start, TIMED_STEPS, TIMED_MEMBERS)
            seconds[name].append(time.perf_counter() - began)
    costs = {}
    for name, forecaster in forecasters.items():
        one, two = (count_flops(partial(_predict, forecaster, start, steps, 1)) for steps in (1, 2))
        milliseconds = 1e3 * sorted(seconds[name][1:])[ROUNDS // 2] / TIMED_STEPS / TIMED_MEMBERS
        costs[name] = Cost(milliseconds, two - one)
    return costs


def _predict(forecaster: Forecaster, start: Start, steps: int, members: int) -> None:
    """Predict members of a trajectory; of a forecaster without members, as many equal trajectories."""
    with torch.no_grad():
        if has_members(forecaster):
            for _ in forecaster.forecast_members(start, steps, members=members, seed=0):
                pass
        else:
            given = start.given.expand(members, *start.given.shape[1:])
            parameters = {name: value.expand(members) for name, value in start.parameters.items()}
            forecaster.forecast(Start(start.task, given, parameters, start.dt), steps)
