"""What a predicted time step costs: milliseconds, measured in turns, and counted operations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.generative.rows import ROUNDS, TIMED_MEMBERS, TIMED_STEPS
from ups.data.trajectories import Trajectories
from ups.eval.forecasters import Forecaster, Start, has_members
from ups.eval.rollout import start_of
from ups.train.flops import count_flops


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
