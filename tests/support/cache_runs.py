"""Two small tasks, an encoder for both, and a run's configuration, for tests of `training.cache_mode`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import torch
from quiet import Quiet

from ups.config import RunConfig, load_config
from ups.data.batches import TrainingData, WindowSource
from ups.data.latents import open_latent_windows
from ups.data.solvers import make_dataset
from ups.data.stores import Store
from ups.grid import GridSpec
from ups.trained.autoencoder import Autoencoder, save_autoencoder
from ups.trained.specs import AutoencoderSpec, TaskSpec
from ups_store.build import BuildReport, build_all
from ups_store.build import load_config as load_build_config

N, T, X = 60, 5, 32  # 48 of the samples are the training split
NUM_TRAIN = 48
BATCH, HORIZON = 16, 2
NUM_WINDOWS = NUM_TRAIN * (T - HORIZON)
SIZES = {"width": 16, "depth": 1, "num_heads": 2}
BURGERS, ADVECTION = "1D_Burgers_Sols_Nu0.01.hdf5", "1D_Advection_Sols_beta0.4.hdf5"


def make_folder(folder: Path) -> Path:
    """Sources of two tasks, `checkpoints/autoencoder.safetensors` and `run.yaml`."""
    (folder / "data").mkdir()
    for seed, (name, attribute, value) in enumerate([(BURGERS, "Nu", 0.01), (ADVECTION, "beta", 0.4)]):
        with h5py.File(folder / "data" / name, "w") as file:
            file["tensor"] = np.random.default_rng(seed).standard_normal((N, T, X)).astype(np.float32)
            file["x-coordinate"] = np.linspace(0, 1, X, dtype=np.float32)
            file["t-coordinate"] = np.linspace(0, 2, T + 1, dtype=np.float32)
            file.attrs[attribute] = value
    task = TaskSpec(
        GridSpec((X,), (True,), (("fields", 1),)),
        ("u",),
        steady=False,
        statistics={"fields": {"mean": [0.5], "std": [2.0]}},
    )
    tasks = {"advection1d": task, "burgers1d": task}
    return _with_run(folder, tasks, ("beta", "nu"), task="burgers1d", tokens=4, patch_size=8, micro_batch=10)


def make_steady_folder(folder: Path) -> Path:
    """The same for Darcy flow, whose samples are an input and its solution."""
    make_dataset("darcy2d", folder / "data", num_samples=30, points=16)
    channels = (("fields", 1), ("coefficient", 1))
    statistics = {name: {"mean": [0.5], "std": [0.5]} for name, _ in channels}
    task = TaskSpec(GridSpec((16, 16), (False, False), channels), ("u",), steady=True, statistics=statistics)
    return _with_run(folder, {"darcy2d": task}, (), task="darcy2d", tokens=16, patch_size=4, micro_batch=4)


def _with_run(
    folder: Path,
    tasks: dict[str, TaskSpec],
    parameters: tuple[str, ...],
    *,
    task: str,
    tokens: int,
    patch_size: int,
    micro_batch: int,
) -> Path:
    """Add an autoencoder and a configuration."""
    torch.manual_seed(1)
    spec = AutoencoderSpec(
        tasks,
        parameters,
        latent_dim=4,
        num_tokens=tokens,
        patch_size=patch_size,
        encoder=SIZES,
        decoder={**SIZES, "radius": 1},
    )
    save_autoencoder(checkpoint(folder), Autoencoder(spec), config={}, report={})
    (folder / "run.yaml").write_text(
        f"data: {{task: {task}, root: data}}\n"
        f"latent: {{dim: 4, tokens: {tokens}, micro_batch: {micro_batch}}}\n"
        "training: {latent_cache_dir: latents, num_workers: 0, preload: 'off', augment: false}\n"
        "checkpoint: {dir: checkpoints}\n"
    )
    return folder


def checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / "autoencoder.safetensors"


def configure(folder: Path, *overrides: str) -> RunConfig:
    paths = [f"data.root={folder / 'data'}", f"checkpoint.dir={folder / 'checkpoints'}"]
    if not any(override.startswith("training.latent_cache_dir") for override in overrides):
        paths.append(f"training.latent_cache_dir={folder / 'latents'}")
    return load_config(folder / "run.yaml", overrides=[*paths, *overrides])


def open_windows(
    folder: Path, *overrides: str, seed: int = 0, made: Mapping[str, Store] | None = None
) -> TrainingData[WindowSource]:
    return open_latent_windows(
        configure(folder, *overrides),
        "train",
        autoencoder_path=checkpoint(folder),
        global_batch_size=BATCH,
        horizon=HORIZON,
        seed=seed,
        device="cpu",
        made=made,
    )


def build(folder: Path, *overrides: str) -> BuildReport:
    """Build the training split as `python -m ups_store.build` does."""
    paths = [f"data.root={folder / 'data'}", f"checkpoint.dir={folder / 'checkpoints'}"]
    paths += [f"training.latent_cache_dir={folder / 'latents'}", "data.split=train"]
    config = load_build_config(folder / "run.yaml", overrides=[*paths, *overrides])
    return build_all(config, watcher=Quiet())
