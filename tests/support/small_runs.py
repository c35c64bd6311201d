"""A folder with Burgers data of 20 samples and the configuration of a tiny run, `run.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ups.data.solvers.dataset import make_dataset

SHORT = {"epochs": 1, "steps_per_epoch": 2}
SETTINGS: dict[str, Any] = {
    "data": {"tasks": "burgers1d", "root": "data"},
    "reading": {"num_workers": 0},
    "encoder": {"patch_size": 4, "width": 16, "depth": 1, "num_heads": 2},
    "decoder": {"width": 16, "depth": 1, "num_heads": 2},
    "latent": {"dim": 2, "tokens": 4},
    "operator": {"size": "tiny", "depths": [1], "width": 16},
    "training": {"batch_size": 4, "latent_cache_dir": "latents", "device": "cpu"},
    "stages": {"autoencoder": SHORT, "operator": SHORT},
}


def make_small_run(folder: Path) -> Path:
    """Write `data/` and `run.yaml` into a folder, and return the latter's path."""
    make_dataset("burgers1d", folder / "data", num_samples=20, points=32, frames=6, nu=0.1)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(SETTINGS))
    return path


def files_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of everything in a folder, by name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.stat()
        found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return found
