"""The specification of an operator that is to be trained: its tasks, from their stores, and its size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ups.config import RunConfig
from ups.config.operator_size import operator_size
from ups.data.statistics import INPUT, Statistics
from ups.data.windows import Windows
from ups.errors import ConfigError
from ups.grid import FIELDS, LATENT, PERIODIC, GridSpec, boundary_types, cut_grid
from ups.models.operator_size import TOKEN_UNET
from ups.models.operators import dotted_name
from ups.trained.autoencoder import Autoencoder
from ups.trained.specs import SimulatedTask, SimulatorSpec, TaskSpec


def make_spec(
    config: RunConfig,
    windows: Mapping[str, Windows],
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
    return dataclasses.replace(
        spec_of_states(
            config,
            tasks,
            operator=operator_document(config),
            parameters=window_parameters(windows),
            autoencoder=autoencoder,
        ),
        stride=config.training.stride,
        autoencoder_sha256=autoencoder_sha256 if is_encoder_known else None,
        is_encoder_known=is_encoder_known,
    )


def operator_document(config: RunConfig) -> dict[str, Any]:
    """What a specification says of the operator: the sizes of the package's own, or name and configuration.

    Raises:
        ConfigError: As `operator_size` and `dotted_name`.
    """
    operator = config.operator
    if operator.name == TOKEN_UNET:
        return operator_size(operator).to_json()
    return {"name": dotted_name(operator.name), "config": operator.config}


def spec_of_states(
    config: RunConfig,
    tasks: Mapping[str, SimulatedTask],
    *,
    operator: Mapping[str, Any],
    parameters: tuple[str, ...],
    autoencoder: Autoencoder | None,
) -> SimulatorSpec:
    """The specification of states, latents or patches of fields, and of the network that works on them.

    Args:
        tasks: By name.
        operator: Of the network, as `SimulatorSpec.operator`.
        parameters: Names of those that the tasks have; an autoencoder has its own.
        autoencoder: Encoder and decoder where states are latents.
    """
    patch_size = config.encoder.patch_size
    dims = [patch_size**task.grid.ndim * dict(task.grid.channels)[FIELDS] for task in tasks.values()]
    return SimulatorSpec(
        states=config.operator.state,
        tasks=tasks,
        parameters=parameters if autoencoder is None else autoencoder.spec.parameters,
        state_dim=max(dims) if autoencoder is None else autoencoder.spec.latent_dim,
        patch_size=patch_size if autoencoder is None else None,
        stride=1,
        operator=operator,
        autoencoder_sha256=None,
    )


def _simulated(
    config: RunConfig,
    windows: Windows,
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
        boundary=boundary_of(windows.store.attrs.get("boundary") or {}, known.grid),
        tokens=tokens_of(config, known.grid, autoencoder),
        channels=known.channels,
        steady=windows.is_steady,
        dt=windows.typical_dt(),
        parameters=ranges,
        statistics={},
    )
    names = {FIELDS: FIELDS, INPUT: task.input_array}
    measured = {names[key]: values.to_json() for key, values in statistics.items()}
    return dataclasses.replace(task, statistics=measured)


def _check_shape(windows: Windows, autoencoder: Autoencoder) -> None:
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


def boundary_of(named: Mapping[str, str], grid: GridSpec) -> tuple[str, ...]:
    """Boundary type of each axis, as a store names it; of imported latents only the grid is known."""
    kinds = boundary_types(named, ndim=grid.ndim)
    return tuple(PERIODIC if wraps else kind for kind, wraps in zip(kinds, grid.periodic, strict=True))


def tokens_of(config: RunConfig, grid: GridSpec, autoencoder: Autoencoder | None) -> tuple[int, ...]:
    """Tokens along each axis: those of the autoencoder, or one for each patch."""
    if autoencoder is not None:
        return autoencoder.spec.cut(grid).tokens
    return cut_grid(grid, patch_size=config.encoder.patch_size, num_tokens=None).tokens


def _of_fields(windows: Windows) -> TaskSpec:
    info = windows.fields.info
    return TaskSpec(info.grid, info.channels, info.steady, statistics={})


def window_parameters(windows: Mapping[str, Windows]) -> tuple[str, ...]:
    """Names of all parameters that any of the tasks has, sorted."""
    return tuple(sorted({name for some in windows.values() for name in some.parameters}))
