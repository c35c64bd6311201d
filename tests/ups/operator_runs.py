"""A small run up to its latent stores: data of three tasks, an autoencoder, stores of latents and fields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ups.config import RunConfig, load_config
from ups.data.solvers import make_dataset
from ups.train.run import run_stage
from ups_store.build.config import load_config as load_build_config
from ups_store.build.stores import build_all

TASKS = ("advection1d", "burgers1d", "darcy2d")
SETTINGS: dict[str, Any] = {
    "data": {"task": list(TASKS), "root": "data"},
    "cache": {"dir": "cache"},
    "latent": {"dim": 2, "tokens": 8},
    "encoder": {"patch_size": 4, "width": 16, "depth": 1},
    "decoder": {"width": 16, "depth": 1},
    "operator": {
        "pdet": {"hidden_dim": 16, "depths": [1, 1], "num_heads": 2},
        "val_trajectories": 2,
    },
    "training": {
        "batch_size": 8,
        "lr": 1e-2,
        "latent_cache_dir": "latents",
        "num_workers": 0,
        "device": "cpu",
        "log_every": 5,
    },
    "stages": {
        "autoencoder": {"epochs": 1, "steps_per_epoch": 150},
        "operator": {"epochs": 2, "steps_per_epoch": 20},
    },
    "checkpoint": {"dir": "checkpoints"},
}


class Quiet:
    """A watcher whom nobody asks."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def prepare(folder: Path) -> None:
    """Everything that the operator's stage needs, in a folder, which has to be the working directory."""
    small = {"num_samples": 20, "points": 32, "frames": 9}
    make_dataset("burgers1d", folder / "data", **small, nu=0.1)
    make_dataset("advection1d", folder / "data", **small)
    make_dataset("darcy2d", folder / "data", num_samples=20, points=16)
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    run_stage("autoencoder", configure(folder), note=lambda text: None)
    for overrides in ([], ["latent.encoder=none"]):
        build_all(load_build_config(folder / "run.yaml", overrides=overrides), watcher=Quiet())


def configure(folder: Path, *overrides: str) -> RunConfig:
    """The run's configuration, with overrides."""
    return load_config(folder / "run.yaml", overrides=overrides)
