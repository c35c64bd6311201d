"""Random batches: `gather` beside the best that memory can do; reused output, one thread by default."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store
from benchmarks.harness.inputs import NAME, Bench, Memory, check, make_store, save_values, values_of
from benchmarks.harness.measure import TIME, Comparison, compare, timed, tracked
from benchmarks.harness.scale import MIB, SCALE
from ups_store.format.metadata import dtype_of
from ups_store.system import runs

Batch = npt.NDArray[np.int64]

BATCH = 64
NUM_BATCHES = 256


def compare_warm(
    ours: Callable[[int], None], reference: Callable[[int], None], *, pairs: int, nbytes: int
) -> Comparison:
    """Compare readers of two copies: an L3 of hundreds of MiB would hold the one that was made last."""
    return compare(timed(ours), timed(reference), pairs=pairs, nbytes=nbytes, num_unmeasured=NUM_BATCHES)


class _Random(Bench):
    """A store, batches of random sample numbers, and memory of the same size."""

    def prepare(self, sample_bytes: int) -> None:
        num_samples = SCALE.store_mib * MIB // sample_bytes
        path = self.folder.path / "store.zarr.zip"
        self.store = make_store(path, num_samples=num_samples, sample_bytes=sample_bytes)
        self.memory = Memory(num_samples * sample_bytes, BATCH * sample_bytes)
        self.batches = np.random.default_rng(0).integers(0, num_samples, (NUM_BATCHES, BATCH))
        self.out = self.store.gather(self.batches[0], [NAME])
        self.gather(1)
        check(self.out[NAME], values_of(self.batches[1], sample_bytes))

    def gather(self, i: int) -> None:
        self.store.gather(self.batches[i % NUM_BATCHES], [NAME], out=self.out)

    def over_memcpy(self) -> Comparison:
        pairs, nbytes = SCALE.read_pairs, self.out[NAME].nbytes
        return compare_warm(self.gather, self.memory.copy, pairs=pairs, nbytes=nbytes)


class Gather(_Random):
    params = (102_400, 4096)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.prepare(sample_bytes)

    def time_gather(self, sample_bytes: int) -> None:
        self.gather(0)

    @tracked(f"gather {BATCH} random samples, over memcpy", TIME, at_most={102_400: 1.25})
    def track_over_memcpy(self, sample_bytes: int) -> Comparison:
        return self.over_memcpy()


class GatherSmall(_Random):
    """Beside the fastest that torch offers for a plain file: `index_select` over a memory map."""

    sample_bytes = 4096

    def setup(self) -> None:
        import torch

        self.prepare(self.sample_bytes)
        self.torch, self.num_threads = torch, torch.get_num_threads()
        torch.set_num_threads(1)
        path, values = self.folder.path / "plain.bin", self.store[NAME]
        np.ascontiguousarray(values).tofile(path)
        self.plain = torch.from_numpy(np.memmap(path, np.float32, "r+", shape=values.shape))
        self.plain_out = torch.ones(self.out[NAME].shape)
        self.select(1)
        check(self.plain_out.numpy(), values_of(self.batches[1], self.sample_bytes))

    def teardown(self) -> None:
        self.torch.set_num_threads(self.num_threads)
        super().teardown()

    def select(self, i: int) -> None:
        index = self.torch.from_numpy(self.batches[i % NUM_BATCHES])
        self.torch.index_select(self.plain, 0, index, out=self.plain_out)

    @tracked(f"gather {BATCH} random samples of 4 KB, over np.memmap and index_select", TIME, at_most=1.05)
    def track_over_index_select(self) -> Comparison:
        pairs, nbytes = SCALE.read_pairs, self.out[NAME].nbytes
        other = lambda i: self.select(i + 1)  # noqa: E731 - other samples, which aren't in the cache
        return compare_warm(self.gather, other, pairs=pairs, nbytes=nbytes)


class GatherLarge(Bench):
    """Samples that are large beside every cache."""

    params = (13_000_000,)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        path = self.folder.path / "store.zarr.zip"
        self.store = make_store(path, num_samples=BATCH, sample_bytes=sample_bytes)
        rng = np.random.default_rng(0)
        self.batches = [rng.permutation(BATCH) for _ in range(16)]
        self.out = self.store.gather(self.batches[0])
        check(self.out[NAME][:2], values_of(self.batches[0][:2], sample_bytes))
        self.memory = np.ones((BATCH, sample_bytes), np.uint8)
        self.target = np.ones_like(self.memory)

    def gather(self, i: int, num_threads: int = 1) -> None:
        self.store.gather(self.batches[i % 16], out=self.out, num_threads=num_threads)

    def copy_one_by_one(self, i: int) -> None:
        for row, sample in zip(self.target, self.batches[(i + 1) % 16].tolist(), strict=True):
            np.copyto(row, self.memory[sample])

    def compare(self, ours: Callable[[int], None], reference: Callable[[int], None]) -> Comparison:
        pairs, nbytes = SCALE.write_pairs, self.memory.nbytes
        return compare(timed(ours), timed(reference), pairs=pairs, nbytes=nbytes)

    @tracked(f"gather {BATCH} random samples, over the same copies one by one", TIME, at_most=1.1)
    def track_over_copies(self, sample_bytes: int) -> Comparison:
        return self.compare(self.gather, self.copy_one_by_one)

    @tracked(f"gather {BATCH} random samples with 2 threads, over one memcpy", TIME, at_most=1.0)
    def track_threads_over_memcpy(self, sample_bytes: int) -> Comparison:
        return self.compare(lambda i: self.gather(i, 2), lambda i: np.copyto(self.target, self.memory))


class GatherWindows(Bench):
    """Two time steps of each sample, over one memcpy of as many bytes."""

    params = (1024, 32_768)
    param_names = ("bytes a time step",)
    num_steps = 20

    def setup(self, step_bytes: int) -> None:
        num_samples = SCALE.store_mib * MIB // (self.num_steps * step_bytes)
        shape = (num_samples, self.num_steps, step_bytes // 4)
        values = values_of(np.arange(num_samples), self.num_steps * step_bytes).reshape(shape)
        self.store = save_values(self.folder.path / "store.zarr.zip", values, dims=("sample", "time", "x"))
        check(self.store[NAME], values)
        rng = np.random.default_rng(0)
        self.batches = rng.integers(0, num_samples, (NUM_BATCHES, BATCH))
        self.starts = rng.integers(0, self.num_steps - 1, (NUM_BATCHES, BATCH))
        self.out = {NAME: np.ones((BATCH, 2, step_bytes // 4), np.float32)}
        self.gather(1)
        check(self.out[NAME], values[self.batches[1][:, None], self.starts[1][:, None] + np.arange(2)])
        self.memory = Memory(values.nbytes, self.out[NAME].nbytes)
        self.firsts = (self.batches * self.num_steps + self.starts) * step_bytes
        shape = (values.nbytes - 2 * step_bytes + 1,)
        self.windows = np.ndarray(shape, f"V{2 * step_bytes}", values, 0, (1,))  # by their first byte

    def gather(self, i: int) -> None:
        i %= NUM_BATCHES
        self.store.gather(self.batches[i], start=self.starts[i], length=2, out=self.out)

    def index(self, i: int) -> None:
        self.windows[self.firsts[i % NUM_BATCHES]]

    @tracked(f"gather {BATCH} windows of 2 time steps, over memcpy", TIME, at_most={1024: 3.0, 32_768: 1.7})
    def track_over_memcpy(self, step_bytes: int) -> Comparison:
        return self.over_memcpy(self.gather)

    @tracked(f"bare NumPy indexing of {BATCH} windows, nothing checked or computed, over memcpy", TIME)
    def track_index_over_memcpy(self, step_bytes: int) -> Comparison:
        return self.over_memcpy(self.index)

    def over_memcpy(self, ours: Callable[[int], None]) -> Comparison:
        pairs, nbytes = SCALE.read_pairs, self.out[NAME].nbytes
        return compare_warm(ours, self.memory.copy, pairs=pairs, nbytes=nbytes)


class GatherConverted(Bench):
    """Half precision gathered as float32, over gathering it as it is and converting the batch."""

    params = ("float16", "bfloat16")
    param_names = ("dtype",)
    num_values = 25_600

    def setup(self, dtype: str) -> None:
        num_samples = SCALE.store_mib * MIB // (2 * self.num_values)
        shape = (num_samples, self.num_values)
        values = np.resize(np.linspace(-1, 1, 65_521), shape).astype(dtype_of(dtype))
        self.store = save_values(self.folder.path / "store.zarr.zip", values)
        self.batches = np.random.default_rng(0).integers(0, num_samples, (NUM_BATCHES, BATCH))
        self.out = {NAME: np.ones((BATCH, self.num_values), np.float32)}
        self.halves = self.store.gather(self.batches[0])
        self.gather(1)
        check(self.out[NAME], values[self.batches[1]].astype(np.float32))

    def gather(self, i: int) -> None:
        self.store.gather(self.batches[i % NUM_BATCHES], out=self.out)

    def gather_then_convert(self, i: int) -> None:
        self.store.gather(self.batches[(i + 1) % NUM_BATCHES], out=self.halves)
        np.copyto(self.out[NAME], self.halves[NAME])

    @tracked(f"gather {BATCH} random samples as float32, over gather, then NumPy's conversion", TIME)
    def track_over_conversion(self, dtype: str) -> Comparison:
        ours, reference = timed(self.gather), timed(self.gather_then_convert)
        pairs, nbytes = max(5, SCALE.read_pairs // 10), self.out[NAME].nbytes
        return compare(ours, reference, pairs=pairs, nbytes=nbytes)


class GatherMethods(_Random):
    """`gather` with and without compiled code, rejected methods beside it, and memcpy, in turns."""

    params = SCALE.method_sizes
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.prepare(sample_bytes)
        values = np.ones(self.out[NAME].shape, np.float32)
        self.source, self.target = (_items(values) for values in (self.store[NAME], values))
        self.rows = (self.store[NAME].view(np.uint8), values.reshape(-1).view(np.uint8).data)
        for method in (self.index, self.loop):
            method(self.batches[1])
            check(values, values_of(self.batches[1], sample_bytes))
        self.numpy(self.batches[1])
        check(self.out[NAME], values_of(self.batches[1], sample_bytes))

    def usual(self, samples: Batch) -> None:
        self.store.gather(samples, [NAME], out=self.out)

    def numpy(self, samples: Batch) -> None:
        compiled, runs.compiled = runs.compiled, None
        try:
            self.store.gather(samples, [NAME], out=self.out)
        finally:
            runs.compiled = compiled

    def index(self, samples: Batch) -> None:
        self.target[...] = self.source[samples]

    def loop(self, samples: Batch) -> None:
        rows, target = self.rows
        nbytes = rows.shape[1]
        for first, sample in zip(range(0, len(target), nbytes), samples.tolist(), strict=True):
            target[first : first + nbytes] = rows[sample].data

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """By method, each over the memcpy of the same round."""
        batches = itertools.cycle(self.batches)
        methods = {"usual": self.usual, "numpy": self.numpy, "index": self.index, "loop": self.loop}
        calls = {name: timed(lambda i, m=method: m(next(batches))) for name, method in methods.items()}
        calls["memcpy"] = timed(self.memory.copy)
        rounds = [[call(i) for call in calls.values()] for i in range(SCALE.read_pairs)]
        seconds = dict(zip(calls, zip(*rounds, strict=True), strict=True))
        nbytes = self.out[NAME].nbytes
        return {name: Comparison.of(seconds[name], seconds["memcpy"], nbytes=nbytes) for name in methods}

    @tracked("gather, over memcpy", TIME)
    def track_usual(self, sample_bytes: int) -> Comparison:
        return self.comparisons["usual"]

    @tracked("gather where there was no C compiler (items below 8 KiB, else views), over memcpy", TIME)
    def track_numpy(self, sample_bytes: int) -> Comparison:
        return self.comparisons["numpy"]

    @tracked("rejected: bare NumPy indexing of samples as items, over memcpy", TIME)
    def track_index(self, sample_bytes: int) -> Comparison:
        return self.comparisons["index"]

    @tracked("rejected: a loop of memoryview copies, which holds the GIL, over memcpy", TIME)
    def track_loop(self, sample_bytes: int) -> Comparison:
        return self.comparisons["loop"]


def _items(values: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """Samples as items of raw bytes, shape (N,), no copy."""
    return values.view(f"V{values[0].nbytes}")[:, 0]


class GatherChecked(_Random):
    """`open(verify="touch")` over a store that checks nothing; each sample is checked at its first use."""

    params = (102_400, 4096)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.prepare(sample_bytes)
        self.checked = ups_store.open(self.store.path, verify="touch")
        order = np.random.default_rng(2).permutation(len(self.store))
        self.distinct = [order[first : first + BATCH] for first in range(0, len(order) - BATCH, BATCH)]

    def measure(self) -> Comparison:
        pairs, nbytes = min(SCALE.read_pairs, len(self.distinct) - 1), self.out[NAME].nbytes
        return compare(timed(self.gather_checked), timed(self.gather_distinct), pairs=pairs, nbytes=nbytes)

    def gather_checked(self, i: int) -> None:
        self.checked.gather(self.distinct[i], [NAME], out=self.out)

    def gather_distinct(self, i: int) -> None:
        far = (i + len(self.distinct) // 2) % len(self.distinct)  # not what was just brought into the caches
        self.store.gather(self.distinct[far], [NAME], out=self.out)

    @cached_property
    def comparisons(self) -> tuple[Comparison, Comparison]:
        """First use of every sample, then the second."""
        return self.measure(), self.measure()

    @tracked('gather with verify="touch", first use, over without', TIME)
    def track_first_use(self, sample_bytes: int) -> Comparison:
        return self.comparisons[0]

    @tracked('gather with verify="touch", second use, over without', TIME)
    def track_second_use(self, sample_bytes: int) -> Comparison:
        return self.comparisons[1]
