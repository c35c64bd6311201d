"""Fields to train on: from HDF5 and from stores alike, statistics, augmentation, batches that repeat."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
import torch
from control_groups import GROUP_BYTES
from numbered_batches import batch_of
from typer.testing import CliRunner

import ups_store
from ups.data.augment import Draws, Symmetries, augment, shift_frames
from ups.data.batches import FrameBatch, FrameSource, TrainingData, frame_data, spread_batches
from ups.data.fields import Fields, parameter_names
from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.data.statistics import measure_statistics
from ups.errors import ConfigError
from ups.laws import LAWS
from ups_store.build import BuildConfig, CacheConfig, DataConfig
from ups_store.building.command import app as build
from ups_store.errors import SourceError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_dataset("burgers1d", folder, num_samples=10, points=32, frames=5, nu=0.1)
    make_dataset("darcy2d", folder, num_samples=10, points=16)
    return folder


def open_split(root: Path, task: str = "burgers1d", split: str = "train", **options: Any) -> Fields:
    source = options.pop("source", "auto")
    cache = options.pop("cache", root / "cache")
    data = DataConfig(tasks=(task,), root=root, **options)
    return open_fields(BuildConfig(data=data, cache=CacheConfig(dir=cache)), task, split, source=source)


def make_batches(root: Path) -> TrainingData[FrameSource]:
    fields = {task: open_split(root, task) for task in ("burgers1d", "darcy2d")}
    return frame_data(fields, global_batch_size=4, seed=3, parameters=parameter_names(fields))


def is_direct(fields: Fields) -> bool:
    """Whether they were read from HDF5."""
    return fields.identity.startswith("files ")


# --- where fields come from ----------------------------------------------------------------------------


def test_hdf5_gives_grid_and_parameters(root: Path) -> None:
    fields = open_split(root)
    assert fields.info.grid.points == (32,)
    assert fields.info.grid.periodic == (True,)
    assert fields.info.grid.channels == (("fields", 1),)
    assert fields.num_steps.tolist() == [5] * 8
    assert fields.parameters(np.array([0, 3]))["nu"].tolist() == [0.1, 0.1]


def test_steady_task_has_its_coefficient_and_ends(root: Path) -> None:
    fields = open_split(root, "darcy2d")
    assert fields.info.steady
    assert fields.info.grid.periodic == (False, False)
    assert fields.info.grid.channels == (("fields", 1), ("coefficient", 1))
    frame = fields.read("coefficient", np.array([2]), np.array([0]))
    assert frame.shape == (1, 16, 16, 1)
    assert set(np.unique(frame)) <= {np.float32(0.1), np.float32(1.0)}


def test_store_and_hdf5_give_the_same_frames(root: Path, tmp_path: Path) -> None:
    flags = ["--tasks", "burgers1d", "--root", str(root), "--cache-dir", str(tmp_path), "--no-parallel"]
    assert CliRunner().invoke(build, flags).exit_code == 0
    stored = open_split(root, cache=tmp_path)
    direct = open_split(root, cache=tmp_path, source="hdf5")
    assert not is_direct(stored)
    assert stored.info == direct.info
    samples, steps = np.array([7, 0, 3]), np.array([4, 0, 2])
    given = stored.read("fields", samples, steps)
    assert given.dtype == np.float32
    np.testing.assert_array_equal(given, direct.read("fields", samples, steps))
    assert stored.parameters(samples)["nu"].tolist() == direct.parameters(samples)["nu"].tolist()
    # A store of another reduction isn't taken.
    assert is_direct(open_split(root, cache=tmp_path, reduce_space=2))
    with pytest.raises(ConfigError, match="reduce_space is 1") as caught:
        open_split(root, cache=tmp_path, reduce_space=2, source="store")
    assert caught.value.kind == "no_store"


def test_store_that_serves_is_opened_once_and_another_is_closed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--tasks", "burgers1d", "--root", str(root), "--cache-dir", str(tmp_path), "--no-parallel"]
    assert CliRunner().invoke(build, flags).exit_code == 0
    opened: list[ups_store.Store] = []
    whole = ups_store.open

    def counting(path: Path) -> ups_store.Store:
        opened.append(whole(path))
        return opened[-1]

    monkeypatch.setattr(ups_store, "open", counting)
    assert not is_direct(open_split(root, cache=tmp_path))
    assert len(opened) == 1
    assert is_direct(open_split(root, cache=tmp_path, reduce_space=2))
    with pytest.raises(ValueError, match="closed"):
        opened[1].gather(np.array([0]), ["fields"])


def test_partitions_of_a_field_store_are_taken(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--tasks", "burgers1d", "--root", str(root), "--cache-dir", str(tmp_path), "--no-parallel"]
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert CliRunner().invoke(build, flags).exit_code == 0
    monkeypatch.undo()
    stored, direct = open_split(root, cache=tmp_path), open_split(root, cache=tmp_path, source="hdf5")
    assert not is_direct(stored)
    assert stored.info == direct.info
    samples, steps = np.arange(len(direct.num_steps)), np.zeros(len(direct.num_steps), int)
    given = stored.read("fields", samples, steps)
    np.testing.assert_array_equal(given, direct.read("fields", samples, steps))
    next(tmp_path.glob("burgers1d_train-00001-of-*")).unlink()
    assert is_direct(open_split(root, cache=tmp_path))
    with pytest.raises(ConfigError, match="partitions are missing"):
        open_split(root, cache=tmp_path, source="store")


def test_ragged_runs_have_only_their_own_steps(tmp_path: Path) -> None:
    path = tmp_path / "burgers1d_train.zarr.zip"
    fields, steps = np.arange(24, dtype=np.float32).reshape(2, 3, 4, 1), np.array([3, 1])
    arrays = {
        "fields": ups_store.ArraySpec(fields.shape, "float32", dims=("sample", "time", "x", "channel")),
        "num_steps": ups_store.ArraySpec((2,), "int64", dims=("sample",)),
    }
    with ups_store.create(path, arrays, identity={}, attrs={"task": "burgers1d"}) as writer:
        writer.commit_many([0, 1], {"fields": fields, "num_steps": steps})
        writer.finish()
    store = Fields(ups_store.open(path))
    frames = [batch.values for batch in spread_batches({"b": store}, batch_size=8, max_frames=99)]
    assert torch.cat(frames)[:, 0, 0].tolist() == [0, 4, 8, 12]
    assert Fields(ups_store.open(path), limit=1).num_steps.tolist() == [3]


def test_split_without_samples_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="burgers1d val would be empty") as caught:
        open_split(root, split="val", split_fractions=(0.9, 0.0, 0.1))
    assert caught.value.kind == "empty_split"


def test_split_larger_than_memory_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.data.splits._MEMORY_SHARE", 1e-12)
    with pytest.raises(ConfigError, match="build a field store") as caught:
        open_split(root)
    assert caught.value.kind == "too_large"


_IN_GROUP = """
import sys
from pathlib import Path
import torch
from ups_store.build import BuildConfig, DataConfig
from ups.data.splits import open_fields
from ups.trained.encode_lanes import num_lanes
from ups.errors import ConfigError
from ups.device import free_bytes

torch.set_num_threads(4)
members, root = map(Path, sys.argv[1:])
members.write_text("0")
data = DataConfig(tasks=("burgers1d",), root=root, split_fractions=(1.0, 0.0, 0.0))
try:
    open_fields(BuildConfig(data=data), "burgers1d", "train", source="hdf5")
except ConfigError as error:
    cpu = torch.device("cpu")
    print(error.kind, free_bytes(cpu), num_lanes(cpu, micro_batch_nbytes=8 << 20))
    print(error)
"""


@pytest.mark.multi_process
def test_split_larger_than_the_control_group_is_refused_where_the_machine_has_room(
    tmp_path: Path, limited_group: Path
) -> None:
    needed = 2 * GROUP_BYTES  # in the file none of it: the values were never written
    if psutil.virtual_memory().available < 4 * needed:
        pytest.skip("this machine has no room for the split either")
    with h5py.File(tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5", "w") as file:
        shape = (16, 64, needed // (16 * 64 * 4))
        file.create_dataset("tensor", shape, "f4")
        file["x-coordinate"] = np.linspace(0, 1, shape[2], dtype="f4")
        file["t-coordinate"] = np.linspace(0, 1, shape[1] + 1, dtype="f4")
        file.attrs["Nu"] = 0.1
    command = [sys.executable, "-c", _IN_GROUP, limited_group, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, message = done.stdout.splitlines()
    kind, free, lanes = first.split()
    assert kind == "too_large"
    assert 0 < int(free) <= GROUP_BYTES
    assert int(lanes) == max(1, int(free) // (32 * (8 << 20))) <= 2
    assert f"found {needed >> 20} MiB" in message
    assert "raise the limit of the container" in message


def test_values_that_are_not_finite_are_refused_unless_kept(root: Path, tmp_path: Path) -> None:
    sound, damaged = (tmp_path / f"1D_Burgers_Sols_Nu0.{number}.hdf5" for number in (1, 2))
    for path in (sound, damaged):
        shutil.copy(root / "1D_Burgers_Sols_Nu0.1.hdf5", path)
    with h5py.File(damaged, "r+") as file:
        file.attrs["Nu"] = 0.2
        file["tensor"][2, 1, 5] = np.nan
    with pytest.raises(SourceError, match=r"; mend the source, or data\.on_nan=keep$") as caught:
        open_split(tmp_path)
    error = caught.value
    assert (error.kind, error.path, error.array) == ("not_finite", str(damaged), "fields")
    assert error.sample == 2  # as numbered in its file; in the split it is another
    kept = open_split(tmp_path, on_nan="keep")
    assert np.isnan(kept.read("fields", np.array([9]), np.array([1]))).sum() == 1
    with pytest.raises(ConfigError, match="statistics of 'fields' of burgers1d aren't finite") as refused:
        measure_statistics(kept)
    assert refused.value.found == "NaN or infinity in sample 9 of the split, time step 1"


# --- statistics ----------------------------------------------------------------------------------------


def test_statistics_are_those_of_the_training_split_alone(root: Path) -> None:
    train, test = open_split(root), open_split(root, split="test")
    steps = np.arange(5)
    values = np.concatenate([train.read("fields", np.full(5, i), steps) for i in range(8)]).astype(np.float64)
    statistics = measure_statistics(train)["fields"]
    assert statistics.mean == pytest.approx([values.mean()])
    assert statistics.std == pytest.approx([values.std()])
    assert measure_statistics(test)["fields"].mean != pytest.approx([values.mean()])


def test_statistics_are_exact_far_from_zero() -> None:
    rng = np.random.default_rng(0)
    values = (1e4 + 1e-2 * rng.standard_normal((2, 3, 16, 2))).astype(np.float32)
    values[..., 1] = 5.0  # a channel that doesn't vary

    class Some:
        class info:  # noqa: N801
            class grid:  # noqa: N801
                channels = (("fields", 2),)
                arrays = ("fields",)

        num_steps = np.array([3, 3])

        def read(self, array: str, samples: Any, steps: Any) -> Any:
            return values[samples, steps]

    statistics = measure_statistics(Some())["fields"]  # type: ignore[arg-type]
    assert statistics.std[0] == pytest.approx(values[..., 0].astype(np.float64).std(), rel=1e-6)
    assert statistics.mean == pytest.approx([values[..., 0].astype(np.float64).mean(), 5.0])
    assert statistics.std[1] == 1.0


# --- augmentation --------------------------------------------------------------------------------------


def test_shift_moves_each_frame_by_its_own_number() -> None:
    values = torch.arange(24.0).reshape(2, 3, 4, 1)
    shifted = shift_frames(values, torch.tensor([1, 3]), axis=2)
    torch.testing.assert_close(shifted[0], values[0].roll(1, dims=1))
    torch.testing.assert_close(shifted[1], values[1].roll(3, dims=1))


def symmetries_of(task: str, *periodic: bool) -> Symmetries:
    return Symmetries.of(LAWS[task], periodic=periodic, conditions=())


def test_burgers_is_reflected_with_its_sign_and_others_never() -> None:
    values = torch.arange(6.0).reshape(1, 6, 1).expand(64, -1, -1) + 1
    draws = Draws.of_batch(64, seed=0)
    seen = {
        tuple(frame[:, 0].sign().tolist())
        for frame in augment(values, symmetries_of("burgers1d", True), draws=draws)
    }
    assert seen == {(1.0,) * 6, (-1.0,) * 6}
    assert augment(values, symmetries_of("advection1d", True), draws=draws).min() > 0
    reflected = augment(values, symmetries_of("burgers1d", False), draws=draws)
    torch.testing.assert_close(reflected[reflected[:, 0, 0] < 0][0], -values[0].flip(0))


def test_axes_with_ends_are_left_alone() -> None:
    values = torch.randn(8, 4, 5, 1, generator=torch.Generator().manual_seed(0))
    draws = Draws.of_batch(8, seed=0)
    moved = augment(values, symmetries_of("darcy2d", False, False), draws=draws)
    torch.testing.assert_close(moved, values, rtol=0, atol=0)


# --- batches -------------------------------------------------------------------------------------------


def test_pass_takes_every_frame_once_and_never_mixes_tasks(root: Path) -> None:
    batches = make_batches(root)
    made = [batch_of(batches, number) for number in range(batches.order.num_steps)]
    assert {(batch.task, batch.array) for batch in made} == {
        ("burgers1d", "fields"),
        ("darcy2d", "fields"),
        ("darcy2d", "coefficient"),
    }
    burgers = torch.cat([batch.values for batch in made if batch.task == "burgers1d"])
    assert len(burgers) == 8 * 5
    assert len({frame.numpy().tobytes() for frame in burgers}) == 8 * 5


def test_batches_are_of_one_size_and_another_rest_is_left_out_of_each_pass(root: Path) -> None:
    fields = {"burgers1d": open_split(root)}  # 40 frames
    batches = frame_data(fields, global_batch_size=32, seed=0)
    made = [batch_of(batches, number).values for number in range(12)]
    assert batches.order.num_steps == 1
    assert {len(values) for values in made} == {32}
    assert len({frame.numpy().tobytes() for values in made for frame in values}) == 40
    few = frame_data(fields, global_batch_size=64, seed=0)
    assert [len(batch_of(few, number)) for number in range(3)] == [40] * 3


def test_batch_is_a_function_of_seed_and_number(root: Path) -> None:
    batches, again = make_batches(root), make_batches(root)
    numbers = [0, 5, 2, 30]

    def content(batch: FrameBatch) -> tuple[str, str, bytes, int]:
        drawn = torch.randint(1 << 40, (), generator=batch.draws.generator).item()
        return batch.task, batch.array, batch.values.numpy().tobytes(), int(drawn)

    made = {number: content(batch_of(batches, number)) for number in numbers}
    assert made == {number: content(batch_of(again, number)) for number in reversed(numbers)}
    assert len(set(made.values())) == len(numbers)


def test_second_pass_has_another_order(root: Path) -> None:
    batches = make_batches(root)
    num = batches.order.num_steps
    first = [batch_of(batches, number).values.numpy().tobytes() for number in range(num)]
    second = [batch_of(batches, number).values.numpy().tobytes() for number in range(num, 2 * num)]
    assert set(first) != set(second)


def test_parameters_come_in_the_order_asked_for(root: Path) -> None:
    batches = make_batches(root)
    by_task = {batch.task: batch.parameters[0] for batch in (batch_of(batches, i) for i in range(14))}
    assert by_task["burgers1d"].isnan().tolist() == [True, False]
    assert by_task["burgers1d"][1].item() == pytest.approx(0.1)
    assert by_task["darcy2d"].isnan().tolist() == [False, True]


def test_validation_frames_are_spread_evenly(root: Path) -> None:
    fields = open_split(root, split="val")
    everything = torch.cat([b.values for b in spread_batches({"b": fields}, batch_size=2, max_frames=99)])
    some = torch.cat([b.values for b in spread_batches({"b": fields}, batch_size=2, max_frames=3)])
    assert len(everything) == 5
    torch.testing.assert_close(some, everything[[0, 1, 3]], rtol=0, atol=0)


def test_development_and_validation_share_the_stored_split_and_no_sample(root: Path, tmp_path: Path) -> None:
    flags = ["--tasks", "burgers1d", "--root", str(root), "--cache-dir", str(tmp_path), "--no-parallel"]
    fractions = (0.2, 0.7, 0.1)
    assert CliRunner().invoke(build, [*flags, "--split-fractions", "0.2,0.7,0.1"]).exit_code == 0
    config = configure_build(root, tmp_path, fractions)
    whole = Fields(ups_store.open(tmp_path / "burgers1d_val.zarr.zip"))
    num = len(whole.num_steps)
    parts = {split: open_fields(config, "burgers1d", split) for split in ("val", "dev")}
    numbers = {"val": np.arange(0, num, 2), "dev": np.arange(1, num, 2)}
    for split, part in parts.items():
        mine, steps = np.arange(len(part.num_steps)), np.full(len(part.num_steps), 3)
        assert len(mine) == len(numbers[split]) > 0
        expected = whole.read("fields", numbers[split], steps)
        np.testing.assert_array_equal(part.read("fields", mine, steps), expected)
        assert part.parameters(mine)["nu"].tolist() == whole.parameters(numbers[split])["nu"].tolist()
        times, all_times = part.times(), whole.times()
        assert times is not None
        assert all_times is not None
        np.testing.assert_array_equal(times, all_times)


def test_one_sample_of_validation_leaves_none_for_development(root: Path, tmp_path: Path) -> None:
    config = configure_build(root, tmp_path, (0.8, 0.1, 0.1))
    assert len(open_fields(config, "burgers1d", "val").num_steps) == 1
    with pytest.raises(ConfigError, match="at least 2 samples of validation") as caught:
        open_fields(config, "burgers1d", "dev")
    assert caught.value.kind == "empty_split"


def configure_build(root: Path, cache: Path, fractions: tuple[float, float, float]) -> BuildConfig:
    data = {"tasks": "burgers1d", "root": root, "split_fractions": fractions}
    return BuildConfig.model_validate({"data": data, "cache": {"dir": cache}})


# --- random numbers of a batch -------------------------------------------------------------------------


def shared_draws(first: int, num: int, *, seed: int = 7) -> Draws:
    """Of some rows of a batch of 6."""
    return Draws(torch.Generator().manual_seed(seed), 6, first, num)


def test_normal_numbers_of_a_row_are_the_same_whichever_ranks_share_the_batch() -> None:
    shape = torch.Size((1, 5, 3))
    whole = shared_draws(0, 6)
    parts = [shared_draws(0, 2), shared_draws(2, 1), shared_draws(3, 3)]
    for _ in range(2):  # a second call gives others
        expected = whole.normal(shape)
        assert expected.shape == (6, *shape)
        assert expected.dtype == torch.float32
        assert torch.equal(torch.cat([part.normal(shape) for part in parts]), expected)
    left = [part.integers(1000) for part in parts]  # what is drawn after them is the same, too
    assert torch.equal(torch.cat(left), whole.integers(1000))


def test_normal_numbers_differ_by_row_call_and_batch_and_are_normal() -> None:
    draws = shared_draws(0, 6)
    first, second = draws.normal(torch.Size((20000,))), draws.normal(torch.Size((20000,)))
    other = shared_draws(0, 6, seed=8).normal(torch.Size((20000,)))
    rows = torch.cat([first, second, other])
    assert rows.mean(1).abs().max() < 0.03
    assert (rows.std(1) - 1).abs().max() < 0.03
    assert (torch.corrcoef(rows) - torch.eye(len(rows))).abs().max() < 0.04


def test_normal_numbers_of_other_rows_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = np.random.Philox

    def watched(*, key: int, counter: list[int]) -> np.random.Philox:
        made.append(counter[-1])
        return plain(key=key, counter=counter)

    monkeypatch.setattr(np.random, "Philox", watched)
    shared_draws(2, 3).normal(torch.Size((4,)))
    assert made == [2, 3, 4]
