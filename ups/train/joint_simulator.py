"""A simulator whose encoder and decoder are trained with its operator: made anew, scaled by training frames.

Letters: B batch, X the axes of the grid, C channels, L tokens, D channels of a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ups.config import RunConfig
from ups.data.statistics import INPUT, LEAST_STD_OF_LATENTS, Statistics, channel_statistics
from ups.data.windows import TaskWindows, evenly_spread
from ups.grid import FIELDS
from ups.train.operator_spec import make_spec
from ups.trained.autoencoder import Autoencoder
from ups.trained.simulator import Simulator
from ups.trained.specs import AutoencoderSpec

_FRAMES_OF_SCALE = 256  # of a task, that the scale of its latents is measured on


def make_joint_simulator(
    config: RunConfig, autoencoder_spec: AutoencoderSpec, windows: Mapping[str, TaskWindows]
) -> Simulator:
    """A new simulator all of whose weights are trained.

    Its states are latents in the scale that the untrained encoder gives them; the encoder is free to change
    it, and what is exported keeps it.

    Args:
        config: Configuration of the run.
        autoencoder_spec: Of the autoencoder that is made; its weights are drawn at random.
        windows: Training windows of fields by task.

    Returns:
        The simulator, on the CPU.
    Raises:
        ConfigError: As `make_spec`.
    """
    autoencoder = Autoencoder(autoencoder_spec)
    statistics = {name: _latent_statistics(autoencoder, name, some) for name, some in windows.items()}
    spec = make_spec(config, windows, statistics=statistics, autoencoder=autoencoder, autoencoder_sha256=None)
    simulator = Simulator(spec, autoencoder)
    autoencoder.requires_grad_(True)
    return simulator


@torch.no_grad()
def _latent_statistics(autoencoder: Autoencoder, task: str, windows: TaskWindows) -> dict[str, Statistics]:
    """Of the latents of some windows' last frames, and of a steady task's input, as a store's would be."""
    states = windows.read(evenly_spread(len(windows), _FRAMES_OF_SCALE)).states
    frames = {FIELDS: (FIELDS, states[:, -1])}
    if windows.input_array is not None:
        frames[INPUT] = (windows.input_array, states[:, 0])
    unknown = torch.full((len(states), len(autoencoder.spec.parameters)), torch.nan)
    latents = {
        key: autoencoder.encode(values_BXC, unknown, task=task, array=array).numpy()
        for key, (array, values_BXC) in frames.items()
    }
    return {
        key: channel_statistics([latent_BLD], least_std=LEAST_STD_OF_LATENTS)
        for key, latent_BLD in latents.items()
    }
