"""The specification of an operator that is to be trained: tasks, from the stores of their states, and size.

A size has a name, and `operator.pdet` changes single numbers of it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from ups.config import RunConfig
from ups.config.run import OperatorConfig, SpectralConfig
from ups.data.fields import StoreFields
from ups.data.statistics import INPUT, Statistics
from ups.data.windows import TaskWindows
from ups.errors import ConfigError, ConfigWarning
from ups.grid import FIELDS, LATENT, PERIODIC, GridSpec, boundary_types, cut_grid
from ups.models.operator_size import NORMALISED, SIZES, OperatorSize
from ups.trained.autoencoder import Autoencoder
from ups.trained.specs import SimulatedTask, SimulatorSpec, TaskSpec

_FIELDS = {
    "hidden_dim": "width",
    "depths": "depths",
    "num_heads": "num_heads",
    "window_size": "window",
    "mlp_ratio": "mlp_ratio",
    "drop_path": "drop_path",
    "dropout": "dropout",
}


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
        config: Configuration of the run.
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


def operator_size(config: OperatorConfig) -> OperatorSize:
    """Architecture of the operator.

    Raises:
        ConfigError: Kind "mixers" if there are more or fewer of them than levels, "num_heads" if heads don't
            divide the channels, "architecture" if a stack has several levels.
    """
    pdet = config.pdet
    changed: dict[str, Any] = {
        field: getattr(pdet, key) for key, field in _FIELDS.items() if getattr(pdet, key) is not None
    }
    if pdet.depth is not None:
        changed["depths"] = (pdet.depth,)
    changed |= {
        "mixers": (config.mixer,) if isinstance(config.mixer, str) else config.mixer,
        "modes": config.spectral.modes,
        "padding": config.spectral.padding,
        "has_norm": config.spectral.norm == "layer",
    }
    size = dataclasses.replace(SIZES[config.size], **changed)
    _check_levels(config, size)
    if _has_attention(size) and size.width % size.num_heads:
        raise ConfigError(
            f"operator.pdet.hidden_dim = {size.width}",
            kind="num_heads",
            expected=f"a multiple of operator.pdet.num_heads = {size.num_heads}",
        )
    _warn_of_no_effect(config, size)
    return size


def _check_levels(config: OperatorConfig, size: OperatorSize) -> None:
    if config.architecture_type == "pdet_stack" and len(size.depths) != 1:
        raise ConfigError(
            "operator.architecture_type = pdet_stack",
            kind="architecture",
            expected="one level: operator.pdet.depth",
            found=f"depths {list(size.depths)}",
        )
    if not isinstance(config.mixer, str) and len(size.mixers) != len(size.depths):
        raise ConfigError(
            f"operator.mixer = {list(size.mixers)}",
            kind="mixers",
            expected=f"one for each of {len(size.depths)} levels, depths {list(size.depths)}",
            found=len(size.mixers),
            hint="name one mixer for all levels, or change operator.pdet.depths",
        )


def _has_attention(size: OperatorSize) -> bool:
    return any(mixer in NORMALISED for mixer in size.mixers)


def _warn_of_no_effect(config: OperatorConfig, size: OperatorSize) -> None:
    reasons = {}
    if config.pdet.group_size is not None:
        reasons["pdet.group_size"] = "layers are normalised over all channels"
    if not config.pdet.qk_norm:
        reasons["pdet.qk_norm"] = "queries and keys are always normalised"
    if not _has_attention(size):
        for key in ("num_heads", "window_size", "mlp_ratio", "dropout"):
            if getattr(config.pdet, key) is not None:
                reasons[f"pdet.{key}"] = f"operator.mixer = {config.mixer} has no attention"
    if set(size.mixers) == {"attention"} and config.spectral != SpectralConfig():
        reasons["spectral"] = "operator.mixer = attention has no Fourier modes"
    for key, reason in reasons.items():
        warnings.warn(f"operator.{key} has no effect: {reason}", ConfigWarning, stacklevel=3)
