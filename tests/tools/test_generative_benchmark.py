"""`make bench-generative`: the truth is that of the data; the table says what is ahead, what misses gates."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from benchmarks.generative import table
from benchmarks.generative.questions import CORRECTOR, KICKED, OPERATOR, STUDENTS, TASKS
from benchmarks.generative.training import Cost, TrueFutures
from ups import stages
from ups.config import load_config
from ups.data.solvers.burgers1d import Burgers1D
from ups.data.windows import TrajectoryBatch
from ups.eval.ensembles import Climate, EnsembleErrors, measure_ensemble
from ups.eval.forecasters import Start

ONE, TWO = STUDENTS.values()


def ensembles(num_members: int, *, scale: float = 1.0, seed: int = 0) -> EnsembleErrors:
    """Of 24 trajectories of one step, smooth but for noise of size 0.3, which members have `scale` times."""
    rng = np.random.default_rng(5)
    waves = np.sin(2 * np.pi * np.arange(64) / 64 + rng.uniform(0, 6, (24, 1)))[:, None, :, None]
    truth = torch.from_numpy(waves + 0.3 * rng.standard_normal(waves.shape)).float()
    noise = np.random.default_rng(seed).standard_normal((24, num_members, 64, 1))
    members = torch.from_numpy(waves + 0.3 * scale * noise).float()
    batch = TrajectoryBatch(np.arange(24), truth[:, 0], truth, {})
    climate = Climate(torch.ones(1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64))
    return measure_ensemble(iter([members]), batch, climate, seed=7)


def errors_of(student_scale: float) -> dict[str, list[EnsembleErrors]]:
    found = {OPERATOR: [ensembles(1, scale=0.0)], CORRECTOR: [ensembles(64)]}
    return {**found, ONE: [ensembles(64, scale=student_scale)], TWO: [ensembles(64, seed=2)]}


def test_true_futures_are_spread_as_the_data_are() -> None:
    settings = {**KICKED.question.settings, "points": 32, "frames": 4, "end_time": 0.3}
    question = dataclasses.replace(KICKED.question, settings=settings)
    problem = Burgers1D(**settings)
    state = problem.sample([0], seed=3).fields[:, 0]
    start = Start("burgers1d", torch.from_numpy(state).float()[..., None], {}, 0.1)
    members = list(TrueFutures(question).forecast_members(start, 3, members=200, seed=1))
    assert [tuple(step.shape) for step in members] == [(1, 200, 32, 1)] * 3
    spread = [step.std(1).mean().item() for step in members]
    assert spread[0] < spread[1] < spread[2]
    assert spread[0] == pytest.approx(settings["kicks"], rel=0.3)
    same = list(TrueFutures(question).forecast_members(start, 3, members=200, seed=1))
    assert torch.equal(same[2], members[2])


def test_table_says_what_is_ahead_what_it_costs_and_which_gates_are_missed() -> None:
    errors = errors_of(1.0)
    scores = table.scores_of(errors)
    costs = {name: Cost(milliseconds=1.0, flops=1e6 * (1 + number)) for number, name in enumerate(errors)}
    reports = [{"operator": {"steps": 10, "cpu_seconds": 1.0}}]
    text = table.markdown(KICKED, errors, scores, costs, reports)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert "**ahead**" in next(row for row in rows if "corrector, 32 steps" in row)
    assert rows[1].split("|")[5].strip() == "–"  # the operator, beside itself
    assert "| 4.00 |" in next(row for row in rows if "student, 2 steps" in row)
    assert "student, 1 step passes all" in text
    json.dumps(table.to_json(scores, costs))
    narrow = errors_of(0.1)
    missed = table.missed_gates(narrow)
    assert missed[CORRECTOR] == {}
    assert {"spread", "spread_skill"} <= missed[ONE].keys()
    text = table.markdown(KICKED, narrow, table.scores_of(narrow), costs, reports)
    assert "misses spread in 1 of 1 seeds" in text


def test_configurations_of_all_tasks_are_sound() -> None:
    for task in TASKS:
        overrides = ["data.tasks=burgers1d", *task.question.overrides, *task.overrides]
        config = load_config(overrides=overrides)
        assert config.trains(stages.CORRECTOR)
        assert config.trains(stages.STUDENT)
        assert config.diffusion.lead_times == task.lead_times
