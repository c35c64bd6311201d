"""The checkpoint of a small untrained autoencoder of Burgers' equation: T frames of X points."""

from __future__ import annotations

from pathlib import Path

import torch

from ups.grid import GridSpec
from ups.trained.autoencoder import Autoencoder, save_autoencoder
from ups.trained.specs import AutoencoderSpec, TaskSpec

T, X = 5, 32
SIZES = {"width": 16, "depth": 1, "num_heads": 2}


def make_checkpoint(
    folder: Path, *, channels: tuple[tuple[str, int], ...] = (("fields", 1),), latent_dim: int = 4
) -> Path:
    torch.manual_seed(1)
    grid = GridSpec((X,), (True,), channels)
    statistics = {name: {"mean": [0.5] * num, "std": [2.0] * num} for name, num in channels}
    task = TaskSpec(grid, ("u",), steady=False, statistics=statistics)
    spec = AutoencoderSpec(
        {"burgers1d": task},
        ("nu",),
        latent_dim=latent_dim,
        num_tokens=4,
        patch_size=8,
        encoder=SIZES,
        decoder={**SIZES, "radius": 1},
    )
    path = folder / "autoencoder.safetensors"
    save_autoencoder(path, Autoencoder(spec), config={}, report={})
    return path
