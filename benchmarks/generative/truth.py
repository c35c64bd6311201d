"""The best that anybody can do on kicked Burgers: members that are solved with kicks of their own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.models.questions import Question
from ups.data.solvers.burgers1d import random_kicks, solve
from ups.eval.forecasters import Start


class TrueFutures:
    """Futures drawn from the distribution that the truth is drawn from.

    Args:
        question: Of Burgers' equation with kicks.
    """

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
