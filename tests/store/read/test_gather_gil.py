"""A large gather lets go of the GIL: a training loop in another thread goes on meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from small_stores import build

import ups_store
from ups_store import Store

MIB = 1 << 20
NUM_SAMPLES, BATCH = 16, 64
NUM_TRIES = 50  # calls, of which one is enough: the machine may be busy with something else
MIN_COUNT = 10  # more than the system calls of a gather let through, which let go of the GIL too


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Samples of 1 MiB."""
    fields = np.arange(NUM_SAMPLES * MIB // 4, dtype=np.float32).reshape(NUM_SAMPLES, -1)
    path: Path = tmp_path_factory.mktemp("gil") / "a.zarr.zip"
    with ups_store.open(build(path, {"fields": fields}, dims={})) as opened:
        yield opened


@pytest.fixture
def count_during() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Counts how often another thread has its turn during a call that isn't interrupted for it.

    Python makes a thread that holds the GIL give it up every 5 ms; here it doesn't, so that what is counted
    is what the call lets through by itself.
    """
    interval_s, count, stopped = sys.getswitchinterval(), 0, False

    def run() -> None:
        nonlocal count
        while not stopped:
            count += 1
            time.sleep(50e-6)  # gives the GIL back

    def during(call: Callable[[], object]) -> int:
        before = count
        call()
        return count - before

    thread = threading.Thread(target=run)
    sys.setswitchinterval(100.0)
    thread.start()
    try:
        yield during
    finally:
        stopped = True
        thread.join()
        sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("output", ["own", "foreign"])
def test_another_thread_goes_on_during_a_large_gather(
    store: Store, count_during: Callable[[Callable[[], object]], int], output: str
) -> None:
    indices = np.random.default_rng(0).integers(0, NUM_SAMPLES, BATCH)
    own = store.gather(indices)
    out = own if output == "own" else {"fields": np.ones(own["fields"].shape, np.float32)}
    counts = [count_during(lambda: store.gather(indices, out=out)) for _ in range(NUM_TRIES)]
    assert max(counts) >= MIN_COUNT, counts
