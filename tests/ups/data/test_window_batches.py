"""Windows of stores: inside their trajectories, repeatable, of one task, with their physical steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numbered_batches import batch_of

import ups_store
from ups.data.augment import Draws, Symmetries
from ups.data.batches import TrainingData, WindowBatch, WindowSource, augment_windows, window_data
from ups.data.statistics import measure_state_statistics
from ups.data.windows import Windows
from ups.errors import ConfigError
from ups_store import ArraySpec
from ups_store.packed.pack import pack

N, T, L, D = 6, 9, 8, 2
TIMES = np.linspace(0.0, 2.0, T)


def latents_of(num_samples: int, offset: float) -> np.ndarray:
    """Every number tells its sample and time step: 100 x sample + step + offset."""
    steps = np.arange(T)[:, None, None] + np.zeros((T, L, D))
    return 100.0 * np.arange(num_samples)[:, None, None, None] + steps + offset


def write_store(path: Path, arrays: dict[str, np.ndarray], *, t: np.ndarray | None = TIMES) -> Path:
    dims: dict[str, Any] = {"latent": ("sample", "time", "token", "latent_channel")}
    dims |= {
        "fields": ("sample", "time", "x", "channel"),
        "t": ("time",) if t is not None else ("sample", "time"),
    }
    constants = {} if t is None else {"t": t}
    specs = {
        name: ArraySpec(values.shape, values.dtype, dims=dims.get(name)) for name, values in arrays.items()
    }
    given = {"constants": constants, "dims": {name: dims[name] for name in constants}}
    with ups_store.create(path, specs, **given, identity={"made": path.name}) as writer:
        writer.commit_many(range(len(next(iter(arrays.values())))), arrays)
        writer.finish()
    return path


def write_transient(path: Path, *, num_samples: int = N, **more: Any) -> Path:
    latent = latents_of(num_samples, more.pop("offset", 0.0)).astype(np.float16)
    t = more.pop("t", TIMES)
    nu = 0.01 * (1 + np.arange(num_samples))
    return write_store(path, {"latent": latent, "nu": nu, **more}, t=t)


def write_steady(path: Path, *, num_samples: int = 10) -> Path:
    rng = np.random.default_rng(0)
    arrays = {
        "latent": rng.standard_normal((num_samples, 1, L, D)).astype(np.float16),
        "latent_input": 5 + rng.standard_normal((num_samples, L, D)).astype(np.float16),
        "beta": np.ones(num_samples),
    }
    return write_store(path, arrays, t=None)


def open_windows(path: Path, **options: Any) -> Windows:
    return Windows(ups_store.open(path), **options)


@pytest.fixture
def transient(tmp_path: Path) -> Path:
    return write_transient(tmp_path / "burgers1d_train.zarr.zip")


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("off", "packed by blosc, decoded when it is used"),
        ("page-cache", "packed by blosc, decoded when it is used, in the page cache"),
        ("copy", "packed by blosc, decoded into RAM"),
    ],
)
def test_packed_store_has_the_windows_of_the_mapped_one_and_says_that_it_is_decoded(
    transient: Path, mode: Any, says: str
) -> None:
    expected = open_windows(transient, horizon=2).read(np.arange(12))
    pack(transient, transient)
    windows = open_windows(transient, horizon=2)
    assert windows.preload(mode, device="cpu").startswith(says)
    assert torch.equal(windows.read(np.arange(12)).states, expected.states)
    assert [store.codec for store in WindowSource({"burgers1d": windows}).stores] == ["blosc"]


# --- windows of one store ------------------------------------------------------------------------------


def test_windows_are_frames_a_stride_apart_of_one_trajectory(transient: Path) -> None:
    windows = open_windows(transient, horizon=2, stride=3)
    assert len(windows) == N * (T - 6)
    found = windows.read(np.arange(len(windows)))
    first = found.states[:, 0, 0, 0]
    assert sorted(first.tolist()) == [100.0 * i + step for i in range(N) for step in range(T - 6)]
    steps = found.states[:, :, 0, 0] - first[:, None]
    assert steps.tolist() == [[0.0, 3.0, 6.0]] * len(windows)
    assert found.states.dtype == torch.float32
    np.testing.assert_allclose(found.dt, 3 * 0.25)
    np.testing.assert_allclose(found.parameters["nu"], 0.01 * (1 + first.numpy() // 100))


def test_windows_stay_inside_the_valid_steps(tmp_path: Path) -> None:
    num_steps = np.array([9, 4, 3, 2, 1, 9])
    path = write_transient(tmp_path / "a.zarr.zip", num_steps=num_steps)
    windows = open_windows(path, horizon=1, stride=3)
    found = windows.read(np.arange(len(windows))).states[:, :, 0, 0]
    sample, last = divmod(found[:, 1].numpy().astype(int), 100)
    assert set(sample.tolist()) == {0, 1, 5}
    assert (last < num_steps[sample]).all()
    assert windows.parameters == ("nu",)


def test_uneven_times_give_each_window_its_own_step(tmp_path: Path) -> None:
    t = np.array([0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.1, 2.8, 3.6])
    path = write_transient(tmp_path / "a.zarr.zip", t=t)
    windows = open_windows(path)
    found = windows.read(np.arange(len(windows)))
    first = found.states[:, 0, 0, 0].numpy().astype(int) % 100
    np.testing.assert_allclose(found.dt, t[first + 1] - t[first])
    with pytest.raises(ConfigError, match="not of one length") as caught:
        open_windows(path, horizon=2)
    assert caught.value.kind == "uneven_times"


def test_times_of_every_sample_are_its_own(tmp_path: Path) -> None:
    t = np.arange(1.0, N + 1)[:, None] * TIMES
    latent = latents_of(N, 0.0).astype(np.float32)
    path = write_store(tmp_path / "a.zarr.zip", {"latent": latent, "t": t}, t=None)
    found = open_windows(path).read(np.arange(N * (T - 1)))
    sample = found.states[:, 0, 0, 0].numpy().astype(int) // 100
    np.testing.assert_allclose(found.dt, 0.25 * (1 + sample))


def test_store_without_times_counts_steps(tmp_path: Path) -> None:
    windows = open_windows(write_transient(tmp_path / "a.zarr.zip", t=None), stride=2)
    assert windows.typical_dt() == 2.0


def test_steady_task_gives_input_and_solution(tmp_path: Path) -> None:
    windows = open_windows(write_steady(tmp_path / "darcy2d_train.zarr.zip"), horizon=4, stride=3)
    assert (len(windows), windows.horizon, windows.typical_dt()) == (10, 1, 1.0)
    found = windows.read(np.array([7, 2]))
    store = windows.store
    np.testing.assert_array_equal(found.states[:, 0], store["latent_input"][[7, 2]])
    np.testing.assert_array_equal(found.states[:, 1], store["latent"][[7, 2], 0])
    assert found.dt.tolist() == [1.0, 1.0]


def test_steady_fields_of_another_number_of_values_than_their_input_are_refused(tmp_path: Path) -> None:
    arrays = {"fields": np.zeros((4, 1, 8, 2), np.float32), "coefficient": np.zeros((4, 8), np.float32)}
    with pytest.raises(ConfigError, match=r"coefficient or force with 16 numbers") as caught:
        open_windows(write_store(tmp_path / "a.zarr.zip", arrays, t=None))
    assert caught.value.kind == "no_input"


def test_horizon_longer_than_the_trajectories_is_refused_with_both_numbers(transient: Path) -> None:
    with pytest.raises(ConfigError, match="at least 11 time steps, found at most 9") as caught:
        open_windows(transient, horizon=5, stride=2)
    assert caught.value.kind == "horizon"
    assert "training.horizon = 5 with training.stride = 2" in str(caught.value)


def test_limit_takes_the_first_samples(transient: Path) -> None:
    windows = open_windows(transient, limit=2)
    assert len(windows) == 2 * (T - 1)
    assert windows.parameter_ranges() == {"nu": (0.01, 0.02)}


@pytest.mark.parametrize(
    ("mode", "place"),
    [("off", "read when it is used"), ("auto", "in the page cache"), ("copy", "in RAM")],
)
def test_preloaded_store_gives_the_same_windows(transient: Path, mode: Any, place: str) -> None:
    windows = open_windows(transient, horizon=2)
    before = windows.read(np.array([3, 11])).states
    assert windows.preload(mode, device="cpu") == place
    torch.testing.assert_close(windows.read(np.array([3, 11])).states, before, rtol=0, atol=0)


# --- batches -------------------------------------------------------------------------------------------


@pytest.fixture
def batches(tmp_path: Path) -> TrainingData[WindowSource]:
    """48 windows of one task, 16 of another, 10 pairs of a steady one; batches of 4."""
    tasks = {
        "burgers1d": open_windows(write_transient(tmp_path / "b.zarr.zip")),
        "advection1d": open_windows(write_transient(tmp_path / "a.zarr.zip", num_samples=2, offset=0.5)),
        "darcy2d": open_windows(write_steady(tmp_path / "d.zarr.zip")),
    }
    return window_data(tasks, global_batch_size=4, seed=3, parameters=("beta", "nu"))


def test_batch_is_a_function_of_its_number(batches: TrainingData[WindowSource]) -> None:
    order = [3, 40, 0, 3, 17]
    found = [batch_of(batches, number) for number in order]
    assert torch.equal(found[0].states, found[3].states)
    assert torch.equal(found[0].draws.generator.get_state(), found[3].draws.generator.get_state())
    assert not torch.equal(found[0].draws.generator.get_state(), found[1].draws.generator.get_state())
    later = [batch_of(batches, number).states for number in order]
    assert all(torch.equal(one.states, other) for one, other in zip(found, later, strict=True))


def test_pass_takes_every_window_once_and_tasks_by_their_number_of_windows(
    batches: TrainingData[WindowSource],
) -> None:
    found = [batch_of(batches, number) for number in range(batches.order.num_steps)]
    tasks = [batch.task for batch in found]
    assert {name: tasks.count(name) for name in set(tasks)} == {
        "burgers1d": 12,
        "advection1d": 4,
        "darcy2d": 3,
    }
    assert sorted(len(batch) for batch in found if batch.task == "darcy2d") == [2, 4, 4]
    first = torch.cat([batch.states[:, 0, 0, 0] for batch in found if batch.task == "burgers1d"])
    assert sorted(first.tolist()) == [100.0 * i + step for i in range(N) for step in range(T - 1)]
    assert tasks != sorted(tasks)


def test_passes_differ(batches: TrainingData[WindowSource]) -> None:
    num = batches.order.num_steps
    passes = [[batch_of(batches, which * num + i) for i in range(num)] for which in range(2)]
    assert [batch.task for batch in passes[0]] != [batch.task for batch in passes[1]]
    first = [[b.states[:, 0, 0, 0].tolist() for b in some if b.task == "burgers1d"] for some in passes]
    assert first[0] != first[1]


def test_parameters_come_in_the_order_that_was_asked_for(batches: TrainingData[WindowSource]) -> None:
    for number in range(batches.order.num_steps):
        batch = batch_of(batches, number)
        assert batch.parameters.shape == (len(batch), 2)
        assert batch.parameters.isnan().all(0).tolist() == [batch.task != "darcy2d", batch.task == "darcy2d"]


def test_task_of_fewer_windows_than_a_batch_still_comes(tmp_path: Path) -> None:
    windows = open_windows(write_transient(tmp_path / "b.zarr.zip", num_samples=1), horizon=6)
    batches = window_data({"burgers1d": windows}, global_batch_size=32, seed=0, parameters=())
    assert batches.order.num_steps == 1
    batch = batch_of(batches, 5)
    assert sorted(batch.states[:, 0, 0, 0].tolist()) == [0.0, 1.0, 2.0]
    assert batch.parameters.shape == (3, 0)


# --- statistics and augmentation -----------------------------------------------------------------------


def test_statistics_are_those_of_the_valid_states_by_channel(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((N, T, L, D)) * [1.0, 3.0] + [0.5, -2.0]
    num_steps = np.array([9, 4, 9, 9, 1, 9])
    padded = latent.copy()
    for sample, num in enumerate(num_steps):
        padded[sample, num:] = 1e6
    path = write_store(tmp_path / "a.zarr.zip", {"latent": padded.astype(np.float32), "num_steps": num_steps})
    found = measure_state_statistics(open_windows(path))
    valid = np.concatenate([latent[sample, :num].reshape(-1, D) for sample, num in enumerate(num_steps)])
    np.testing.assert_allclose(found["fields"].mean, valid.mean(0), rtol=1e-4)
    deviation = np.sqrt(valid.var(0).mean())  # latents have one for all channels
    np.testing.assert_allclose(found["fields"].std, [deviation, deviation], rtol=1e-4)


def test_statistics_of_states_far_from_zero_are_exact(tmp_path: Path) -> None:
    wave = np.sin(np.arange(N * T * L, dtype=np.float64)).reshape(N, T, L)
    fields = np.stack([1e9 + wave, np.full_like(wave, 101325.1), 1e-8 * wave], axis=-1)
    found = measure_state_statistics(open_windows(write_store(tmp_path / "a.zarr.zip", {"fields": fields})))
    np.testing.assert_allclose(found["fields"].std, [wave.std(), 1.0, 1e-8 * wave.std()], rtol=1e-6)
    np.testing.assert_allclose(found["fields"].mean[:2], [1e9 + wave.mean(), 101325.1], rtol=1e-12)


def test_input_of_a_steady_task_has_statistics_of_its_own(tmp_path: Path) -> None:
    found = measure_state_statistics(open_windows(write_steady(tmp_path / "d.zarr.zip")))
    assert np.abs(np.array(found["fields"].mean)).max() < 1 < np.array(found["input"].mean).min()


def test_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    latent = latents_of(2, 0.0).astype(np.float32)
    latent[1, 3, 0, 1] = np.nan
    path = write_store(tmp_path / "a.zarr.zip", {"latent": latent})
    with pytest.raises(ConfigError, match="the statistics of 'latent' aren't finite") as caught:
        measure_state_statistics(open_windows(path))
    error = caught.value
    assert (error.kind, error.path) == ("not_finite", str(path))
    assert error.found == "NaN or infinity in channel 1 of 2"
    assert str(error.hint).startswith("mend what it was made from and build it again")


def make_batch(states: torch.Tensor, task: str = "burgers1d") -> WindowBatch:
    num = len(states)
    draws = Draws.of_batch(num, seed=0)
    return WindowBatch(task, states, torch.zeros(num, 1), torch.ones(num), draws=draws)


def test_latents_are_shifted_by_whole_tokens_all_frames_of_a_window_alike() -> None:
    states = torch.randn(16, 3, 8 * 4, D)
    both = Symmetries((True, False))
    batch = augment_windows(make_batch(states), symmetries=both, tokens=(8, 4), is_latent=True)
    shifts = set()
    for before, after in zip(states.unflatten(2, (8, 4)), batch.states.unflatten(2, (8, 4)), strict=True):
        matching = [shift for shift in range(8) if torch.equal(before.roll(shift, 1), after)]
        assert len(matching) == 1
        shifts.add(matching[0])
    assert len(shifts) > 3


def test_fields_are_shifted_and_reflected_all_frames_of_a_window_alike() -> None:
    states = torch.randn(16, 3, 8, D)
    both = Symmetries((True,), reflects=True)
    batch = augment_windows(make_batch(states), symmetries=both, tokens=(4,), is_latent=False)
    seen = set()
    for before, after in zip(states, batch.states, strict=True):
        candidates = {False: before, True: -before.flip(1)}
        matching = [
            (is_reflected, shift)
            for is_reflected, field in candidates.items()
            for shift in range(8)
            if torch.equal(field.roll(shift, 1), after)
        ]
        assert len(matching) == 1
        seen.add(matching[0])
    assert {is_reflected for is_reflected, _ in seen} == {False, True}
    assert len(seen) > 4
