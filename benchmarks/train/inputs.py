"""What training is measured with: Burgers' equation as in the demo, fields cut into 32 tokens of 8 points."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch
import yaml

from benchmarks.harness.inputs import Folder
from ups.config import RunConfig, load_config
from ups.data.solvers import make_dataset
from ups.train.stage import make_stage
from ups.train.trainer import Trainer

REPO = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TOKENS = 32  # of a frame
_NUM_SAMPLES = 100


def write_config(folder: Path, *, include: str, name: str) -> Path:
    """A configuration of the data in a folder, on top of another one; batches aren't prepared ahead."""
    own = {
        "include": include,
        "data": {"root": str(folder / "data")},
        "cache": {"dir": str(folder / "cache")},
        "operator": {"state": "fields", "noise": 0.02},
        "training": {"prefetch_factor": 0, "device": "cpu"},
        "stages": {"operator": {"epochs": 1, "steps_per_epoch": 100_000}},
        "checkpoint": {"dir": str(folder / "checkpoints")},
    }
    path = folder / name
    path.write_text(yaml.safe_dump(own))
    return path


def build_stores(config: Path, *overrides: str, tree: Path = REPO) -> None:
    """Stores of the fields, by a tree's version; what the build says is dropped."""
    command = [sys.executable, "-m", "ups_store.build", "--config", str(config), "latent.encoder=none"]
    # In the tree's folder, for `-m` looks in the present one before it looks at PYTHONPATH.
    subprocess.run(
        [*command, *overrides], check=True, cwd=tree, env=environment(tree), capture_output=True, text=True
    )


def environment(tree: Path) -> dict[str, str]:
    """In which Python finds this tree's packages before any that are installed, and works on one thread."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, [str(tree), *others]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class Demo:
    """The demo's operator on fields, on one thread, in a temporary folder."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.folder = Folder()
        make_dataset("burgers1d", self.folder.path / "data", num_samples=_NUM_SAMPLES)
        self.path = write_config(self.folder.path, include="demo", name="run.yaml")
        build_stores(self.path)

    def config(self, *overrides: str) -> RunConfig:
        """Its configuration, without a budget."""
        given = ["stages.operator.budget=null", *overrides]
        return load_config(self.path, overrides=given)

    def trainer(self, *overrides: str, device: torch.device = CPU) -> Trainer:
        """A new training of it."""
        config = self.config(*overrides)
        return Trainer(make_stage("operator", config, device=device), config, device=device, restart=True)


@cache
def demo() -> Demo:
    """The one of this process; its folder goes with the process."""
    return Demo()
