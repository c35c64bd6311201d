"""Small runs for the tests of stages: data of three tasks, an autoencoder, stores of latents and fields.

A module makes a run once (`made_once`), or takes that of all modules (`shared_run`); its tests work in
copies of it (`own_copy`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from quiet import Quiet
from typer.testing import CliRunner

from ups.config import RunConfig, load_config
from ups.data.solvers import make_dataset
from ups.log import logger
from ups.train.run import run_stage
from ups.trained.checkpoint import load_checkpoint, save_checkpoint
from ups_store.building.command import app as build_command
from ups_store.building.config import load_config as load_build_config
from ups_store.building.stores import build_all

TASKS = ("advection1d", "burgers1d", "darcy2d")
SETTINGS: dict[str, Any] = {
    "data": {"task": list(TASKS), "root": "data"},
    "cache": {"dir": "cache"},
    "reading": {"num_workers": 0},
    "latent": {"dim": 2, "tokens": 8},
    "encoder": {"patch_size": 4, "width": 16, "depth": 1},
    "decoder": {"width": 16, "depth": 1},
    "operator": {
        "width": 16,
        "depths": [1, 1],
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


AUTOENCODER = Path("checkpoints/autoencoder.safetensors")


def made_once(factory: pytest.TempPathFactory, make: Callable[[Path], None]) -> Path:
    """A new folder in which something was made, with the folder as working directory."""
    folder = factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make(folder)
    return folder


def shared_run(factory: pytest.TempPathFactory) -> Path:
    """What `prepare` makes, once for all modules and processes of this test run; it isn't to be changed."""
    own = factory.getbasetemp()
    base = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with (base / "shared_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "shared_run").exists():
            made_once(factory, prepare).rename(base / "shared_run")
    return base / "shared_run"


def own_copy(prepared: Path, tmp_path: Path, patch: pytest.MonkeyPatch) -> Path:
    """A copy of a prepared folder, which is the working directory from now on."""
    folder = tmp_path / "run"
    shutil.copytree(prepared, folder)
    patch.chdir(folder)
    return folder


def prepare(folder: Path) -> None:
    """Everything that the operator's stage needs, in a folder, which has to be the working directory."""
    small = {"num_samples": 20, "points": 32, "frames": 9}
    make_dataset("burgers1d", folder / "data", **small, nu=0.1)
    make_dataset("advection1d", folder / "data", **small)
    make_dataset("darcy2d", folder / "data", num_samples=20, points=16)
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    run_stage("autoencoder", configure(folder))
    for overrides in ([], ["latent.encoder=none"]):
        build(folder, *overrides)


def prepare_fields(folder: Path) -> None:
    """All that an operator on the fields of Burgers' equation needs; nothing is trained."""
    make_dataset("burgers1d", folder / "data", num_samples=20, points=32, frames=9, nu=0.1)
    settings = {**SETTINGS, "data": {"task": "burgers1d", "root": "data"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    build(folder, "latent.encoder=none")


def build(folder: Path, *overrides: str) -> list[bool]:
    """Build the stores of a run; whether each was valid already."""
    report = build_all(load_build_config(folder / "run.yaml", overrides=overrides), watcher=Quiet())
    return [result.to_json()["reused"] for result in report.stores]


def build_here(command: list[str], **said: str) -> None:
    """Stand in for `run_process` of a build: the same command in this process, which has torch already."""
    assert command[1:3] == ["-m", "ups_store.build"]
    logger.info(" ".join(["$ python", *command[1:]]))
    done = CliRunner().invoke(build_command, command[3:])
    assert done.exit_code == 0, f"{done.output}{done.exception!r}"


def change_weights(path: Path) -> None:
    """Make an autoencoder another one of the same shape."""
    tensors, document = load_checkpoint(path, kind="autoencoder")
    changed = {name: tensor + 0.01 for name, tensor in tensors.items()}
    save_checkpoint(path, changed, kind="autoencoder", document=document)


def configure(folder: Path, *overrides: str) -> RunConfig:
    """The run's configuration, with overrides."""
    return load_config(folder / "run.yaml", overrides=overrides)
