"""Where the baselines of a run lie, and which of them belong beside a simulator."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch

from ups.config import RunConfig
from ups.data.trajectories import open_trajectories
from ups.errors import ConfigError, DivergedError
from ups.eval.baseline_model import (
    DEFAULT_KINDS,
    LABELS,
    Baseline,
    Kind,
    load_baseline,
    save_baseline,
    trained_with,
)
from ups.eval.train_baseline import Budget, make_spec, train_baseline
from ups.output import Note, expect_writable
from ups.trained.simulator import Simulator

_FOLDER = "baselines"  # in the folder of the checkpoints


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
        except ConfigError as error:  # such as a package that isn't there, where another machine had it
            error.path = None
            note(f"{path} is left out: {error}")
            continue
        if problem := _mismatch(model, config, simulator):
            note(f"{path} is left out: {problem}")
        else:
            found.append(model)
    return found


def obtain_wanted(config: RunConfig, *, device: torch.device, restart: bool, note: Note) -> None:
    """Train FNO and U-Net of every task within the budgets in `evaluation`, as `obtain_baseline` does.

    One that there can't be, such as for three axes, or that diverges, is told and left out: the operator has
    been trained by now, and is reported on without it.
    """
    wanted = Budget.of(seconds=config.evaluation.baseline_seconds, samples=config.evaluation.baseline_samples)
    for task, budget, kind in itertools.product(config.data.task, wanted, DEFAULT_KINDS):
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
        restart: Train anew although there is a file.
        note: Told what is being done.

    Raises:
        ConfigError: If there is no such baseline for the task.
        DivergedError: If a loss isn't finite.
        OutputError: If its file can't be written, before it is trained.
        ups_store.StoreError: If the data can't be read.
    """
    path, training = baseline_path(config, kind, task, budget.limit), config.training
    operator = config.stage("operator")
    stride = training.time_stride
    trajectories = open_trajectories(config.build, task, "train", source=training.field_source, stride=stride)
    spec = make_spec(kind, trajectories.fields, dt=trajectories.dt, stride=stride)
    options: dict[str, Any] = {
        "batch_size": operator.batch_size,
        "ema_decay": operator.ema_decay,
        "seed": config.seed,
        "augmented": training.augment,
    }
    settings = {"spec": spec.to_json(), "allowed": budget.allowed, **options}
    if path.exists() and not restart and trained_with(path) == json.loads(json.dumps(settings)):
        note(f"{path} is there already, trained alike")
        return load_baseline(path, device=str(device))
    expect_writable(path.parent)
    note(f"{task}: {LABELS[kind]}, {budget}")
    model = train_baseline(spec, trajectories.fields, budget=budget, device=device, note=note, **options)
    save_baseline(path, model, settings=settings)
    return model


def _mismatch(model: Baseline, config: RunConfig, simulator: Simulator) -> str | None:
    """Why a baseline doesn't belong into the table, or None."""
    spec = model.spec
    if spec.task not in config.data.task or spec.task not in simulator.spec.tasks:
        return f"it is of another task, {spec.task}"
    if spec.grid != simulator.spec.tasks[spec.task].grid:
        return f"it is for another grid, {spec.grid.name}"
    is_steady = simulator.spec.tasks[spec.task].steady
    if is_steady and spec.size.get("predicts_change", True):
        return "it predicts a change of its input, which is no solution; train it anew"
    if spec.stride != simulator.spec.time_stride and not is_steady:
        return f"it takes another time stride, {spec.stride}"
    return None
