"""Batches that don't come: `timeout=` of loaders and datasets names the store, its samples and what hangs.

No test waits for time to pass: the clock is set forward once the read hangs and the loop waits for it.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_stores import MakeStore
from torch.utils.data import DataLoader

from ups_store.errors import BatchTimeoutError, ConfigError
from ups_store.read import loader as loading
from ups_store.read import prefetch
from ups_store.read.items import StoreSource
from ups_store.read.order import DataOrder
from ups_store.torch import (
    Loader,
    MixedDataset,
    StoreDataset,
    make_loader,
)

N, T = 12, 6
LONG_S = 600.0


class Hang:
    """A read that doesn't return until the test is over, and the clock that a loader looks at."""

    def __init__(self) -> None:
        self.reached, self._released, self._now = threading.Event(), threading.Event(), 0.0

    def wait(self) -> None:
        """Hang."""
        self.reached.set()
        self._released.wait(LONG_S)

    def release(self) -> None:
        """The server is back."""
        self._released.set()

    def monotonic(self) -> float:
        return self._now

    def pass_time(self) -> None:
        """For `on_wait`: the loop waits in vain."""
        if self.reached.is_set():
            self._now += 2 * LONG_S


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang()
    clock = SimpleNamespace(monotonic=hang.monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr(prefetch, "time", clock)
    monkeypatch.setattr(prefetch, "POLL_S", 0.01)
    monkeypatch.setattr(loading, "HAND_OVER_S", 0.0)  # no batches are made together
    yield hang
    hang.release()  # so that no thread is left


@pytest.fixture
def path(make_store: MakeStore) -> Path:
    values = {"fields": np.arange(N * T, dtype=np.float32).reshape(N, T, 1)}
    return make_store(values, dims={"fields": ("sample", "time", "x")})


def hang_at(monkeypatch: pytest.MonkeyPatch, item: int, hang: Hang) -> None:
    """Reading a batch with this item hangs, as a page fault of a dead NFS server does."""
    plain = StoreSource.fetch

    def unreachable_server(self: StoreSource, items: Any, **options: Any) -> Any:
        if item in items:
            hang.wait()
        return plain(self, items, **options)

    monkeypatch.setattr(StoreSource, "fetch", unreachable_server)


def late_batch(loader: Loader, hang: Hang, *, after: int = 0) -> BatchTimeoutError:
    """The error of the batch that comes after so many others."""
    batches = iter(loader)
    for _ in range(after):
        next(batches)
    loader.on_wait = hang.pass_time
    with pytest.raises(BatchTimeoutError) as caught:
        next(batches)
    loader.on_wait = None
    return caught.value


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader_names_store_samples_and_stack_of_a_batch_that_does_not_come(
    path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang, num_workers: int
) -> None:
    hang_at(monkeypatch, 6, hang)
    loader = make_loader(path, batch_size=4, num_workers=num_workers, timeout=LONG_S)
    error = late_batch(loader, hang, after=1)
    assert (error.path, error.sample, error.samples) == (str(path), 4, (4, 5, 6, 7))
    assert (error.kind, error.exit_code, isinstance(error, TimeoutError)) == ("batch_timeout", 4, True)
    assert f"{path}, sample 4: a batch hasn't come for 600 s: found samples 4, 5, 6, 7, in " in str(error)
    assert ", in unreachable_server\n" in error.stack
    assert error.__notes__ == [f"What makes the batch:\n{error.stack}"]
    assert pickle.loads(pickle.dumps(error)).samples == (4, 5, 6, 7)


def test_loader_goes_on_after_a_batch_that_did_not_come(
    path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    hang_at(monkeypatch, 6, hang)
    loader = make_loader(path, batch_size=4, timeout=LONG_S)
    late_batch(loader, hang, after=1)
    hang.release()
    loader.load_state_dict(loader.state_dict())
    assert [batch["index"].tolist() for batch in loader] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_loader_names_the_first_store_of_a_mixed_batch(
    path: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    values = {"fields": np.zeros((N, T, 1), np.float32)}
    other = make_store(values, dims={"fields": ("sample", "time", "x")}, name="other.zarr.zip")
    hang_at(monkeypatch, 1, hang)
    error = late_batch(make_loader(MixedDataset([path, other]), batch_size=4, timeout=LONG_S), hang)
    assert error.path in (str(path), str(other))
    assert set(error.samples) <= {0, 1, 2, 3}
    assert 1 in error.samples


def test_loader_whose_order_hangs_says_that_nothing_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    def steps(self: DataOrder) -> Iterator[Any]:
        hang.wait()
        yield from ()

    monkeypatch.setattr(DataOrder, "steps", steps)
    error = late_batch(make_loader(path, batch_size=4, timeout=1), hang)
    assert (error.path, error.sample, error.samples, error.stack) == (None, None, (), "")
    assert "a batch hasn't come for 1 s: found nothing is being read" in str(error)


@pytest.mark.parametrize("timeout", [0, -1, "1", True, float("nan"), float("inf")])
def test_timeout_that_is_no_time_is_refused(path: Path, timeout: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loader(path, batch_size=4, timeout=timeout)
    assert caught.value.kind == "timeout"
    with pytest.raises(ConfigError):
        StoreDataset(path, timeout=timeout)


@pytest.fixture
def without_time(monkeypatch: pytest.MonkeyPatch, hang: Hang) -> None:
    """A dataset waits for its thread until that hangs, and no longer."""
    hang.monotonic = lambda: 2 * LONG_S * hang.reached.is_set()  # type: ignore[method-assign]
    monkeypatch.setattr(prefetch, "time", hang)


def test_dataset_gives_what_comes_in_time(path: Path) -> None:
    data = pickle.loads(pickle.dumps(StoreDataset(path, timeout=LONG_S)))
    assert data[1]["index"] == 1
    assert data[2:5]["index"].tolist() == [2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        StoreDataset(path, timeout=LONG_S, transform=lambda sample: 1 // 0)[0]


@pytest.mark.usefixtures("without_time")
def test_dataset_names_store_samples_and_stack_of_what_does_not_come(
    path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    hang_at(monkeypatch, 10, hang)
    data = StoreDataset([path, path], timeout=LONG_S)
    for index, samples in ((10, (10,)), (slice(9, 16), (9, 10, 11))):  # those in the first store
        hang.reached.clear()
        with pytest.raises(BatchTimeoutError) as caught:
            data[index]
        assert (caught.value.path, caught.value.samples) == (str(path), samples)
    assert ", in unreachable_server\n" in caught.value.stack


@pytest.mark.multi_process
@pytest.mark.usefixtures("without_time")
def test_worker_of_a_dataloader_hands_the_error_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    """Without it the loop waits for ever, or has torch's own "DataLoader timed out", which names nothing."""
    hang_at(monkeypatch, 2, hang)
    data = StoreDataset(path, timeout=LONG_S)
    with pytest.raises(BatchTimeoutError, match="unreachable_server") as caught:
        next(iter(DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")))
    assert f"{path}, sample 0: a batch hasn't come for 600 s" in str(caught.value)


@pytest.mark.multi_process
def test_process_ends_though_a_read_never_does(path: Path) -> None:
    """A thread that hangs isn't waited for, neither by the error nor at the end of the program."""
    program = """
import sys, threading
from ups_store import make_loader
from ups_store.read.items import StoreSource
StoreSource.fetch = lambda *args, **options: threading.Event().wait()
loader = make_loader(sys.argv[1], batch_size=4, timeout=0.01)
try:
    next(iter(loader))
except TimeoutError as error:
    print(error.kind, flush=True)
loader.close()
"""
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "batch_timeout\n"), done.stderr
