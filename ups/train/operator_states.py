"""What an operator is trained on: windows of the stores of its states."""

from __future__ import annotations

from pathlib import Path

import torch

from ups.config import RunConfig
from ups.data.on_demand.live_windows import LiveWindows
from ups.data.on_demand.opening import open_training_windows
from ups.data.state_stores import open_field_states, tells_encoder
from ups.data.task_windows import TaskWindows
from ups.data.window_batches import WindowBatches
from ups.train.operator_spec import parameter_names
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
    horizon = config.training.rollout_horizon
    if config.operator.state == "latent":
        return open_training_windows(
            config,
            "train",
            autoencoder_path=autoencoder_path,
            batch_size=batch_size,
            horizon=horizon,
            seed=config.seed,
            device=str(device),
            note=start.note,
            expect_data=start.expect_data,
        )
    windows = {}
    for task in config.data.task:
        store = open_field_states(config, task, "train")
        stride, limit = config.training.time_stride, config.data.limit
        windows[task] = TaskWindows(store, horizon=horizon, time_stride=stride, limit=limit)
        start.note(f"{store.path}: {windows[task].preload(config.training.preload, device=str(device))}")
    parameters = parameter_names(windows)
    return WindowBatches(windows, batch_size=batch_size, seed=config.seed, parameters=parameters)


def are_of_known_encoder(windows: WindowBatches | LiveWindows) -> bool:
    """Whether all stores of latents say what encoded them; those that are made while training do."""
    if isinstance(windows, LiveWindows):
        return True
    return all(tells_encoder(some.store) for some in windows.tasks.values())
