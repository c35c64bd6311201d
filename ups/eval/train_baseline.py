"""Training baselines on the fields that the operator's run trains on: within a budget; and where they lie.

The budget is wall time or windows seen. The first 70 % of it go to single steps, the rest to rollouts of
three, as one-step training alone drifts. Letters: B windows, K steps, X the axes of the grid, C channels.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ups.config import RunConfig
from ups.data.batches import batch_size_of
from ups.data.field_batches import FieldWindow, FieldWindows
from ups.data.fields import Fields
from ups.data.statistics import measure_statistics
from ups.data.trajectories import given_array, open_trajectories
from ups.data.windows import parameter_table
from ups.errors import ConfigError, DivergedError, MissingExtraError
from ups.eval.baseline_model import (
    DEFAULT_KINDS,
    LABELS,
    Baseline,
    BaselineSpec,
    Effort,
    Kind,
    load_baseline,
    network_size,
    save_baseline,
    trained_with,
)
from ups.losses import relative_square_error
from ups.optim import AveragedWeights
from ups.output import Note, check_writable, discard, progress_bar
from ups.trained.simulator import Simulator

_SINGLE_STEPS = 0.7  # share of the budget
_ROLLOUT_STEPS = 3
# Of 5e-4 to 1e-2 the best on the validation split of the demo, 60 s each (docs/results/accuracy.md).
_PEAK_LR: Mapping[Kind, float] = {"fno": 1e-3, "unet": 1e-3, "fno_neuraloperator": 1e-3}
_GRAD_CLIP = 1.0
_CURVE_EVERY = 20  # optimiser steps
_FOLDER = "baselines"  # in the folder of the checkpoints


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
    note: Note = discard,
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
    with progress_bar(f"{spec.task}: {LABELS[spec.kind]}", total=1) as advance:
        model.effort = _fit(model.train(), windows, budget, averaged, note, advance)
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
    # A parameter that doesn't vary says nothing.
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
    advance: Callable[[float], None],
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
        advance(min(spent, 1))
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


def find_baselines(config: RunConfig, simulator: Simulator, *, note: Note) -> list[Baseline]:
    """The baselines in `<checkpoint.dir>/baselines` that predict what the simulator does; others are named.

    Raises:
        CheckpointError: If one can't be read.
    """
    folder = config.checkpoint.dir / _FOLDER
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            model = load_baseline(path, device=str(simulator.device))
        except (ConfigError, MissingExtraError) as error:  # another machine may have had the package
            error.path = None
            note(f"{path} is left out: {error}")
            continue
        if problem := _mismatch(model, config, simulator):
            note(f"{path} is left out: {problem}")
        else:
            found.append(model)
    return found


def train_configured_baselines(config: RunConfig, *, device: torch.device, restart: bool, note: Note) -> None:
    """Train FNO and U-Net of every task within the budgets in `evaluation`, as `obtain_baseline` does.

    One that there can't be, such as for three axes, or that diverges, is named and left out: the operator has
    been trained by now, and is reported on without it.
    """
    wanted = Budget.of(seconds=config.evaluation.baseline_seconds, samples=config.evaluation.baseline_samples)
    for task, budget, kind in itertools.product(config.data.tasks, wanted, DEFAULT_KINDS):
        try:
            obtain_baseline(config, kind, task, budget=budget, device=device, restart=restart, note=note)
        except (ConfigError, DivergedError) as error:
            note(f"{task}: {LABELS[kind]} is left out: {error}")


def baseline_path(config: RunConfig, kind: str, task: str, limit: str) -> Path:
    """Where a baseline with a budget of "seconds" or "samples" lies."""
    return config.checkpoint.dir / _FOLDER / f"{task}_{kind}_{limit}.safetensors"


def obtain_baseline(
    config: RunConfig,
    kind: Kind,
    task: str,
    *,
    budget: Budget,
    device: torch.device,
    restart: bool = False,
    note: Note,
) -> Baseline:
    """The baseline of a run within a budget: the file of an earlier training, or one that is trained now.

    It is trained on the operator's training fields, with its batch size, seed, augmentation and EMA.

    Args:
        config: Configuration of the run.
        kind: "fno", "unet" or "fno_neuraloperator".
        task: Name of the task.
        budget: How much it may be trained.
        device: Where.
        restart: Train again although there is a file.
        note: Told what is being done.

    Raises:
        ConfigError: If there is no such baseline for the task.
        DivergedError: If a loss isn't finite.
        OutputError: If its file can't be written, before it is trained.
        ups_store.StoreError: If the data can't be read.
    """
    path, training = baseline_path(config, kind, task, budget.limit), config.training
    operator = config.stage("operator")
    stride = training.stride
    trajectories = open_trajectories(config.build, task, "train", source=training.field_source, stride=stride)
    spec = make_spec(kind, trajectories.fields, dt=trajectories.dt, stride=stride)
    options: dict[str, Any] = {
        "batch_size": batch_size_of(operator),
        "ema_decay": operator.ema_decay,
        "seed": config.seed,
        "augmented": training.augment,
    }
    settings = {"spec": spec.to_json(), "allowed": budget.allowed, **options}
    if path.exists() and not restart and trained_with(path) == json.loads(json.dumps(settings)):
        note(f"{path} is there already, trained alike")
        return load_baseline(path, device=str(device))
    check_writable(path.parent)
    note(f"{task}: {LABELS[kind]}, {budget}")
    model = train_baseline(spec, trajectories.fields, budget=budget, device=device, note=note, **options)
    save_baseline(path, model, settings=settings)
    return model


def _mismatch(model: Baseline, config: RunConfig, simulator: Simulator) -> str | None:
    """Why a baseline doesn't belong into the table, or None."""
    spec = model.spec
    if spec.task not in config.data.tasks or spec.task not in simulator.spec.tasks:
        return f"it is of another task, {spec.task}"
    if spec.grid != simulator.spec.tasks[spec.task].grid:
        return f"it is for another grid, {spec.grid.name}"
    is_steady = simulator.spec.tasks[spec.task].steady
    if is_steady and spec.size.get("predicts_change", True):
        return "it predicts a change of its input, which is no solution; train it again"
    if spec.stride != simulator.spec.time_stride and not is_steady:
        return f"it takes another time stride, {spec.stride}"
    return None
