"""`StoreDataset`: samples, views, windows and batches, alone and in a `DataLoader`."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import re
import signal
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_stores import MakeStore, begin, build, mixed_values, samples_of
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

import ups_store
from ups_store.errors import (
    ArrayNotFoundError,
    NotCommittedError,
    SampleIndexError,
    SpecError,
    StoreError,
    StoreNotFoundError,
)
from ups_store.format.metadata import DTYPE_NAMES, dtype_of
from ups_store.torch import Batch, Sample, StoreDataset, Window
from ups_store.torch.batch import SENT_BYTES

NUM_SAMPLES, NUM_TIMES = 6, 9
workers = pytest.mark.filterwarnings(  # of Python 3.12 on, about every fork; of torch, about small machines
    "ignore:.*fork.*:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)


def trajectories(
    num_samples: int = NUM_SAMPLES, num_times: int = NUM_TIMES, *, width: int = 16
) -> dict[str, npt.NDArray[Any]]:
    """Latents that differ in every time step, conditions of every kind, and a field without time.

    With 16 values a token a sample has a slot of its own, with 1 it lies directly behind the one before.
    """
    rng = np.random.default_rng(1)
    steps = np.arange(num_samples)[:, None] * 100 + np.arange(num_times)
    latent = steps[:, :, None, None] + rng.random((num_samples, num_times, 16, width))
    return {
        "latent": latent.astype(np.float32),
        "nu": rng.random(num_samples),
        "beta": rng.random(num_samples).astype(np.float32),
        "bc_left": np.arange(num_samples),
        "coefficient": rng.random((num_samples, 20)),
    }


@pytest.fixture
def trajectory_store(make_store: MakeStore) -> Path:
    times = {"t": np.linspace(0, 2, NUM_TIMES) ** 2}
    return make_store(trajectories(), constants=times)


def equal(found: Any, expected: Any) -> bool:
    """Keys, dtypes, shapes and values agree."""
    if isinstance(expected, dict):
        same = isinstance(found, dict) and found.keys() == expected.keys()
        return same and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return bool(found == expected)


def bits_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_item_holds_every_array_of_the_sample_and_where_it_comes_from(make_store: MakeStore) -> None:
    values = mixed_values()
    del values["nothing"]
    dataset = StoreDataset(make_store(values))
    sample = dataset[2]
    assert isinstance(sample, Sample)
    assert set(sample) == {*values, "index", "task"}
    assert (int(sample["index"]), sample["task"]) == (2, "burgers1d")
    for name, value in values.items():
        assert sample[name].shape == value.shape[1:]
        assert bits_of(sample[name].reshape(-1)) == value[2].tobytes(), name
    assert sample["latent"].dtype == torch.bfloat16
    assert len(dataset) == 4


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize("length", [3, 5000], ids=["plain", "slots"])
def test_batch_has_the_bits_of_the_store_for_every_dtype(
    make_store: MakeStore, name: str, length: int
) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (7, length * dtype_of(name).itemsize), np.uint8)
    values = {"a": (raw % 2 if name == "bool" else raw).view(dtype_of(name))}
    dataset = StoreDataset(make_store(values))
    indices = [6, 0, 3, 3, 5]
    batch = dataset.batch(indices)
    assert batch["a"].dtype == getattr(torch, name)
    assert bits_of(batch["a"]) == values["a"][indices].tobytes()
    assert batch["index"].tolist() == indices


def test_views_of_every_array_change_in_place_and_the_file_stays_as_it_is(make_store: MakeStore) -> None:
    path = make_store()
    before = path.read_bytes()
    dataset = StoreDataset(path, views=True)
    sample = dataset[1]
    for tensor in sample.tensors():
        tensor.zero_()
    assert not dataset[1]["fields"].any()  # this process sees what it wrote
    assert path.read_bytes() == before
    assert StoreDataset(path)[1]["fields"].any()


def test_window_has_the_states_at_its_steps_and_the_conditions(trajectory_store: Path) -> None:
    values, times = trajectories(), np.linspace(0, 2, NUM_TIMES) ** 2
    dataset = StoreDataset(trajectory_store, window=Window(horizon=3, stride=2))
    assert len(dataset) == NUM_SAMPLES * (NUM_TIMES - 6)
    batch = dataset.batch([0, 4, len(dataset) - 1])
    for row, (sample, start) in enumerate([(0, 0), (1, 1), (5, 2)]):
        assert np.array_equal(batch["z0"][row], values["latent"][sample, start])
        assert np.array_equal(batch["z1"][row], values["latent"][sample, start + 2 : start + 7 : 2])
        assert batch["t"][row] == np.float32(times[start])
        assert np.allclose(batch["dt"][row], np.diff(times[start : start + 7 : 2]))
        assert np.array_equal(batch["coefficient"][row], values["coefficient"][sample])
    assert set(batch["params"]) == {"nu", "beta", "bc_left"}
    for name, param in batch["params"].items():
        assert param.dtype == torch.float32
        assert np.array_equal(param, values[name][[0, 1, 5]].astype(np.float32))
    assert (batch["t"].dtype, batch["dt"].dtype) == (torch.float32, torch.float32)
    assert batch["dt"].shape == (3, 3)
    numbers, samples, starts = dataset.locate([0, 4, len(dataset) - 1])
    assert [numbers.tolist(), samples.tolist(), starts.tolist()] == [[0, 0, 0], [0, 1, 5], [0, 1, 2]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_steps=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    horizon=st.integers(1, 4),
    stride=st.integers(1, 3),
    width=st.sampled_from([1, 16]),
)
def test_windows_are_all_spans_inside_num_steps(
    tmp_path_factory: pytest.TempPathFactory, num_steps: list[int], horizon: int, stride: int, width: int
) -> None:
    values = {
        "fields": trajectories(4, 12, width=width)["latent"],
        "num_steps": np.array(num_steps, np.int32),
    }
    path = build(tmp_path_factory.mktemp("store") / "a_train.zarr.zip", values)
    window = Window(horizon=horizon, stride=stride)
    span = horizon * stride
    expected = [
        (sample, start) for sample, valid in enumerate(num_steps) for start in range(max(0, valid - span))
    ]
    if not expected:
        with pytest.raises(SpecError) as caught:
            StoreDataset(path, window=window)
        assert caught.value.kind == "window"
        return
    dataset = StoreDataset(path, window=window)
    batch = dataset.batch(range(len(dataset)))
    _, samples, starts = dataset.locate(range(len(dataset)))
    assert list(zip(samples.tolist(), starts.tolist(), strict=True)) == expected
    steps = starts[:, None] + np.arange(1, horizon + 1) * stride
    assert np.array_equal(batch["t"], starts)  # numbers of the steps, as there are no times
    assert np.array_equal(batch["z0"], values["fields"][samples, starts])
    assert np.array_equal(batch["z1"], values["fields"][samples[:, None], steps])
    assert "num_steps" not in batch["params"]


def test_drawn_windows_lie_one_in_each_part_of_a_trajectory_and_change_with_the_epoch(
    make_store: MakeStore,
) -> None:
    values = {"fields": trajectories(40, 30)["latent"], "num_steps": np.full(40, 30)}
    values["num_steps"][7] = 3  # too short: it has no windows
    dataset = StoreDataset(make_store(values), window=Window(horizon=5, samples_per_trajectory=4))
    assert len(dataset) == 39 * 4
    epochs = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        _, samples, starts = dataset.locate(range(len(dataset)))
        assert samples.tolist() == [sample for sample in range(40) if sample != 7 for _ in range(4)]
        first = np.arange(4) * 25 // 4
        assert (starts.reshape(-1, 4) >= first).all()
        assert (starts.reshape(-1, 4) < first + 7).all()
        assert starts.max() == 24
        batch = dataset.batch(range(len(dataset)))
        assert np.array_equal(batch["z0"], values["fields"][samples, starts])
        epochs.append(starts.tolist())
    assert epochs[0] == epochs[2] != epochs[1]
    assert len({tuple(row) for row in np.reshape(epochs[0], (-1, 4))}) > 20


def test_times_may_belong_to_each_sample(make_store: MakeStore) -> None:
    values = {"fields": trajectories()["latent"], "t": np.random.default_rng(0).random((6, NUM_TIMES))}
    path = make_store(values, dims={"fields": ("sample", "time", "x", "c"), "t": ("sample", "time")})
    batch = StoreDataset(path, window=Window(horizon=2)).batch([8])
    expected = values["t"][1, 1:4]
    assert np.allclose(batch["t"], expected[:1])
    assert np.allclose(batch["dt"], np.diff(expected)[None])


def test_other_arrays_over_time_are_given_for_the_whole_window_when_they_are_named(
    make_store: MakeStore,
) -> None:
    values = {**trajectories(), "bc_right": np.random.default_rng(0).random((NUM_SAMPLES, NUM_TIMES, 2))}
    dims = {"latent": ("sample", "time", "l", "d"), "bc_right": ("sample", "time", "c")}
    path, window = make_store(values, dims=dims), Window(horizon=2, stride=2)
    assert "bc_right" not in StoreDataset(path, window=window)[0]
    batch = StoreDataset(path, window=window, names=["bc_right"]).batch([1, 6])
    assert np.array_equal(batch["bc_right"], values["bc_right"][[0, 1], 1:6:2])


def test_other_arrays_whose_second_axis_is_not_time_are_refused_for_windows(make_store: MakeStore) -> None:
    values = {"fields": trajectories()["latent"], "bc": np.zeros((NUM_SAMPLES, 2, NUM_TIMES))}
    path = make_store(values, dims={"fields": ("sample", "time", "x", "c"), "bc": ("sample", "side", "time")})
    with pytest.raises(SpecError) as caught:
        StoreDataset(path, window=Window(), names=["bc"])
    assert (caught.value.kind, caught.value.array) == ("time_axis", "bc")


def test_state_is_the_latent_unless_another_array_is_named(make_store: MakeStore) -> None:
    values = {"fields": trajectories()["latent"] + 1, "latent": trajectories()["latent"]}
    path = make_store(values)
    assert torch.equal(StoreDataset(path, window=Window())[0]["z0"], torch.from_numpy(values["latent"][0, 0]))
    named = StoreDataset(path, window=Window(), state="fields")
    assert torch.equal(named[0]["z0"], torch.from_numpy(values["fields"][0, 0]))


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("float16", torch.float32),
        ("bfloat16", torch.float32),
        ("float64", torch.float16),
        ("float32", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("num_values", [7000, 700_000], ids=["slots", "pages"])
def test_floating_point_arrays_are_converted_on_the_way(
    make_store: MakeStore, stored: str, asked: torch.dtype, num_values: int
) -> None:
    """700,000 values: a row is larger than the memory that rows are converted in, 7,000: several fit."""
    raw = np.random.default_rng(0).standard_normal((5, num_values)).astype(dtype_of(stored))
    values = {"a": raw, "count": np.arange(5), "mask": np.arange(5) > 2}
    batch = StoreDataset(make_store(values, dims={}), dtype=asked).batch([4, 0, 0])
    expected = torch.from_numpy(raw[[4, 0, 0]].astype(np.float64)).to(asked)
    assert batch["a"].dtype == asked
    assert torch.equal(batch["a"], expected)
    assert (batch["count"].dtype, batch["mask"].dtype) == (torch.int64, torch.bool)


def test_dataloader_needs_no_collate_fn_and_gives_one_the_samples(trajectory_store: Path) -> None:
    dataset = StoreDataset(trajectory_store, window=Window())
    default = list(DataLoader(dataset, batch_size=20))
    custom = list(DataLoader(dataset, batch_size=20, collate_fn=list))
    assert [batch.num_samples for batch in default] == [20, 20, 8]
    for batch, samples in zip(default, custom, strict=True):
        assert isinstance(batch, Batch)
        assert [type(sample) for sample in samples] == [Sample] * batch.num_samples
        assert all(equal(batch.row(row), sample) for row, sample in enumerate(samples))
    assert torch.equal(torch.cat([batch["index"] for batch in default]), torch.arange(48))


@workers
@pytest.mark.multi_process
def test_worker_puts_large_tensors_in_shared_memory_and_sends_small_ones(make_store: MakeStore) -> None:
    def was_shared(rows: Any) -> Batch:  # runs in the worker
        batch = default_collate(rows)
        return Batch(batch | {"task": str([batch[name].is_shared() for name in ("large", "small", "index")])})

    values = {"large": np.arange(4 * SENT_BYTES).reshape(4, -1), "small": np.arange(4 * 999).reshape(4, -1)}
    loader = DataLoader(
        StoreDataset(make_store(values)),
        batch_size=2,
        num_workers=1,
        collate_fn=was_shared,
        multiprocessing_context="fork",
    )
    for number, batch in enumerate(loader):
        rows = slice(2 * number, 2 * number + 2)
        assert batch["task"] == "[True, False, False]"
        assert batch["large"].is_shared()
        assert all(np.array_equal(batch[name], array[rows]) for name, array in values.items())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool"])
def test_batch_that_is_sent_to_another_process_is_the_same(name: str) -> None:
    values = torch.arange(24).to(getattr(torch, name)).reshape(2, 3, 4)
    batch = Batch(values=values, empty=values[:0], params={"nu": values[0, 0]}, task="burgers1d")
    for whole in (batch, Sample(batch | {"number": values[1, 1, 1]})):
        found = pickle.loads(ForkingPickler.dumps(whole))
        assert type(found) is type(whole)
        assert equal(found, whole)
        assert not found["values"].is_shared()
        found["values"].zero_()  # memory of its own
    assert torch.equal(values, torch.arange(24).to(values.dtype).reshape(2, 3, 4))


class Killing(StoreDataset):
    """Its first worker is killed when it is asked for its second batch."""

    pipe = -1

    def __getitems__(self, indices: Any) -> Any:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.id == 0 and min(indices) > 0:
            os.write(self.pipe, f"{os.getpid()}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitems__(indices)


def train(path: Path, pipe: int) -> None:
    """Say by the pipe which workers there are, which is killed, and the error.

    A worker is asked for its next batch when its last one has been received. Killed then, it isn't halfway
    through a message, for whose rest torch waits without a limit.
    """
    Killing.pipe = pipe
    loader = DataLoader(Killing(path), 2, num_workers=2, prefetch_factor=1, multiprocessing_context="fork")
    batches = iter(loader)
    pids = [str(worker.pid) for worker in multiprocessing.active_children()]
    os.write(pipe, f"{' '.join(pids)}\n".encode())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises too, at any later moment
    try:
        list(batches)
    except RuntimeError as error:
        os.write(pipe, f"{error}\n".encode())


@workers
@pytest.mark.multi_process
def test_worker_that_is_killed_is_named_and_nothing_stays_behind(make_store: MakeStore) -> None:
    path = make_store({"a": np.zeros((4000, 2000))})
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=train, args=(path, writing))
    process.start()
    os.close(writing)
    with open(reading) as lines:  # up to the last process that could write
        pids, killed, message = lines.read().splitlines()
    process.join()
    workers = [int(pid) for pid in pids.split()]
    assert len(workers) == 2
    assert int(killed) in workers
    assert re.match(rf"DataLoader worker \(pid(\(s\))? {killed}\)", message)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_batch_moves_as_a_whole_and_counts_its_bytes(trajectory_store: Path) -> None:
    batch = StoreDataset(trajectory_store, window=Window()).batch([0, 1])
    there = batch.to("meta")
    assert isinstance(there, Batch)
    assert all(tensor.is_meta for tensor in there.tensors())
    assert there["params"].keys() == batch["params"].keys()
    # z0, z1: 256 float32 each; t, dt, 3 parameters: float32; index: int64; coefficient: 20 float64
    assert batch.nbytes == 2 * (2 * 256 * 4 + 5 * 4 + 8 + 20 * 8)
    assert equal(pickle.loads(pickle.dumps(batch)), batch)
    assert isinstance(copy.copy(batch), Batch)  # what pin_memory of a DataLoader starts with


def test_pickled_dataset_opens_the_store_again(trajectory_store: Path) -> None:
    dataset = StoreDataset(
        trajectory_store, window=Window(horizon=2, samples_per_trajectory=3), dtype=torch.float16
    )
    dataset.set_epoch(5)
    twin = pickle.loads(pickle.dumps(dataset))
    assert equal(twin.batch([3, 8]), dataset.batch([3, 8]))
    assert len(pickle.dumps(dataset)) < 2000


def test_several_stores_of_equal_arrays_mix_in_a_batch_in_the_order_asked_for(make_store: MakeStore) -> None:
    values = [mixed_values(4, seed=seed) for seed in range(3)]
    paths = [
        make_store(value, name=f"{name}_train.zarr.zip", identity={"task": name})
        for name, value in zip("abc", values, strict=True)
    ]
    dataset = StoreDataset([ups_store.open(paths[0]), str(paths[1]), paths[2]])
    indices = [11, 0, 5, 4, 11, 2]
    batch = dataset.batch(indices)
    assert (len(dataset), batch["index"].tolist()) == (12, indices)
    assert batch["task"] == ["c", "a", "b", "b", "c", "a"]
    expected = np.concatenate([value["fields"] for value in values])[indices]
    assert np.array_equal(batch["fields"], expected)
    assert dataset.batch([4, 7])["task"] == "b"
    assert [batch.row(row)["task"] for row in range(6)] == batch["task"]


def test_stores_of_different_arrays_share_a_dataset_but_no_batch(make_store: MakeStore) -> None:
    paths = [
        make_store({"latent": np.zeros((3, 4, width, 2))}, name=f"a{width}_train.zarr.zip")
        for width in (5, 6)
    ]
    dataset = StoreDataset(paths)
    assert dataset[1]["latent"].shape == (4, 5, 2)
    assert dataset[4]["latent"].shape == (4, 6, 2)
    with pytest.raises(SpecError) as caught:
        dataset.batch([1, 4])
    assert caught.value.kind == "mixed"


def test_task_is_named_by_attributes_identity_or_file(make_store: MakeStore) -> None:
    values = {"a": np.zeros(2)}
    by_attrs = make_store(values, attrs={"task": "advection1d"})
    by_file = make_store(values, identity={}, name="darcy2d_val.zarr.zip")
    tasks = [StoreDataset(path)[0]["task"] for path in (by_attrs, by_file)]
    assert tasks == ["advection1d", "darcy2d_val"]


def test_negative_numbers_count_from_the_end_and_slices_give_batches(trajectory_store: Path) -> None:
    for options in ({}, {"views": True}, {"window": Window(horizon=2)}):
        dataset = StoreDataset(trajectory_store, **options)
        num = len(dataset)
        assert equal(dataset[-1], dataset[num - 1])
        assert equal(dataset[-num], dataset[0])
        assert equal(dataset[2:5], dataset.batch([2, 3, 4]))
        assert equal(dataset[-2:], dataset.batch([-2, -1]))
        assert dataset[-2:]["index"].tolist() == [num - 2, num - 1]
    doubled = StoreDataset(trajectory_store, transform=lambda sample: {"twice": 2 * sample["latent"]})
    assert torch.equal(doubled[1:3]["twice"], 2 * StoreDataset(trajectory_store)[1:3]["latent"])


@pytest.mark.parametrize("index", [-7, 6, 10**12])
def test_index_outside_the_dataset_is_refused(trajectory_store: Path, index: int) -> None:
    for views in (False, True):
        dataset = StoreDataset(trajectory_store, views=views)
        with pytest.raises(SampleIndexError) as caught:
            dataset[index]
        assert caught.value.found == index
        assert isinstance(caught.value, IndexError)
    with pytest.raises(SampleIndexError):
        dataset.batch([0, index])


@pytest.mark.parametrize("indices", [[0.5], [True], [[0, 1]]])
def test_indices_that_are_no_list_of_integers_are_refused(trajectory_store: Path, indices: Any) -> None:
    dataset = StoreDataset(trajectory_store)
    with pytest.raises(SpecError) as caught:
        dataset.batch(indices)
    assert caught.value.kind == "index"
    for empty in (lambda: dataset[4:2], lambda: dataset.batch([])):
        with pytest.raises(SampleIndexError):
            empty()


def test_incomplete_store_is_refused(tmp_path: Path) -> None:
    values, path = trajectories(), tmp_path / "a_train.zarr.zip"
    with begin(path, values) as writer:
        writer.commit_many([0, 1], samples_of(values, [0, 1]))
    with pytest.raises(StoreNotFoundError):
        StoreDataset(path)
    with ups_store.open(path, partial=True) as store, pytest.raises(NotCommittedError) as caught:
        StoreDataset(store)
    assert caught.value.found == 2


@pytest.mark.parametrize(
    ("options", "error", "kind"),
    [
        ({"window": Window(horizon=NUM_TIMES)}, SpecError, "window"),
        ({"window": Window(stride=NUM_TIMES)}, SpecError, "window"),
        ({"window": Window(), "state": "nu"}, SpecError, "time_axis"),
        ({"state": "latent"}, SpecError, "state"),
        ({"window": Window(), "state": "z"}, ArrayNotFoundError, "no_array"),
        ({"window": Window(), "names": ["nu", "z"]}, ArrayNotFoundError, "no_array"),
        ({"names": ["t"]}, ArrayNotFoundError, "no_array"),
        ({"dtype": torch.int32}, SpecError, "dtype"),
        ({"dtype": "float32"}, SpecError, "dtype"),
        ({"dtype": torch.float16, "views": True}, SpecError, "dtype"),
    ],
)
def test_dataset_refuses_what_the_store_cannot_give(
    trajectory_store: Path, options: dict[str, Any], error: type[StoreError], kind: str
) -> None:
    with pytest.raises(error) as caught:
        StoreDataset(trajectory_store, **options)
    assert caught.value.kind == kind


def test_array_with_the_name_of_a_batch_key_is_refused_unless_left_out(make_store: MakeStore) -> None:
    path = make_store({"valid": np.zeros((2, 3)), "a": np.zeros(2)})
    with pytest.raises(SpecError) as caught:
        StoreDataset(path)
    assert (caught.value.kind, caught.value.array) == ("names", "valid")
    assert len(StoreDataset(path, names=["a"])) == 2


ODD = {
    "strided": torch.zeros(5, 4)[:, 0],
    "turned": torch.arange(6.0).reshape(2, 3).mT,
    "expanded": torch.ones(1).expand(4),
    "sparse": torch.eye(3).to_sparse(),
    "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("key", ODD)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch, about sending them
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(ForkingPickler.dumps(it))])
def test_tensor_that_somebody_puts_in_a_batch_stays_what_it_is(
    key: str, copied: Callable[[Batch], Batch]
) -> None:
    batch = Batch({key: ODD[key], "index": torch.arange(3)})
    found = copied(batch)
    assert type(found) is Batch
    assert type(found[key]) is type(ODD[key])
    assert found[key].layout == ODD[key].layout
    assert torch.equal(found[key].to_dense(), ODD[key].to_dense())
    assert torch.equal(found["index"], batch["index"])


@pytest.mark.parametrize("wrong", [{"horizon": 0}, {"stride": 0}, {"seed": -1}])
def test_window_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SpecError) as caught:
        Window(**wrong)
    assert caught.value.kind == "window"


def test_times_of_another_length_are_refused(make_store: MakeStore) -> None:
    path = make_store(
        {"fields": trajectories()["latent"]},
        constants={"t": np.arange(4.0)},
        dims={"fields": ("sample", "time", "x", "c"), "t": ("t",)},
    )
    with pytest.raises(SpecError) as caught:
        StoreDataset(path, window=Window())
    assert caught.value.kind == "times"
