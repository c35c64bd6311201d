"""Boundary values `bc_*`, from stores and files into samples, batches and what models are conditioned on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from operator_runs import configure, own_copy, shared_run

import ups_store
from ups.conditions import arrays_of, condition_of, conditions_among, has_boundary_values
from ups.config import load_config
from ups.data.augment import Draws, Symmetries, augment
from ups.data.batches import WindowSource
from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.data.stores import store_path
from ups.data.windows import Windows, open_trajectories
from ups.laws import LAWS
from ups.train.operator import make_operator_stage
from ups_store.torch import new_tensor

N = 6
FIELDS = np.zeros((N, 4, 16, 2), np.float32)
ARRAYS: dict[str, Any] = {
    "fields": FIELDS,
    "nu": np.linspace(0.1, 0.2, N),
    "bc_left": np.arange(2.0 * N).reshape(N, 2),
    "bc_right": np.arange(N, dtype=np.float32)[:, None],
    "bc_maze": np.ones((N, 16), np.float32),  # a mask: 16 numbers are no few
    "num_steps": np.full(N, 4),
}
NAMES = ("bc_left_0", "bc_left_1", "bc_right", "nu")


def test_conditions_are_parameters_and_boundary_values_but_no_masks_and_counts() -> None:
    assert conditions_among(ARRAYS) == NAMES
    assert arrays_of(NAMES, ARRAYS) == ["bc_left", "bc_right", "nu"]
    left = condition_of("bc_left_1", ARRAYS)
    assert left is not None
    assert_array_equal(left, ARRAYS["bc_left"][:, 1])
    for unknown in ("bc_left_2", "bc_top", "nu_0"):
        assert condition_of(unknown, ARRAYS) is None
    assert has_boundary_values(NAMES)
    assert not has_boundary_values(["nu"])


@pytest.fixture
def store(tmp_path: Path) -> ups_store.Store:
    specs = {name: ups_store.ArraySpec(values.shape, values.dtype) for name, values in ARRAYS.items()}
    specs["fields"] = ups_store.ArraySpec(FIELDS.shape, "float32", dims=("sample", "time", "x", "channel"))
    attrs = {"task": "walls1d", "boundary": {"x": "dirichlet"}, "channels": ["u", "v"]}
    with ups_store.create(tmp_path / "walls1d_train.zarr.zip", specs, attrs=attrs, identity={}) as writer:
        writer.commit_many(range(N), ARRAYS)
        writer.finish()
    opened = ups_store.open(tmp_path / "walls1d_train.zarr.zip")
    assert isinstance(opened, ups_store.Store)
    return opened


def test_boundary_values_stand_in_the_table_of_a_batch_by_name(store: ups_store.Store) -> None:
    windows = Windows(store)
    assert windows.parameters == NAMES
    assert windows.parameter_ranges()["bc_left_1"] == (1.0, 2 * N - 1)
    source = WindowSource({"walls1d": windows}, parameters=(*NAMES, "beta"))
    batch = source.fetch(0, np.array([0, 3, 17]), epoch=0, allocate=new_tensor)
    expected = [[0.0, 1.0, 0.0, 0.1], [2.0, 3.0, 1.0, 0.12], [10.0, 11.0, 5.0, 0.2]]
    torch.testing.assert_close(batch.parameters[:, :4], torch.tensor(expected))
    assert batch.parameters[:, 4].isnan().all()


def walls_file(folder: Path) -> None:
    """Trajectories with boundary values of their own, as a file of one's own may have them."""
    rng = np.random.default_rng(0)
    with h5py.File(folder / "walls.h5", "w") as file:
        file["u"] = rng.normal(size=(20, 5, 16)).astype(np.float32)
        file["x"] = (np.arange(16) + 0.5) / 16
        file["t"] = np.arange(5) * 0.1
        file["left"] = np.linspace(-1, 1, 20)


WALLS = {
    "files": {"all": ["walls.h5"]},
    "boundary": {"x": "dirichlet"},
    "layout": {
        "fields": [{"dataset": "u", "axes": "sample time x", "channels": ["u"]}],
        "coordinates": {"x": "x", "t": "t"},
        "parameters": {"bc_left": {"dataset": "left"}},
    },
}


def test_boundary_values_of_files_of_ones_own_reach_fields_and_trajectories(tmp_path: Path) -> None:
    walls_file(tmp_path)
    config = load_config(
        {
            "data": {"tasks": "walls1d", "root": str(tmp_path)},
            "tasks": {"walls1d": WALLS},
            "cache": {"dir": str(tmp_path / "cache")},
            "reading": {"num_workers": 0},
        }
    )
    fields = open_fields(config.build, "walls1d", "test")
    assert fields.info.parameters == ("bc_left",)
    batch = next(open_trajectories(config.build, "walls1d", "test").batches())
    left = batch.parameters["bc_left"]
    assert left.shape == (len(batch),)
    assert len(left.unique()) == len(batch)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_run(tmp_path_factory)


def test_operator_is_conditioned_on_boundary_values(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prediction changes with the boundary value alone, and the trained file asks for it by name."""
    run = own_copy(prepared, tmp_path, monkeypatch)
    config = configure(run, "data.tasks=[burgers1d]", "operator.state=fields")
    path = store_path(config.cache.dir, "burgers1d", "train")
    with ups_store.open(path) as old:
        arrays = {name: old[name][...].copy() for name in old.arrays}
        attrs, constants, identity = dict(old.attrs), dict(old.constants), dict(old.identity)
        dims = {"x": ("x",), "t": ("time",)}
    path.unlink()
    arrays["bc_left"] = np.linspace(-1, 1, len(arrays["fields"]))
    specs = {name: ups_store.ArraySpec(values.shape, values.dtype) for name, values in arrays.items()}
    specs["fields"] = ups_store.ArraySpec(
        arrays["fields"].shape, "float32", dims=("sample", "time", "x", "channel")
    )
    options: dict[str, Any] = {"attrs": attrs, "constants": constants, "identity": identity, "dims": dims}
    with ups_store.create(path, specs, **options) as writer:
        writer.commit_many(range(len(arrays["fields"])), arrays)
        writer.finish()
    stage = make_operator_stage(config, device=torch.device("cpu"))
    assert stage.model.spec.parameters == ("bc_left", "nu")
    assert stage.model.spec.tasks["burgers1d"].parameters["bc_left"] == (-1.0, 1.0)
    torch.nn.init.normal_(stage.model.operator.out.weight)
    frames = torch.from_numpy(arrays["fields"][:2, 0])
    for parameter in stage.model.operator.parameters():  # adaLN-Zero: conditions have no effect at first
        torch.nn.init.normal_(parameter, std=0.2)
    one, other = (stage.model.rollout(frames, 1, parameters={"bc_left": value}) for value in (0.0, 1.0))
    assert float((one - other).abs().max()) > 1e-4


def test_samples_with_boundary_values_are_not_reflected() -> None:
    values = torch.rand(64, 16, 1)
    draws = Draws.of_batch(64, seed=0)
    known = {"laws": LAWS["burgers1d"], "periodic": (False,)}
    kept = augment(values, Symmetries.of(**known, conditions=["bc_left"]), draws=draws)
    torch.testing.assert_close(kept, values)
    reflected = augment(values, Symmetries.of(**known, conditions=["nu"]), draws=draws)
    assert (reflected != values).any()


def test_data_of_our_own_have_no_boundary_values(tmp_path: Path) -> None:
    make_dataset("burgers1d", tmp_path, num_samples=8, points=32, frames=3, nu=0.1)
    config = load_config(
        overrides=["data.tasks=[burgers1d]", f"data.root={tmp_path}", "reading.num_workers=0"]
    )
    assert open_fields(config.build, "burgers1d", "train").info.parameters == ("nu",)
