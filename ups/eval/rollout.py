"""Autoregressive rollouts: from one given frame to the end of the trajectory, by anything that can predict.

One frame is given (a Markov operator needs no more), where PDEBench gives ten; of a steady task it is the
constant field that decides the solution, and one step predicts the solution. Letters: B trajectories, T time
steps, X the axes of the grid, C channels.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.data.windows import Trajectories, TrajectoryBatch
from ups.errors import ShapeError
from ups.eval.forecasters import AutoencoderFloor, Forecaster, Start
from ups.eval.metrics import shell_energy
from ups.eval.trajectory_errors import TrajectoryErrors, join, measure
from ups.grid import domain_lengths
from ups.output import progress_bar


@dataclass(frozen=True)
class Rollout:
    """What came of a forecaster on a split.

    Attributes:
        errors: Of all trajectories.
        energy: Mean energy by wave number of the last predicted frame, all channels, shape (K,).
        true_energy: The same of the truth.
        seconds: Wall time of predicting, reading and measuring aside.
    """

    errors: TrajectoryErrors
    energy: Tensor
    true_energy: Tensor
    seconds: float


def roll_out(
    forecaster: Forecaster | AutoencoderFloor, trajectories: Trajectories, *, batch_size: int | None = None
) -> Rollout:
    """Predict all trajectories of a split and measure the errors, a batch at a time.

    Args:
        trajectories: Of a split.
        batch_size: Trajectories at a time; by default by their size.

    Raises:
        ShapeError: If the forecaster returns another shape than it should.
    """
    info = trajectories.info
    lengths = domain_lengths(info.domain_lengths, ndim=info.grid.ndim)
    parts: list[TrajectoryErrors] = []
    energies = [torch.zeros(()), torch.zeros(())]
    seconds = 0.0
    with progress_bar(f"{info.task}: {forecaster.label}", total=len(trajectories)) as advance:
        for batch in trajectories.batches(batch_size):
            began = time.perf_counter()
            prediction = predict(forecaster, batch, trajectories)
            seconds += time.perf_counter() - began
            given = None if info.steady else batch.given
            parts.append(measure(prediction, batch.truth, given=given, lengths=lengths))
            for i, fields in enumerate((prediction, batch.truth)):
                energies[i] = energies[i] + shell_energy(fields[:, -1:].double()).sum((0, 1, 3))
            advance(float(batch.samples[-1]) + 1)
    energy, true_energy = (total / len(trajectories) for total in energies)
    return Rollout(join(parts), energy, true_energy, seconds)


def predict(
    forecaster: Forecaster | AutoencoderFloor, batch: TrajectoryBatch, trajectories: Trajectories
) -> Tensor:
    """The predicted frames of a batch, on the CPU, shape (B, T, X..., C)."""
    start = start_of(batch, trajectories)
    if isinstance(forecaster, AutoencoderFloor):
        return forecaster.restore(batch.truth, start)
    prediction = forecaster.forecast(start, trajectories.horizon).cpu()
    if prediction.shape != batch.truth.shape:
        raise ShapeError(
            f"forecast of {forecaster.name}", expected=tuple(batch.truth.shape), found=tuple(prediction.shape)
        )
    return prediction


def start_of(batch: TrajectoryBatch, trajectories: Trajectories) -> Start:
    """What forecasters are given of a batch."""
    return Start(trajectories.info.task, batch.given, batch.parameters, trajectories.dt)
