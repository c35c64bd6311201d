"""Validation of an operator: rollouts of trajectories of the validation split, decoded, in field space."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ups.config import RunConfig
from ups.data.fields import FIELDS
from ups.data.trajectories import Trajectories, open_trajectories
from ups.eval.forecasters import AutoencoderFloor, Forecaster
from ups.eval.metrics import nrmse_per_sample
from ups.eval.rollout import predict

_BATCH_NBYTES = 64 << 20  # of true frames in float32


class RolloutValidation:
    """Trajectories evenly spread over the validation split, from the first frame to the last.

    Args:
        trajectories: By task.
        num: Trajectories of each task, at most.
    """

    def __init__(self, trajectories: Mapping[str, Trajectories], *, num: int) -> None:
        self.trajectories = trajectories
        self._num = num

    @property
    def num_steps(self) -> dict[str, int]:
        """Steps of the rollouts of each task."""
        return {name: some.horizon for name, some in self.trajectories.items()}

    def of(self, tasks: Collection[str]) -> RolloutValidation:
        """The same for some of the tasks."""
        some = {name: self.trajectories[name] for name in tasks}
        return RolloutValidation(some, num=self._num)

    def nrmse(self, forecaster: Forecaster | AutoencoderFloor) -> dict[str, float]:
        """nRMSE over all predicted steps, trajectories and channels, by task; physical units."""
        return {name: self._nrmse(forecaster, some) for name, some in self.trajectories.items()}

    def _nrmse(self, forecaster: Forecaster | AutoencoderFloor, trajectories: Trajectories) -> float:
        num = min(self._num, len(trajectories))
        samples = ((np.arange(num) + 0.5) * len(trajectories) / num).astype(np.int64)
        nbytes = 4 * trajectories.horizon * trajectories.info.grid.num_values(FIELDS)
        size = max(1, _BATCH_NBYTES // nbytes)
        total = 0.0
        for first in range(0, num, size):
            batch = trajectories.read(samples[first : first + size])
            prediction = predict(forecaster, batch, trajectories)
            errors = nrmse_per_sample(prediction.double(), batch.truth.double())
            total += float(errors.flatten(1).mean(1).sum())
        return total / num


def open_validation(config: RunConfig) -> RolloutValidation:
    """Open the validation trajectories of all tasks.

    Raises:
        ConfigError: As `open_trajectories`, such as for a split without samples.
        ups_store.StoreError: If the data can't be read.
    """
    trajectories = {
        task: open_trajectories(
            config.build,
            task,
            "val",
            source=config.training.field_source,
            stride=config.training.time_stride,
        )
        for task in config.data.task
    }
    return RolloutValidation(trajectories, num=config.operator.val_trajectories)
