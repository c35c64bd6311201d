"""What an operator is trained on: windows of the stores of its states, and what others ask of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ups.config import RunConfig
from ups.data.on_demand.live_windows import LiveWindows
from ups.data.on_demand.opening import open_training_windows
from ups.data.stores import open_field_states, tells_encoder
from ups.data.windows import TaskWindows, WindowBatches
from ups.output import Note
from ups.train.operator_spec import window_parameters
from ups.train.stage import StageStart

STAGE = "operator"


def open_windows(
    config: RunConfig, *, autoencoder_path: Path, device: torch.device, start: StageStart
) -> WindowBatches | LiveWindows:
    """Training windows of all tasks: latents as `training.cache_mode` says, or those of field stores.

    Args:
        config: Configuration of the run.
        autoencoder_path: The checkpoint whose latents are wanted.
        device: Where states are used.
        start: Told what is done, also from a thread in the background; asked before a store is replaced.
    Raises:
        ConfigError: As `open_training_windows`, `open_field_states` and `TaskWindows`.
        ups_store.StoreError: If a store can't be read.
    """
    batch_size = config.stage(STAGE).batch_size
    assert batch_size is not None
    if config.operator.state == "latent":
        return open_training_windows(
            config,
            "train",
            autoencoder_path=autoencoder_path,
            batch_size=batch_size,
            horizon=config.training.rollout_horizon,
            seed=config.seed,
            device=str(device),
            note=start.note,
            expect_data=start.expect_data,
        )
    windows = open_field_windows(config)
    preload_windows(config, windows, device=device, note=start.note)
    parameters = window_parameters(windows)
    return WindowBatches(windows, batch_size=batch_size, seed=config.seed, parameters=parameters)


def open_field_windows(config: RunConfig) -> dict[str, TaskWindows]:
    """Training windows of the field stores of all tasks.

    Raises:
        ConfigError: As `open_field_states` and `TaskWindows`.
        ups_store.StoreError: If a store can't be read.
    """
    training = config.training
    return {
        task: TaskWindows(
            open_field_states(config, task, "train"),
            horizon=training.rollout_horizon,
            time_stride=training.time_stride,
            limit=config.data.limit,
        )
        for task in config.data.task
    }


def preload_windows(
    config: RunConfig, windows: Mapping[str, TaskWindows], *, device: torch.device, note: Note
) -> None:
    """Bring the stores into memory as `training.preload` says, and tell where each lies then."""
    for some in windows.values():
        note(f"{some.store.path}: {some.preload(config.training.preload, device=str(device))}")


def data_hashes(windows: Mapping[str, TaskWindows]) -> dict[str, str]:
    """What a stage is trained on, as its `data_identity`: hashes of the stores by task."""
    return {task: some.store.config_hash for task, some in windows.items()}


def are_of_known_encoder(windows: WindowBatches | LiveWindows) -> bool:
    """Whether all stores of latents say what encoded them; those that are made while training do."""
    if isinstance(windows, LiveWindows):
        return True
    return all(tells_encoder(some.store) for some in windows.tasks.values())
