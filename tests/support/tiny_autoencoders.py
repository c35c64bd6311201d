"""An autoencoder with random weights for three tasks, two of them on one grid; needs no data."""

from __future__ import annotations

import torch

from ups.grid import GridSpec
from ups.trained.autoencoder import Autoencoder
from ups.trained.specs import AutoencoderSpec, TaskSpec

LINE = GridSpec((16,), (True,), (("fields", 1),))
PLANE = GridSpec((8, 8), (False, False), (("fields", 1), ("coefficient", 1)))
SIZES = {"width": 8, "depth": 1, "num_heads": 2}


def make_spec() -> AutoencoderSpec:
    """Latents of 4 tokens with 3 channels; Burgers' statistics differ from advection's."""
    one = {"mean": [0.5], "std": [2.0]}
    return AutoencoderSpec(
        tasks={
            "advection1d": TaskSpec(LINE, ("u",), False, {"fields": {"mean": [1.5], "std": [0.25]}}),
            "burgers1d": TaskSpec(LINE, ("u",), False, {"fields": one}),
            "darcy2d": TaskSpec(PLANE, ("u",), True, {"fields": one, "coefficient": one}),
        },
        parameters=("beta", "nu"),
        latent_dim=3,
        num_tokens=4,
        patch_size=2,
        encoder=SIZES,
        decoder={**SIZES, "radius": 1},
    )


def make_autoencoder() -> Autoencoder:
    """In evaluation mode; the same weights every time."""
    torch.manual_seed(0)
    return Autoencoder(make_spec()).eval()
