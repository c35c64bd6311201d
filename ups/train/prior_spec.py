"""The specification of a prior of steady solutions that is to be trained, from its tasks' training fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ups.config import RunConfig
from ups.config.corrector_size import corrector_size
from ups.data.statistics import latent_statistics, measure_statistics
from ups.data.windows import Fields, evenly_spread, parameter_names, parameter_table
from ups.train.operator_spec import boundary_of, spec_of_states, tokens_of
from ups.trained.autoencoder import Autoencoder
from ups.trained.specs import SimulatedTask, SimulatorSpec

_MAX_ENCODED = 4096  # samples of a task whose latents are measured, evenly spread
_AT_ONCE = 64


def make_prior_states(
    config: RunConfig,
    train: Mapping[str, Fields],
    *,
    autoencoder: Autoencoder | None,
    autoencoder_sha256: str | None,
) -> SimulatorSpec:
    """States of steady tasks, and the size of the network.

    Raises:
        ConfigError: If the sizes don't fit the grids, or the fields aren't finite.
    """
    tasks = {name: _task(config, train[name], autoencoder) for name in sorted(train)}
    size, parameters = corrector_size(config), parameter_names(train)
    spec = spec_of_states(config, tasks, size=size, parameters=parameters, autoencoder=autoencoder)
    return replace(spec, autoencoder_sha256=autoencoder_sha256)


def _task(config: RunConfig, fields: Fields, autoencoder: Autoencoder | None) -> SimulatedTask:
    info = fields.info
    tokens = tokens_of(config, info.grid, autoencoder)  # may fail, so it comes before minutes of reading
    if autoencoder is None:
        statistics: dict[str, Any] = {
            array: found.to_json() for array, found in measure_statistics(fields).items()
        }
    else:
        statistics = {
            array: latent_statistics(_latents(fields, array, autoencoder)).to_json()
            for array in info.grid.arrays
        }
    known = fields.parameters(np.arange(len(fields.num_steps)))
    if autoencoder is not None:
        known = {name: known[name] for name in autoencoder.spec.parameters if name in known}
    return SimulatedTask(
        grid=info.grid,
        boundary=boundary_of(info.boundary, info.grid),
        tokens=tokens,
        channels=info.channels,
        steady=True,
        dt=1.0,
        parameters={name: (float(column.min()), float(column.max())) for name, column in known.items()},
        statistics=statistics,
    )


@torch.no_grad()
def _latents(fields: Fields, array: str, autoencoder: Autoencoder) -> Iterator[npt.NDArray[np.float32]]:
    """Latents of some samples, each (B, L, D)."""
    samples = evenly_spread(len(fields.num_steps), _MAX_ENCODED)
    for first in range(0, len(samples), _AT_ONCE):
        some = samples[first : first + _AT_ONCE]
        values = torch.from_numpy(fields.read(array, some, np.zeros_like(some))).to(autoencoder.device)
        table = parameter_table(fields.parameters(some), autoencoder.spec.parameters, len(some))
        encoded = autoencoder.encode(values, table.to(autoencoder.device), task=fields.info.task, array=array)
        yield encoded.float().cpu().numpy()
