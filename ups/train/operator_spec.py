"""The specification of an operator that is to be trained: its tasks, from their stores, and its size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ups.config import RunConfig
from ups.config.operator_size import operator_size
from ups.data.fields import StoreFields
from ups.data.statistics import INPUT, Statistics
from ups.data.windows import TaskWindows
from ups.errors import ConfigError
from ups.grid import FIELDS, LATENT, PERIODIC, GridSpec, boundary_types, cut_grid
from ups.trained.autoencoder import Autoencoder
from ups.trained.specs import SimulatedTask, SimulatorSpec, TaskSpec


def make_spec(
    config: RunConfig,
    windows: Mapping[str, TaskWindows],
    *,
    statistics: Mapping[str, Mapping[str, Statistics]],
    autoencoder: Autoencoder | None,
    autoencoder_sha256: str | None,
    is_encoder_known: bool = True,
) -> SimulatorSpec:
    """The simulator's specification: grids and time steps from the stores, sizes as configured.

    Args:
        windows: Training windows by task.
        statistics: Of the operator's states, by task, as `measure_state_statistics` gives them.
        autoencoder: Encoder and decoder where states are latents.
        autoencoder_sha256: Of its weights; None while they are trained, too.
        is_encoder_known: Whether it made the latents, as `operator_states.are_of_known_encoder` says.

    Raises:
        ConfigError: If the sizes don't fit the grids.
    """
    known = {
        name: _of_fields(some) if autoencoder is None else autoencoder.spec.tasks[name]
        for name, some in windows.items()
    }
    tasks = {
        name: _simulated(config, windows[name], known[name], statistics[name], autoencoder)
        for name in sorted(windows)
    }
    dims = [_patch_values(task.grid, config.encoder.patch_size) for task in tasks.values()]
    size = operator_size(config.operator)
    return SimulatorSpec(
        states=config.operator.state,
        tasks=tasks,
        parameters=window_parameters(windows) if autoencoder is None else autoencoder.spec.parameters,
        state_dim=max(dims) if autoencoder is None else autoencoder.spec.latent_dim,
        patch_size=config.encoder.patch_size if autoencoder is None else None,
        stride=config.training.stride,
        operator=size.to_json(),
        autoencoder_sha256=autoencoder_sha256 if is_encoder_known else None,
        is_encoder_known=is_encoder_known,
    )


def _simulated(
    config: RunConfig,
    windows: TaskWindows,
    known: TaskSpec,
    statistics: Mapping[str, Statistics],
    autoencoder: Autoencoder | None,
) -> SimulatedTask:
    ranges = windows.parameter_ranges()
    if autoencoder is not None:
        _check_shape(windows, autoencoder)
        ranges = {name: ends for name, ends in ranges.items() if name in autoencoder.spec.parameters}
    task = SimulatedTask(
        grid=known.grid,
        boundary=_boundary(windows, known.grid),
        tokens=_tokens(config, known.grid, autoencoder),
        channels=known.channels,
        steady=windows.is_steady,
        dt=windows.typical_dt(),
        parameters=ranges,
        statistics={},
    )
    names = {FIELDS: FIELDS, INPUT: task.input_array}
    measured = {names[key]: values.to_json() for key, values in statistics.items()}
    return dataclasses.replace(task, statistics=measured)


def _check_shape(windows: TaskWindows, autoencoder: Autoencoder) -> None:
    """A store of an unknown encoder needn't have the shape of this one's latents."""
    if windows.state != LATENT:  # fields, which are encoded in every step
        return
    found = tuple(windows.store.arrays[windows.state].shape[2:])
    expected = (autoencoder.spec.num_tokens, autoencoder.spec.latent_dim)
    if found != expected:
        shown = " x ".join(map(str, expected))
        raise ConfigError(
            "latents of another shape than the autoencoder's",
            kind="latent_size",
            path=windows.store.path,
            expected=f"{shown} a frame",
            found=" x ".join(map(str, found)),
        )


def _boundary(windows: TaskWindows, grid: GridSpec) -> tuple[str, ...]:
    """Boundary type of each axis, as the store names it; of imported latents only the grid is known."""
    named = boundary_types(windows.store.attrs.get("boundary") or {}, ndim=grid.ndim)
    return tuple(PERIODIC if wraps else kind for kind, wraps in zip(named, grid.periodic, strict=True))


def _tokens(config: RunConfig, grid: GridSpec, autoencoder: Autoencoder | None) -> tuple[int, ...]:
    """Tokens along each axis: those of the autoencoder, or one for each patch."""
    if autoencoder is not None:
        return autoencoder.spec.cut(grid).tokens
    return cut_grid(grid, patch_size=config.encoder.patch_size, num_tokens=None).tokens


def _patch_values(grid: GridSpec, patch_size: int) -> int:
    return int(patch_size**grid.ndim * dict(grid.channels)[FIELDS])


def _of_fields(windows: TaskWindows) -> TaskSpec:
    info = StoreFields(windows.store).info
    return TaskSpec(info.grid, info.channels, info.steady, statistics={})


def window_parameters(windows: Mapping[str, TaskWindows]) -> tuple[str, ...]:
    """Names of all parameters that any of the tasks has, sorted."""
    return tuple(sorted({name for some in windows.values() for name in some.parameters}))
