"""Baselines for tests: made without training, or trained as a stage in a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_simulators import configure

from ups.config import RunConfig
from ups.data.windows import open_trajectories
from ups.eval.baseline_model import Baseline, Effort, load_baseline, make_spec
from ups.eval.runs import baseline_path
from ups.train.run import run_stage
from ups.train.train_baselines import config_of_baseline

EFFORT = Effort("samples", 32, steps=1, samples=32, flops=1e6, seconds=0.5)
# Steps of 16 windows; evaluation as small.
SMALL = {
    "training.batch_size": 16,
    "training.augment": "false",
    "training.lambda_relative": 1.0,
    "training.device": "cpu",
    "training.prefetch_factor": 0,
    "operator.val_trajectories": 1,
}


def untrained(root: Path, kind: str = "fno", task: str = "burgers1d", stride: int = 1) -> Baseline:
    """A baseline that says it was trained on 32 samples."""
    config = configure(root, task, **{"training.stride": stride})
    trajectories = open_trajectories(config.build, task, "train", stride=stride)
    return Baseline(make_spec(kind, trajectories, config), EFFORT).eval()


def small_config(root: Path, folder: Path, *tasks: str, **options: Any) -> RunConfig:
    """The configuration of a run whose checkpoints lie in a folder."""
    return configure(root, *tasks, **{**SMALL, "checkpoint.dir": folder, **options})


def train(
    root: Path, folder: Path, kind: str = "fno", task: str = "burgers1d", *, steps: int = 10, **options: Any
) -> Baseline:
    """Train one for some steps, validated twice."""
    own = {f"stages.{kind}.steps": steps, f"stages.{kind}.epochs": 2, **options}
    config = small_config(root, folder, task, **own)
    run_stage(kind, config_of_baseline(config, kind, task))
    return load_baseline(baseline_path(config, kind, task, "steps"))
