"""Ensembles of a generative stage, measured on the held-out trajectories that it wasn't trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ups.data.windows import Trajectories, times_of
from ups.distributed.ranks import ALONE, Ranks
from ups.eval.ensemble_scores import ensemble_numbers
from ups.eval.ensembles import Climate, EnsembleErrors, EnsembleRollout, roll_out_members, roll_out_point
from ups.eval.forecasters import EnsembleForecaster, Forecaster


@dataclass(frozen=True)
class Measured:
    """What came of a forecaster, by task.

    Attributes:
        errors: Of all trajectories.
        numbers: Scores of `ups.eval.ensemble_scores`, and `ms_per_step` of one member.
    """

    errors: Mapping[str, EnsembleErrors]
    numbers: Mapping[str, dict[str, float]]


class EnsembleValidation:
    """Trajectories of all tasks, spread evenly over those that are held out.

    Args:
        trajectories: By task.
        stride: Stored time steps from one frame to the next.
        num: Of each task, at most.
        members: M.
        seed: Of the members: all that are measured get the same noise.
        ranks: Who measures together, each its share; then all methods are collectives.
    """

    def __init__(
        self,
        trajectories: Mapping[str, Trajectories],
        *,
        stride: int,
        num: int,
        members: int,
        seed: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self._trajectories = {task: _some(each, stride, num) for task, each in trajectories.items()}
        self._climates = {task: Climate.of(each) for task, each in self._trajectories.items()}
        self._members, self._seed, self._ranks = members, seed, ranks

    def members_of(self, forecaster: EnsembleForecaster) -> Measured:
        """Of a forecaster's ensembles."""
        rolled = {
            task: roll_out_members(
                forecaster,
                some,
                self._climates[task],
                members=self._members,
                seed=self._seed,
                ranks=self._ranks,
            )
            for task, some in self._trajectories.items()
        }
        return self._measured(rolled, self._members)

    def forecasts_of(self, forecaster: Forecaster) -> Measured:
        """Of single forecasts, as if they were sure."""
        rolled = {
            task: roll_out_point(forecaster, some, self._climates[task], ranks=self._ranks)
            for task, some in self._trajectories.items()
        }
        return self._measured(rolled, 1)

    def _measured(self, rolled: Mapping[str, EnsembleRollout], members: int) -> Measured:
        numbers = {}
        for task, each in rolled.items():
            some = self._trajectories[task]
            own = len(self._ranks.share(np.arange(len(some))))
            ms = torch.tensor(1e3 * each.seconds / (own * some.horizon * members))
            mean_ms = float(self._ranks.sum(ms)) / self._ranks.world_size
            numbers[task] = {**ensemble_numbers(each.errors), "ms_per_step": mean_ms}
        return Measured({task: each.errors for task, each in rolled.items()}, numbers)


def numbers_of(rows: Mapping[str, Measured]) -> dict[str, dict[str, dict[str, float]]]:
    """Numbers of several rows by task, then row, for a report."""
    tasks = next(iter(rows.values())).numbers
    return {task: {name: row.numbers[task] for name, row in rows.items()} for task in tasks}


def columns_of(rows: Mapping[str, Measured]) -> dict[str, dict[str, float]]:
    """What a report shows for people, by task, of the first row and of the operator alone."""
    own, operator = next(iter(rows.values())), rows["operator"]
    named = {"nrmse": "mean_nrmse", "spread": "spread", "spread_skill": "spread_skill", "crps": "crps"}
    columns = {
        column: {task: numbers[name] for task, numbers in own.numbers.items()}
        for column, name in named.items()
    }
    for column in ("nrmse", "crps"):
        found = {task: numbers[named[column]] for task, numbers in operator.numbers.items()}
        columns[f"operator_{column}"] = found
    return columns


def _some(trajectories: Trajectories, stride: int, num: int) -> Trajectories:
    """At most so many of them, spread evenly."""
    fields = trajectories.fields
    return Trajectories(fields, stored_t=times_of(fields), stride=stride, max_trajectories=num)
