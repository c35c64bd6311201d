"""Random batches: `gather` over one memcpy of as many contiguous bytes, one thread, reused output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store
from benchmarks.inputs import NAME, Folder, Memory, check, make_store, values_of
from benchmarks.measure import TIME, Comparison, Timed, compare, timed, tracked
from benchmarks.scale import MIB, SCALE

Batch = npt.NDArray[np.int64]

BATCH = 64
NUM_BATCHES = 256


class _Random:
    """A store, batches of random sample numbers, and memory of the same size."""

    timeout = 300

    def prepare(self, sample_bytes: int, *, has_own_output: bool) -> None:
        self.folder = Folder()
        num_samples = SCALE.store_mib * MIB // sample_bytes
        path = self.folder.path / "store.zarr.zip"
        self.store = make_store(path, num_samples=num_samples, sample_bytes=sample_bytes)
        self.memory = Memory(num_samples * sample_bytes, BATCH * sample_bytes)
        self.batches = np.random.default_rng(0).integers(0, num_samples, (NUM_BATCHES, BATCH))
        own = self.store.gather(self.batches[0], [NAME])
        self.out = own if has_own_output else {NAME: np.ones(own[NAME].shape, np.float32)}
        self.gather(1)
        check(self.out[NAME], values_of(self.batches[1], sample_bytes))

    def clean(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def gather(self, i: int) -> None:
        self.store.gather(self.batches[i % NUM_BATCHES], [NAME], out=self.out)

    def over_memcpy(self) -> float:
        pairs, nbytes = SCALE.read_pairs, self.out[NAME].nbytes
        self.comparison = compare(timed(self.gather), timed(self.memory.copy), pairs=pairs, nbytes=nbytes)
        return self.comparison.time_ratio


class Gather(_Random):
    params = ((102_400, 4096), ("own", "foreign"))
    param_names = ("sample_bytes", "output")

    def setup(self, sample_bytes: int, output: str) -> None:
        self.prepare(sample_bytes, has_own_output=output == "own")

    def teardown(self, sample_bytes: int, output: str) -> None:
        self.clean()

    def time_gather(self, sample_bytes: int, output: str) -> None:
        self.gather(0)

    @tracked(f"gather {BATCH} random samples, over memcpy", TIME, at_most={102_400: 1.25})
    def track_over_memcpy(self, sample_bytes: int, output: str) -> float:
        return self.over_memcpy()


class GatherMethods(_Random):
    """The methods of `gather`, the rejected one beside them, and memcpy, all in turns."""

    params = SCALE.method_sizes
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.prepare(sample_bytes, has_own_output=True)
        self.foreign = {NAME: np.ones(self.out[NAME].shape, np.float32)}
        self.source, self.target = (_items(values) for values in (self.store[NAME], self.foreign[NAME]))
        self.index(self.batches[1])
        check(self.foreign[NAME], values_of(self.batches[1], sample_bytes))

    def teardown(self, sample_bytes: int) -> None:
        self.clean()

    def take(self, samples: Batch) -> None:
        self.store.gather(samples, [NAME], out=self.out)

    def loop(self, samples: Batch) -> None:
        self.store.gather(samples, [NAME], out=self.foreign)

    def index(self, samples: Batch) -> None:
        self.target[...] = self.source[samples]

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """By method, each over the memcpy of the same round."""
        batches = itertools.cycle(self.batches)
        methods = {"take": self.take, "loop": self.loop, "index": self.index}
        calls = {name: _timed_over(method, batches) for name, method in methods.items()}
        calls["memcpy"] = timed(self.memory.copy)
        rounds = [[call(i) for call in calls.values()] for i in range(SCALE.read_pairs)]
        seconds = dict(zip(calls, zip(*rounds, strict=True), strict=True))
        nbytes = self.out[NAME].nbytes
        return {name: Comparison.of(seconds[name], seconds["memcpy"], nbytes=nbytes) for name in methods}

    @tracked("gather into our own output (one take of slots), over memcpy", TIME)
    def track_take(self, sample_bytes: int) -> float:
        self.comparison = self.comparisons["take"]
        return self.comparison.time_ratio

    @tracked("rejected: bare NumPy indexing of samples as items, over memcpy", TIME)
    def track_index(self, sample_bytes: int) -> float:
        self.comparison = self.comparisons["index"]
        return self.comparison.time_ratio

    @tracked("gather into foreign output (loop of copies), over memcpy", TIME)
    def track_loop(self, sample_bytes: int) -> float:
        self.comparison = self.comparisons["loop"]
        return self.comparison.time_ratio


def _timed_over(method: Callable[[Batch], None], batches: Iterator[Batch]) -> Timed:
    return timed(lambda i: method(next(batches)))


def _items(values: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """Samples as items of raw bytes, shape (N,), no copy."""
    return values.view(f"V{values[0].nbytes}")[:, 0]


class GatherChecked(_Random):
    """`open(verify="touch")` over a store that checks nothing; each sample is checked at its first use."""

    params = (102_400, 4096)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.prepare(sample_bytes, has_own_output=True)
        self.checked = ups_store.open(self.store.path, verify="touch")
        order = np.random.default_rng(2).permutation(len(self.store))
        self.distinct = [order[first : first + BATCH] for first in range(0, len(order) - BATCH, BATCH)]

    def teardown(self, sample_bytes: int) -> None:
        self.checked.close()
        self.clean()

    def measure(self) -> Comparison:
        pairs, nbytes = min(SCALE.read_pairs, len(self.distinct) - 1), self.out[NAME].nbytes
        return compare(timed(self.gather_checked), timed(self.gather_distinct), pairs=pairs, nbytes=nbytes)

    def gather_checked(self, i: int) -> None:
        self.checked.gather(self.distinct[i], [NAME], out=self.out)

    def gather_distinct(self, i: int) -> None:
        self.store.gather(self.distinct[i], [NAME], out=self.out)

    @cached_property
    def comparisons(self) -> tuple[Comparison, Comparison]:
        """First use of every sample, then the second."""
        return self.measure(), self.measure()

    @tracked('gather with verify="touch", first use, over without', TIME)
    def track_first_use(self, sample_bytes: int) -> float:
        self.comparison = self.comparisons[0]
        return self.comparison.time_ratio

    @tracked('gather with verify="touch", second use, over without', TIME)
    def track_second_use(self, sample_bytes: int) -> float:
        self.comparison = self.comparisons[1]
        return self.comparison.time_ratio
