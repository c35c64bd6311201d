"""On-demand latents of trajectories that have times of their own, as The Well's files may."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from numbered_batches import batch_of
from on_demand_helpers import BURGERS, NUM_TRAIN, NUM_WINDOWS, N, T, X, build, make_folder, open_windows
from ups.data.on_demand.sources import LiveSource

from ups.data.batches import TrainingData, WindowBatch, WindowSource
from ups.errors import ConfigError


def write_well(path: Path, times_NT: np.ndarray) -> None:
    """A file in the format of The Well whose samples are at times of their own."""
    with h5py.File(path, "w") as file:
        file.attrs.update({"dataset_name": "small", "grid_type": "cartesian", "n_spatial_dims": 1})
        file.attrs.update({"n_trajectories": N, "simulation_parameters": ["nu"], "nu": 0.01})
        dimensions = file.create_group("dimensions")
        dimensions.attrs["spatial_dims"] = ["x"]
        dimensions["x"] = np.linspace(0, 1, X, dtype=np.float32)
        dimensions["x"].attrs.update({"sample_varying": False, "time_varying": False})
        dimensions["time"] = times_NT
        dimensions["time"].attrs["sample_varying"] = True
        group = file.create_group("t0_fields")
        group.attrs["field_names"] = ["u"]
        group["u"] = np.random.default_rng(0).standard_normal((N, T, X)).astype(np.float32)
        group["u"].attrs.update({"dim_varying": [True], "sample_varying": True, "time_varying": True})


def times(*, num: int = N) -> np.ndarray:
    """Sample i has steps of (1 + i) / 100."""
    return ((1.0 + np.arange(num))[:, None] / 100 * np.arange(T)).astype(np.float32)


def first_pass(windows: TrainingData[WindowSource]) -> list[WindowBatch]:
    """All batches of the first pass; then nothing works in the background any more."""
    with closing(windows) if isinstance(windows.source, LiveSource) else nullcontext():
        return [batch_of(windows, number) for number in range(windows.order.num_steps)]


def steps_of(batches: list[WindowBatch]) -> np.ndarray:
    return np.concatenate([batch.dt for batch in batches])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path)
    write_well(tmp_path / "data" / BURGERS, times())
    return tmp_path


@pytest.mark.parametrize("mode", ["auto", "memory", "none"])
def test_windows_of_samples_with_their_own_times_have_their_steps(folder: Path, mode: str) -> None:
    windows = open_windows(folder, f"training.cache_mode={mode}")
    assert isinstance(windows.source, LiveSource)
    assert 0.01 <= windows.source.tasks["burgers1d"].typical_dt() <= 0.01 * N
    batches = first_pass(windows)
    steps, counts = np.unique(steps_of(batches).round(4), return_counts=True)
    assert len(steps) == NUM_TRAIN
    assert set(counts.tolist()) == {NUM_WINDOWS // NUM_TRAIN}
    build(folder)
    stored = first_pass(open_windows(folder))
    np.testing.assert_array_equal(np.sort(steps_of(batches)), np.sort(steps_of(stored)))
    if mode != "none":  # whose passes are drawn from a smaller buffer
        for batch, other in zip(batches, stored, strict=True):
            assert torch.equal(batch.dt, other.dt)


def test_sample_with_uneven_times_is_told_with_its_batch(tmp_path: Path) -> None:
    make_folder(tmp_path)
    uneven = times()
    uneven[:, -1] += 1
    write_well(tmp_path / "data" / BURGERS, uneven)
    windows = open_windows(tmp_path, "training.cache_mode=memory")
    with pytest.raises(ConfigError) as caught:
        first_pass(windows)
    assert caught.value.kind == "uneven_times"


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_samples_of_several_lengths_are_refused_on_demand(folder: Path, mode: str) -> None:
    with h5py.File(folder / "data" / BURGERS, "a") as file:
        scalars = file.create_group("scalars")
        scalars.attrs["field_names"] = ["num_steps"]
        scalars["num_steps"] = np.full(N, T - 1)
        scalars["num_steps"].attrs.update({"sample_varying": True, "time_varying": False})
    with pytest.raises(ConfigError, match="cache_mode=store") as caught:
        open_windows(folder, f"training.cache_mode={mode}")
    assert caught.value.kind == "uneven_times"


def test_split_without_samples_is_refused_with_the_folder_of_its_sources(folder: Path) -> None:
    with pytest.raises(ConfigError, match="burgers1d train would be empty") as caught:
        open_windows(folder, "data.split_fractions=[0.0,0.5,0.5]")
    assert (caught.value.kind, caught.value.path) == ("empty_split", str(folder / "data"))
