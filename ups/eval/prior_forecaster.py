"""A prior of steady solutions as what predicts: ensembles, and their mean where one forecast is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ups.data.observations import masks_of_samples
from ups.eval.forecasters import Start
from ups.trained.prior import SteadyPrior


class PriorForecaster:
    """Draws solutions; where the prior is given its input at few points, these depend on the sample alone.

    Args:
        model: In evaluation mode.
        note: What the reader has to know.
        name: Of its row.
        label: For people.
        members: Of the ensemble whose mean `forecast` gives; a regression has one.
        seed: Of that ensemble, and of the points that are observed.
    """

    def __init__(
        self,
        model: SteadyPrior,
        *,
        note: str = "",
        name: str = "prior",
        label: str | None = None,
        members: int = 16,
        seed: int = 0,
    ) -> None:
        self.model, self.note, self.name, self._seed = model, note, name, seed
        is_flow = model.prior_spec.method == "flow"
        self.label = label or ("prior" if is_flow else "direct regression")
        self._members = members if is_flow else 1

    def forecast(self, start: Start, steps: int) -> Tensor:
        """The mean of an ensemble; see `Forecaster.forecast`."""
        (frame,) = self.forecast_members(start, steps, members=self._members, seed=self._seed)
        return frame.mean(dim=1).unsqueeze(1)

    def forecast_members(self, start: Start, steps: int, *, members: int, seed: int) -> Iterator[Tensor]:
        """Draw solutions; see `EnsembleForecaster.forecast_members`, of one step."""
        return self.model.rollout_steps(
            start.given,
            steps,
            members=members,
            seed=seed,
            observed=self.observed(start.given),
            task=start.task,
            parameters=start.parameters_of(self.model.spec),
        )

    def observed(self, given_BXC: Tensor) -> Tensor | None:
        """The points at which inputs are observed; None for all of them."""
        num = self.model.prior_spec.observed_points
        return None if num is None else masks_of_samples(given_BXC, num=num, seed=self._seed)
