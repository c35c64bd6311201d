"""Training a baseline on the fields that the operator's run trains on, within a budget.

The budget is wall time or windows seen. The first 70 % of it go to single steps, the rest to rollouts of
three, as one-step training alone drifts. Letters: B windows, K steps, X the axes of the grid, C channels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ups.data.field_batches import FieldWindow, FieldWindows
from ups.data.fields import Fields
from ups.data.statistics import measure_statistics
from ups.data.trajectories import given_array
from ups.data.windows import parameter_table
from ups.errors import ConfigError, DivergedError
from ups.eval.baseline_model import LABELS, Baseline, BaselineSpec, Effort, Kind, network_size
from ups.losses import relative_square_error
from ups.optim import AveragedWeights
from ups.output import Note, nobody

_SINGLE_STEPS = 0.7  # share of the budget
_ROLLOUT_STEPS = 3
# Of 5e-4 to 1e-2 the best on the validation split of the demo, 60 s each (docs/evaluation.md).
_PEAK_LR: Mapping[Kind, float] = {"fno": 1e-3, "unet": 1e-3, "fno_neuraloperator": 1e-3}
_GRAD_CLIP = 1.0
_CURVE_EVERY = 20  # optimiser steps


@dataclass(frozen=True)
class Budget:
    """How much a baseline may be trained: one of the two.

    Attributes:
        seconds: Wall time. How many steps that is depends on the machine.
        samples: Windows seen, as for the operator; repeats to the bit.
    """

    seconds: float | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.samples is None) or not self.allowed > 0:
            raise ConfigError(
                "budget of a baseline",
                kind="budget",
                expected="seconds or samples, > 0",
                found=f"seconds={self.seconds}, samples={self.samples}",
            )

    @classmethod
    def of(cls, *, seconds: float | None, samples: int | None) -> list[Budget]:
        """A budget of each that is given."""
        by_time = [] if seconds is None else [cls(seconds=seconds)]
        return by_time + ([] if samples is None else [cls(samples=samples)])

    @property
    def limit(self) -> Literal["seconds", "samples"]:
        """What it counts."""
        return "seconds" if self.samples is None else "samples"

    @property
    def allowed(self) -> float:
        """How many of them."""
        return float(self.seconds or self.samples or 0)

    def __str__(self) -> str:
        return f"budget of {self.allowed:g} {self.limit}"

    def spent(self, *, seconds: float, samples: int) -> float:
        """Share that is used up."""
        return (seconds if self.limit == "seconds" else samples) / self.allowed


def train_baseline(
    spec: BaselineSpec,
    fields: Fields,
    *,
    budget: Budget,
    batch_size: int = 32,
    seed: int = 0,
    augmented: bool = True,
    ema_decay: float | None = None,
    device: torch.device | str = "cpu",
    note: Note = nobody,
) -> Baseline:
    """Train a baseline one step ahead.

    Args:
        spec: What `make_spec` made of the fields.
        fields: Training fields of one task.
        budget: When to stop.
        batch_size: Windows of a batch.
        seed: Of weights, order and augmentation.
        augmented: Whether windows are shifted and reflected.
        ema_decay: Of the average of the weights that is the result; None for the last weights.
        device: Where.
        note: Told the loss now and then.

    Returns:
        The model in evaluation mode, with `effort`.

    Raises:
        ConfigError: If there is no such baseline for the fields, or they are too short.
        DivergedError: If the loss isn't finite.
    """
    torch.manual_seed(seed)
    model = Baseline(spec).to(device)
    windows = FieldWindows(fields, batch_size=batch_size, stride=spec.stride, seed=seed, augmented=augmented)
    averaged = None if ema_decay is None else AveragedWeights(model, decay=ema_decay)
    model.effort = _fit(model.train(), windows, budget, averaged, note)
    if averaged is not None:
        averaged.adopt()
    return model.eval()


def make_spec(kind: Kind, fields: Fields, *, dt: float | None, stride: int) -> BaselineSpec:
    """What a baseline will be; reads all training fields for their statistics.

    Args:
        kind: Which.
        fields: Training fields of one task.
        dt: Time from one frame to the next; None of a steady task.
        stride: Stored time steps from one frame to the next.
    """
    info = fields.info
    statistics: dict[str, Any] = {
        array: values.to_json() for array, values in measure_statistics(fields).items()
    }
    columns = fields.parameters(np.arange(len(fields.num_steps)))
    table = np.stack([columns[name] for name in info.parameters], 1) if info.parameters else np.zeros((1, 0))
    # A parameter that doesn't vary tells nothing.
    spread = np.where(np.ptp(table, axis=0) > 0, table.std(0), 1.0)
    statistics["parameters"] = {"mean": table.mean(0).tolist(), "std": spread.tolist()}
    return BaselineSpec(
        kind=kind,
        task=info.task,
        grid=info.grid,
        given_array=given_array(info),
        dt=dt,
        stride=stride,
        parameters=info.parameters,
        statistics=statistics,
        # From its input to a solution there is no change: they are different quantities.
        size=network_size(kind, info.grid) | ({"predicts_change": False} if info.steady else {}),
    )


def _fit(
    model: Baseline,
    windows: FieldWindows,
    budget: Budget,
    averaged: AveragedWeights | None,
    note: Note,
) -> Effort:
    optimizer = torch.optim.Adam(model.parameters(), lr=_PEAK_LR[model.spec.kind], betas=(0.9, 0.99))
    began, samples, step, spent = time.perf_counter(), 0, 0, 0.0
    curve: list[tuple[int, float]] = []
    while spent < 1:
        for group in optimizer.param_groups:
            group["lr"] = _PEAK_LR[model.spec.kind] * 0.5 * (1 + math.cos(math.pi * spent))
        batch = windows.batch(step, steps=1 if spent < _SINGLE_STEPS else _ROLLOUT_STEPS)
        loss = _loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if averaged is not None:
            averaged.update()
        step, samples = step + 1, samples + len(batch)
        spent = budget.spent(seconds=time.perf_counter() - began, samples=samples)
        if step % _CURVE_EVERY == 0:
            curve.append((step, _finite(loss, step, LABELS[model.spec.kind])))
            if step % (50 * _CURVE_EVERY) == 0:
                note(f"step {step}, {spent:.0%} of the budget, loss {curve[-1][1]:.4g}")
    _finite(loss, step, LABELS[model.spec.kind])
    seconds = time.perf_counter() - began
    return Effort(budget.limit, budget.allowed, seconds, samples, step, tuple(curve))


def _loss(model: Baseline, batch: FieldWindow) -> Tensor:
    """Square of nRMSE, mean over windows, steps and channels."""
    std_C = model.get_buffer("fields_std")
    truth_BKXC = batch.truth.to(std_C.device)
    table_BP = parameter_table(batch.parameters, model.spec.parameters, len(batch)).to(std_C.device)
    prediction_BKXC = model(batch.given.to(std_C.device), table_BP, steps=truth_BKXC.shape[1])
    prediction, truth = (frames.flatten(0, 1).flatten(1, -2) for frames in (prediction_BKXC, truth_BKXC))
    return relative_square_error(prediction, truth, power_BC=truth.square().mean(1), std_C=std_C)


def _finite(loss: Tensor, step: int, label: str) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        error = DivergedError(
            f"step {step}: the loss of {label} is not finite", hint="look at the data, or use another seed"
        )
        error.step, error.loss_name = step, "relative"
        raise error
    return value
