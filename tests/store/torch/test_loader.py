"""`make_loader`: batches in the agreed order, in memory that is used again only when nobody looks."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_stores import MakeStore
from torch.utils.data import DataLoader

from ups_store.errors import ConfigError, StoreClosedError, TruncatedError
from ups_store.read import loader as loading
from ups_store.read.order import DataOrder, Step
from ups_store.read.prefetch import Prefetch
from ups_store.torch import (
    Batch,
    EpochReport,
    Loader,
    Sample,
    StoreDataset,
    Window,
    make_loader,
)

NUM_SAMPLES, WIDTH = 50, 8192  # a batch of 4 takes 128 KiB, which the pool keeps
THREAD = "ups_store loader"


@pytest.fixture
def dataset(make_store: MakeStore) -> StoreDataset:
    """Sample i holds the number i; conditions as usual."""
    values = {
        "a": np.arange(NUM_SAMPLES, dtype=np.float32)[:, None] + np.zeros(WIDTH, np.float32),
        "nu": np.arange(NUM_SAMPLES) / 2,
    }
    return StoreDataset(make_store(values))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    if loader_threads():
        gc.collect()  # of an iterator that an error's traceback refers to
    assert loader_threads() == []


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def assert_holds_its_samples(batch: Batch) -> None:
    assert torch.equal(batch["a"], batch["index"][:, None].float().expand(-1, WIDTH))


def order_state(epoch: int, consumed: int) -> dict[str, Any]:
    """What a shuffled loader with batches of 4 saves there."""
    return {"seed": 0, "epoch": epoch, "consumed": consumed, "global_batch_size": 4, "shuffle": True}


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batches are made together, or by the loop, however little time they take."""
    monkeypatch.setattr(loading, "HAND_OVER_S", 0.0)
    monkeypatch.setattr(loading, "CALLER_S", 0.0)


def indices(batches: Iterator[Batch] | list[Batch] | Loader) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def test_epoch_has_every_sample_once_in_a_new_order_every_time(dataset: StoreDataset) -> None:
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    epochs = []
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader) == 13
        for batch in batches:
            assert isinstance(batch, Batch)
            assert_holds_its_samples(batch)
        valid = [index for batch in batches for index in batch["index"].tolist()]
        assert sorted(valid) == list(range(NUM_SAMPLES))
        epochs.append(valid)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("shuffle", [True, False, "block"])
def test_loader_gives_the_batches_of_its_order(
    dataset: StoreDataset, monkeypatch: pytest.MonkeyPatch, shuffle: Any
) -> None:
    monkeypatch.setattr("ups_store.read.ranks.MAX_BLOCK_SIZE", 5)
    loader = make_loader(dataset, batch_size=6, shuffle=shuffle, seed=9)
    order = DataOrder([NUM_SAMPLES], global_batch_size=6, shuffle=shuffle, seed=9, block_size=5)
    assert indices(loader) == [step.items.tolist() for step in order.steps()]


def test_last_batch_is_shorter_dropped_or_padded_as_asked_for(dataset: StoreDataset) -> None:
    plain, dropped, padded = (
        list(make_loader(dataset, batch_size=8, shuffle=True, **options))
        for options in ({}, {"drop_last": True}, {"pad_last": True})
    )
    assert [len(batch["index"]) for batch in plain] == [8] * 6 + [2]
    assert indices(dropped) == indices(plain[:-1])
    assert all("valid" not in batch for batch in plain + dropped)
    assert indices(padded[:-1]) == indices(dropped)
    assert padded[-1]["index"].tolist() == indices(plain)[-1] + indices(plain)[0][:6]
    assert padded[-1]["valid"].tolist() == [True] * 2 + [False] * 6
    assert all(batch["valid"].all() for batch in padded[:-1])


def test_loader_without_workers_gives_the_same_batches_in_the_loops_own_thread(dataset: StoreDataset) -> None:
    threads = set()
    fetch = dataset.fetch
    dataset.fetch = lambda *args, **options: (  # type: ignore[method-assign]
        threads.add(threading.current_thread()),
        fetch(*args, **options),
    )[1]
    loader = make_loader(dataset, batch_size=4, shuffle=True, num_workers=0)
    alone = [indices(loader), indices(loader)]
    assert threads == {threading.current_thread()}
    other = make_loader(dataset, batch_size=4, shuffle=True)
    assert alone == [indices(other), indices(other)]
    old = iter(loader)
    next(old)
    list(loader)
    with pytest.raises(StoreClosedError):
        next(old)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collate_fn_and_transform_mean_what_they_mean_in_torch(
    make_store: MakeStore, num_workers: int
) -> None:
    path = make_store({"a": np.arange(20.0).reshape(10, 2)})

    def double(sample: Sample) -> dict[str, Any]:
        return {"twice": 2 * sample["a"], "index": sample["index"]}

    def total(samples: Any) -> tuple[int, float]:
        return len(samples), float(sum(sample["twice"].sum() for sample in samples))

    data = StoreDataset(path, transform=double)
    for options in ({}, {"collate_fn": total}):
        theirs = list(DataLoader(data, batch_size=4, **options))
        ours = list(make_loader(data, batch_size=4, num_workers=num_workers, **options))
        assert str(ours) == str(theirs)
    assert ours[0] == (4, 2 * sum(range(8)))
    rows = list(make_loader(StoreDataset(path), batch_size=4, collate_fn=list, num_workers=num_workers))
    assert [[int(sample["index"]) for sample in batch] for batch in rows] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_batch_transform_is_given_the_step_that_random_numbers_depend_on(dataset: StoreDataset) -> None:
    def noted(batch: Batch, step: Step) -> Batch:
        batch["step"] = torch.tensor([step.epoch, step.number, step.first, step.num_rows])
        return batch

    options: dict[str, Any] = {"batch_size": 16, "batch_transform": noted, "world_size": 2}
    first, second = (make_loader(dataset, rank=rank, **options) for rank in range(2))
    assert [batch["step"].tolist() for batch in first] == [[0, 0, 0, 32], [0, 1, 0, 18]]
    assert [batch["step"].tolist() for batch in second] == [[0, 0, 16, 32], [0, 1, 9, 18]]
    assert next(iter(first))["step"].tolist() == [1, 0, 0, 32]


def test_loop_that_waits_is_asked_whether_to_go_on(
    dataset: StoreDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ups_store.read.prefetch.POLL_S", 0.001)
    may_end, fetch = threading.Event(), dataset.fetch
    dataset.fetch = lambda *args, **options: (  # type: ignore[method-assign]
        may_end.wait(30),
        fetch(*args, **options),
    )[1]
    loader = make_loader(dataset, batch_size=4)
    asked = []

    def ask() -> None:
        asked.append(1)
        if len(asked) == 3:
            may_end.set()
            raise KeyboardInterrupt

    loader.on_wait = ask
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    assert len(asked) == 3


def test_repr_shows_what_there_is(dataset: StoreDataset) -> None:
    loader = make_loader(dataset, batch_size=4, rank=0, world_size=2)
    assert repr(dataset).startswith("<StoreDataset: items: 50 samples; stores: 1 (")
    assert "a (8192,) float32, nu () float64" in repr(dataset)
    assert repr(loader).startswith("<Loader: steps: 7 of 8 samples over all ranks; position: epoch 0, 0")
    assert repr(dataset) in repr(loader)
    for shown in (dataset._repr_html_(), loader._repr_html_()):
        assert shown.startswith("<table><caption>")
        assert "<StoreDataset" not in shown  # escaped


@pytest.mark.parametrize(("before", "after", "shuffle"), [((2, 1), (4, 0), "block"), ((4, 0), (1, 3), True)])
def test_loaders_of_other_ranks_and_workers_go_on_with_the_same_batches(
    dataset: StoreDataset, before: tuple[int, int], after: tuple[int, int], shuffle: Any
) -> None:
    def loaders(world_size: int, num_workers: int) -> list[Loader]:
        options: dict[str, Any] = {"global_batch_size": 8, "pad_last": True, "shuffle": shuffle}
        ranks = range(world_size)
        return [
            make_loader(dataset, rank=rank, world_size=world_size, num_workers=num_workers, **options)
            for rank in ranks
        ]

    (alone,) = loaders(1, 1)
    expected = indices(alone)
    states = []
    for loader in loaders(*before):
        batches = iter(loader)
        next(batches), next(batches)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    resumed = loaders(*after)
    for loader in resumed:
        loader.load_state_dict(states[0])
    steps = zip(*map(indices, resumed), strict=True)
    assert [list(itertools.chain(*step)) for step in steps] == expected[2:]


def test_argument_that_there_is_not_is_named(dataset: StoreDataset) -> None:
    for data in (dataset, dataset.stores[0]):
        with pytest.raises(TypeError, match="'batchsize'"):
            make_loader(data, batch_size=4, batchsize=4)
    with pytest.raises(ConfigError, match="names to be said where the dataset is made"):
        make_loader(dataset, batch_size=4, names=["a"])


def bytes_of(kept: Any) -> bytes:
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.empty(0, dtype=torch.uint8).set_(kept)
    return np.asarray(kept).tobytes()


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor[2:, 5],
        lambda tensor: tensor.numpy()[:, 3],
        lambda tensor: tensor.untyped_storage(),
    ],
    ids=["slice", "numpy", "storage"],
)
def test_whatever_is_kept_of_a_batch_keeps_its_memory(dataset: StoreDataset, keep: Any) -> None:
    kept, copies = [], []
    for batch in make_loader(dataset, batch_size=4, shuffle=True):
        kept.append(keep(batch["a"]))
        copies.append(keep(batch["a"].clone()))
    assert [bytes_of(found) for found in kept] == [bytes_of(expected) for expected in copies]


def test_tensor_saved_for_backward_keeps_its_memory(dataset: StoreDataset) -> None:
    """The batch itself is dropped: only autograd still refers to it while many more are made."""
    batches = iter(make_loader(dataset, batch_size=4, shuffle=True))
    weight = torch.ones(WIDTH, requires_grad=True)
    batch = next(batches)
    expected = batch["a"].sum(0)
    loss = (batch["a"] * weight).sum()
    del batch
    for _ in batches:
        time.sleep(0.002)  # the thread fills every buffer that is free
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("options", [{"shuffle": "block"}, {"drop_last": True, "rank": 1, "world_size": 2}])
def test_resumed_loader_gives_the_same_bits(make_store: MakeStore, options: dict[str, Any]) -> None:
    """Drawn windows, several stores, parameters: every tensor of every batch, across the end of an epoch."""
    rng = np.random.default_rng(0)
    paths = [
        make_store(
            {"fields": rng.random((9, 30, 64, 50)).astype(np.float16), "nu": rng.random(9)},
            name=f"{task}.zarr.zip",
        )
        for task in "ab"
    ]
    data = StoreDataset(paths, window=Window(horizon=2, samples_per_trajectory=3), dtype=torch.float32)
    loader = make_loader(data, batch_size=4, seed=3, **{"shuffle": True, **options})
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    resumed = make_loader(data, batch_size=4, seed=3, **{"shuffle": True, **options})
    resumed.load_state_dict(loader.state_dict())
    expected, found = [*batches, *loader], [*resumed, *resumed]
    assert len(expected) > len(loader)
    for one, other in zip(found, expected, strict=True):
        assert one["task"] == other["task"]
        for tensor, twin in zip(one.tensors(), other.tensors(), strict=True):
            assert tensor.dtype == twin.dtype
            assert torch.equal(tensor, twin)


def test_abandoned_epoch_is_followed_by_the_next(dataset: StoreDataset) -> None:
    loader, other = (
        make_loader(dataset, batch_size=4, shuffle=True),
        make_loader(dataset, batch_size=4, shuffle=True),
    )
    next(iter(loader))
    list(other)
    assert indices(loader) == indices(other)


def test_drawn_windows_follow_the_epoch_of_the_loader(make_store: MakeStore) -> None:
    path = make_store({"fields": np.arange(400.0).reshape(4, 100)}, dims={"fields": ("sample", "time")})
    dataset = StoreDataset(path, window=Window(horizon=1, samples_per_trajectory=5))
    loader = make_loader(dataset, batch_size=20, shuffle=False)
    (first,), (second,) = list(loader), list(loader)
    assert not torch.equal(first["z0"], second["z0"])
    resumed = make_loader(dataset, batch_size=20, shuffle=False)
    resumed.set_epoch(1)
    assert torch.equal(next(iter(resumed))["z0"], second["z0"])


def count_fetches(dataset: StoreDataset) -> list[int]:
    """The epoch of every batch that is made from now on."""
    epochs: list[int] = []
    fetch = dataset.fetch

    def counted(*args: Any, epoch: int, **options: Any) -> Batch:
        epochs.append(epoch)
        return fetch(*args, epoch=epoch, **options)

    dataset.fetch = counted  # type: ignore[method-assign]
    return epochs


def wait_for(made: list[int], num: int) -> None:
    deadline = time.monotonic() + 60
    while len(made) < num and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(made) == num


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(("num_workers", "factor"), [(1, 3), (2, None)])
def test_workers_make_as_many_batches_ahead_as_prefetch_factor_says_and_no_more(
    dataset: StoreDataset, num_workers: int, factor: int | None
) -> None:
    num = 1 + num_workers * (factor or 2)
    made = count_fetches(dataset)
    batches = iter(
        make_loader(dataset, batch_size=4, num_workers=num_workers, prefetch_factor=factor, shuffle=True)
    )
    next(batches)
    wait_for(made, num)


@pytest.mark.usefixtures("one_by_one")
def test_epoch_that_was_expected_keeps_what_was_made_for_it_and_another_drops_it(
    dataset: StoreDataset,
) -> None:
    made = count_fetches(dataset)
    loader = make_loader(dataset, batch_size=4, prefetch_factor=1, shuffle=True)
    order = DataOrder([NUM_SAMPLES], global_batch_size=4, shuffle=True)
    list(loader)
    wait_for(made, 15)
    loader.set_epoch(1)
    assert indices(loader) == [step.items.tolist() for step in order.steps(1)]
    wait_for(made, 28)
    loader.set_epoch(7)
    assert loader_threads() == []
    assert indices(loader) == [step.items.tolist() for step in order.steps(7)]
    wait_for(made, 28 + 15)


def change_seed(loader: Loader) -> None:
    loader.order.seed = 9


def change_epoch(loader: Loader) -> None:
    loader.order.epoch = 6


def load_order(loader: Loader) -> None:
    loader.order.load_state_dict(order_state(3, 0))


@pytest.mark.parametrize("change", [change_seed, change_epoch, load_order])
@pytest.mark.parametrize("taken", [5, 13])
def test_order_that_is_changed_gives_its_own_batches_from_the_next_epoch_on(
    dataset: StoreDataset, change: Callable[[Loader], None], taken: int
) -> None:
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    if taken == 13:
        assert list(batches) == []
    change(loader)
    if taken == 5 and change is not load_order:
        list(batches)
    expected = DataOrder([NUM_SAMPLES], global_batch_size=4, seed=loader.order.seed, shuffle=True)
    epoch = loader.order.epoch + (taken == 5 and change is load_order)  # that one was abandoned
    assert indices(loader) == [step.items.tolist() for step in expected.steps(epoch)]


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("num_epochs", [0, 1])
def test_copy_of_a_loader_gives_the_same_batches(
    dataset: StoreDataset, copy_of: Callable[[Loader], Loader], num_epochs: int
) -> None:
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    for _ in range(num_epochs):
        list(loader)
    other = copy_of(loader)
    assert indices(other) == indices(loader)


@pytest.mark.multi_process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_makes_its_own_batches_of_the_next_epoch(dataset: StoreDataset) -> None:
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    list(loader)
    expected = [
        step.items.tolist() for step in DataOrder([NUM_SAMPLES], global_batch_size=4, shuffle=True).steps(1)
    ]
    child = os.fork()
    if child == 0:
        os._exit(7 if indices(loader) == expected else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert indices(loader) == expected


@pytest.mark.usefixtures("one_by_one")
def test_error_in_the_thread_reaches_the_loop_with_its_place(dataset: StoreDataset) -> None:
    fetch, calls = dataset.fetch, itertools.count()

    def fail_third(*args: Any, **options: Any) -> Batch:
        if next(calls) == 2:
            raise OSError("the disk is gone")
        return fetch(*args, **options)

    dataset.fetch = fail_third  # type: ignore[method-assign]
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    got = []
    with pytest.raises(OSError, match="the disk is gone") as caught:
        got.extend(loader)
    assert "fail_third" in [entry.name for entry in caught.traceback]
    del caught
    assert len(list(itertools.islice(loader, 3))) == 3  # and it goes on with the next epoch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_in_a_group_comes_where_its_batch_would_have(dataset: StoreDataset, num_workers: int) -> None:
    """The batches before it are right, and those after it aren't made."""
    steps = list(DataOrder([NUM_SAMPLES], global_batch_size=4, shuffle=True).steps())
    fetch, bad = dataset.fetch, steps[9].items[2]

    def fail_one(number: int, items: Any, **options: Any) -> Batch:
        if bad in items:
            raise OSError("the disk is gone")
        return fetch(number, items, **options)

    dataset.fetch = fail_one  # type: ignore[method-assign]
    loader = make_loader(dataset, batch_size=4, shuffle=True, num_workers=num_workers)
    got = []
    with pytest.raises(OSError, match="the disk is gone"):
        got.extend(loader)
    assert indices(got) == [step.items.tolist() for step in steps[:9]]
    assert loader.state_dict() == order_state(0, 9 * 4)


@pytest.mark.parametrize("options", [{}, {"pad_last": True}])
def test_small_batches_are_made_together_and_are_the_same(
    dataset: StoreDataset, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    sizes: list[int] = []
    fetch = dataset.fetch

    def spy(number: int, items: Any, **options: Any) -> Batch:
        sizes.append(len(items))
        return fetch(number, items, **options)

    dataset.fetch = spy  # type: ignore[method-assign]
    monkeypatch.setattr(loading, "HAND_OVER_S", 60.0)
    together = list(make_loader(dataset, batch_size=4, shuffle=True, num_workers=0, **options))
    assert max(sizes) > 8
    monkeypatch.setattr(loading, "HAND_OVER_S", 0.0)
    alone = list(make_loader(dataset, batch_size=4, shuffle=True, num_workers=0, **options))
    assert len(together) == len(alone)
    for ours, expected in zip(together, alone, strict=True):
        assert list(ours) == list(expected)
        for key, value in expected.items():
            assert value == ours[key] if isinstance(value, str) else torch.equal(value, ours[key])


def test_file_that_is_cut_during_an_epoch_is_an_error(dataset: StoreDataset) -> None:
    # By the caller: a worker that copies from the mapping at that moment would end the process with SIGBUS.
    batches = iter(make_loader(dataset, batch_size=4, num_workers=0, shuffle=True))
    next(batches)
    os.truncate(dataset.sources[0].store.path, 4096)
    with pytest.raises(TruncatedError):
        list(batches)


def test_loop_that_breaks_or_fails_leaves_no_thread(dataset: StoreDataset) -> None:
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    for _ in loader:
        assert loader_threads() != []
        break
    assert loader_threads() == []

    def train() -> None:
        for _ in loader:
            raise RuntimeError("loss is NaN")

    with pytest.raises(RuntimeError, match="loss is NaN"):
        train()
    assert loader_threads() == []


@pytest.mark.multi_process
def test_program_keeps_its_number_of_torch_threads_and_ends_amid_an_epoch_at_once(
    dataset: StoreDataset,
) -> None:
    """In a new process: there the thread asks before anybody else, which is when torch mixes them up."""
    program = (
        "import sys, threading, torch; from ups_store.torch import StoreDataset, make_loader\n"
        "loader = make_loader(StoreDataset(sys.argv[1]), batch_size=2, shuffle=True)\n"
        "list(loader)\n"
        "numbers = [torch.get_num_threads()]\n"
        "other = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))\n"
        "other.start(); other.join()\n"
        "batches = iter(loader); print(*numbers, len(next(batches)['index']))"
    )
    path, environment = str(dataset.sources[0].store.path), {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", program, path]
    ended = subprocess.run(command, capture_output=True, timeout=120, text=True, env=environment)
    num = min(2, os.cpu_count() or 1)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{num} {num} 2\n", "")


def test_report_counts_what_was_moved_and_waited_for(dataset: StoreDataset) -> None:
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    assert loader.report().num_steps == 0
    for number, _ in enumerate(loader):
        time.sleep(0.005)
        assert loader.report().num_steps == number + 1
    report = loader.report()
    assert (report.epoch, report.num_steps, report.num_samples) == (0, 13, 50)
    assert report.nbytes == 50 * (WIDTH * 4 + 8 + 8)  # a, nu, index
    assert report.seconds >= 13 * 0.005
    assert 0 < report.waited_s < report.seconds
    assert 0 < report.assembled_s < report.seconds
    assert report.samples_per_s == pytest.approx(50 / report.seconds)
    assert report.resident == dataset.sources[0].store.residency()
    assert str(report).startswith("epoch 0: 13 steps, 50 samples, 1.6 MB in ")
    assert "\n" not in str(report)


@pytest.mark.parametrize(
    ("waited_s", "faults", "bound", "share"),
    [(0.4, 0, "model", "4.0%"), (5.0, 0, "cpu", "50.0%"), (5.0, 900, "storage", "50.0%")],
)
def test_report_names_what_held_the_loop_up(waited_s: float, faults: int, bound: str, share: str) -> None:
    report = EpochReport(
        epoch=0,
        num_steps=10,
        num_samples=640,
        nbytes=10**6,
        seconds=10.0,
        waited_s=waited_s,
        assembled_s=6.0,
        major_faults=faults,
        resident=0.87,
    )
    assert report.bound == bound
    assert report.wait_share == pytest.approx(waited_s / 10)
    assert str(report) == (
        "epoch 0: 10 steps, 640 samples, 1.0 MB in 10.00 s (64 samples/s); "
        f"waited {share} of it, {bound}-bound; {faults} major page faults, 87% resident"
    )


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"rank": 2, "world_size": 2}, "rank", "0 <= rank < 2"),
        ({"seed": 1.5}, "seed", "a whole number"),
        ({"batch_size": 0}, "batch_size", "at least 1"),
        ({"batch_size": None, "global_batch_size": 9, "world_size": 2}, "batch_size", "a multiple of the 2"),
        ({"global_batch_size": 8}, "batch_size", "or global_batch_size, found both"),
        ({"drop_last": True, "pad_last": True}, "pad_last", "False beside drop_last"),
        ({"batch_size": 1, "world_size": 7}, "drop_last", "at least 7 items"),
        ({"batch_size": 51, "drop_last": True}, "batch_size", "at most 50, the items"),
        ({"prefetch_factor": 0}, "prefetch_factor", "at least 1"),
        ({"prefetch_factor": 2, "num_workers": 0}, "prefetch_factor", "None"),
        ({"num_workers": -1}, "num_workers", "at least 0"),
        ({"num_workers": 0, "timeout": 1}, "num_workers", "at least 1 with `timeout`"),
        ({"shuffle": "all"}, "shuffle", "'block' or 'auto'"),
        ({"weights": [1, 1]}, "weights", "1 positive numbers"),
        ({"device": "meta"}, "device", "cpu, or cuda where"),
        ({"dataset": 5}, "dataset", "a StoreDataset, or a store"),
    ],
)
def test_loader_refuses_arguments_out_of_range(
    dataset: StoreDataset, options: dict[str, Any], kind: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loader(**{"dataset": dataset, "batch_size": 8, **options})
    assert caught.value.kind == kind
    assert expected in str(caught.value)


@pytest.mark.gpu
def test_batches_on_the_device_are_those_in_memory(dataset: StoreDataset) -> None:
    here = make_loader(dataset, batch_size=4, shuffle=True)
    there = make_loader(dataset, batch_size=4, device="cuda", shuffle=True)
    for expected, found in zip(here, there, strict=True):
        assert found["a"].is_cuda
        scratch = torch.zeros_like(found["a"])  # memory that a careless loader would have freed
        scratch.copy_(found["a"])
        assert torch.equal(scratch.cpu(), expected["a"])
        assert torch.equal(found["nu"].cpu(), expected["nu"])


@pytest.mark.gpu
def test_copy_of_a_loader_to_the_device_gives_the_same_batches(dataset: StoreDataset) -> None:
    loader = make_loader(dataset, batch_size=4, device="cuda", shuffle=True)
    list(loader)
    assert [batch["index"].tolist() for batch in copy.deepcopy(loader)] == [
        batch["index"].tolist() for batch in loader
    ]


def test_set_epoch_chooses_the_order(dataset: StoreDataset) -> None:
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    epochs = [indices(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert indices(loader) == epochs[1]


def test_store_that_is_replaced_during_an_epoch_gives_the_old_data(
    dataset: StoreDataset, make_store: MakeStore
) -> None:
    batches = iter(make_loader(dataset, batch_size=4, shuffle=True))
    first = next(batches)
    make_store({"a": np.zeros((2, 3))}, name="new.zarr.zip").rename(dataset.sources[0].store.path)
    for batch in itertools.chain([first], batches):
        assert_holds_its_samples(batch)


def test_closed_loader_ends_its_iterator_with_an_error(dataset: StoreDataset) -> None:
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    batches = iter(loader)
    next(batches)
    loader.close()
    loader.close()
    assert loader_threads() == []
    with pytest.raises(StoreClosedError):
        next(batches)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_refused(dataset: StoreDataset) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loader(dataset, batch_size=8, device="cuda", shuffle=True)
    assert caught.value.kind == "device"


def test_prefetch_that_is_dropped_ends_its_threads_also_by_one_of_them() -> None:
    made: Any = Prefetch(itertools.count(), str, depth=2, num_threads=3)
    made.get()
    del made
    assert loader_threads() == []
    holder: list[Any] = []
    go = threading.Event()

    def drop(job: int) -> int:
        go.wait(30)
        holder.clear()
        return job

    holder.append(Prefetch(itertools.count(), drop, depth=2, num_threads=2))
    threads = loader_threads()
    caller = threading.Thread(target=lambda held: held[0].get(), args=(list(holder),))
    caller.start()
    go.set()
    caller.join(30)
    del caller
    for thread in threads:
        thread.join(30)
    assert loader_threads() == []
