"""Validation of an operator: rollouts of trajectories of the validation split, decoded, in field space.

States that nothing can decode are compared as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ups.config import RunConfig
from ups.data.fields import evenly_spread
from ups.data.windows import Trajectories, open_latent_trajectories, open_trajectories
from ups.distributed.ranks import ALONE, Ranks
from ups.eval.forecasters import AutoencoderFloor, Forecaster, Persistence, predict
from ups.eval.metrics import DefinedErrors, mean_of_defined
from ups.grid import FIELDS

_BATCH_NBYTES = 64 << 20  # of true frames in float32


class RolloutValidation:
    """Trajectories evenly spread over the validation split, from the first frame to the last.

    Args:
        trajectories: By task.
        num: Trajectories of each task, at most, over all ranks.

    Attributes:
        left_out: By task, errors of the last `nrmse` that aren't defined, as the truth is zero in that frame
            and channel; tasks without such aren't named.
    """

    def __init__(self, trajectories: Mapping[str, Trajectories], *, num: int) -> None:
        self.trajectories = trajectories
        self.left_out: dict[str, int] = {}
        self._num = num

    @property
    def num_steps(self) -> dict[str, int]:
        """Steps of the rollouts of each task."""
        return {name: some.horizon for name, some in self.trajectories.items()}

    def of(self, tasks: Collection[str]) -> RolloutValidation:
        """The same for some of the tasks."""
        some = {name: self.trajectories[name] for name in tasks}
        return RolloutValidation(some, num=self._num)

    def nrmse(self, forecaster: Forecaster | AutoencoderFloor, *, ranks: Ranks = ALONE) -> dict[str, float]:
        """nRMSE over all predicted steps, trajectories and channels with a truth, by task; physical units.

        Args:
            ranks: The processes that roll out together, each its share; then it is a collective.

        Raises:
            ConfigError: Kind "zero_truth", if the truth of a task is zero throughout.
        """
        self.left_out = {}
        return {name: self._nrmse(forecaster, some, ranks) for name, some in self.trajectories.items()}

    def report(self, forecaster: Forecaster, *, ranks: Ranks) -> dict[str, Any]:
        """What a stage reports on rollouts, beside persistence; a collective.

        Raises:
            ConfigError: As `nrmse`.
        """
        nrmse, left_out = self.nrmse(forecaster, ranks=ranks), self.left_out
        transient = [name for name, some in self.trajectories.items() if not some.info.steady]
        return {
            "rollout_steps": self.num_steps,
            "nrmse": nrmse,
            "nrmse_left_out": left_out,
            "persistence_nrmse": self.of(transient).nrmse(Persistence(), ranks=ranks),
        }

    def _nrmse(
        self, forecaster: Forecaster | AutoencoderFloor, trajectories: Trajectories, ranks: Ranks
    ) -> float:
        samples = ranks.share(evenly_spread(len(trajectories), self._num))
        nbytes = 4 * trajectories.horizon * trajectories.info.grid.num_values(FIELDS)
        size = max(1, _BATCH_NBYTES // nbytes)
        found = DefinedErrors()
        for first in range(0, len(samples), size):
            batch = trajectories.read(samples[first : first + size])
            prediction = predict(forecaster, batch, trajectories)
            found.add(prediction.double(), batch.truth.double(), items=torch.from_numpy(batch.samples))
        errors, defined = found.joined(ranks)
        info = trajectories.info
        if missing := int((~defined).sum()):
            self.left_out[info.task] = missing
        return mean_of_defined(errors[defined], task=info.task, channels=info.channels)


def mean_over_tasks(errors: Mapping[str, float]) -> float:
    """Mean of what `RolloutValidation.nrmse` gives: every task counts alike."""
    return sum(errors.values()) / len(errors)


def scored(errors: Mapping[str, float], name: str = "nrmse") -> dict[str, float]:
    """Metrics of a validation: errors by task, and their mean as the `score`."""
    return {"score": mean_over_tasks(errors), **{f"val/{name}/{task}": e for task, e in errors.items()}}


def open_validation(config: RunConfig) -> RolloutValidation:
    """Open the validation trajectories of all tasks."""
    trajectories = {
        task: open_trajectories(
            config.build,
            task,
            "val",
            source=config.training.field_source,
            stride=config.training.stride,
        )
        for task in config.data.tasks
    }
    return RolloutValidation(trajectories, num=config.operator.val_trajectories)


def open_latent_validation(config: RunConfig) -> RolloutValidation:
    """Open the validation trajectories of all tasks as latents, which need be no fields' that are at hand."""
    stride = config.training.stride
    trajectories = {
        task: open_latent_trajectories(config, task, "val", stride=stride, horizon=None)
        for task in config.data.tasks
    }
    return RolloutValidation(trajectories, num=config.operator.val_trajectories)
