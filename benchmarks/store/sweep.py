"""One batch over sizes of samples, 512 bytes to 16 MB, beside torch's fastest for a plain file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import ups_store
from benchmarks.harness.inputs import NAME, Bench, check, make_store, values_of
from benchmarks.harness.measure import TIME, Comparison, compare, timed, tracked
from benchmarks.harness.scale import MIB, SCALE

NUM_BATCHES = 64
SIZES = (512, 1024, 4096, 16_384, 65_536, 102_400, 262_144, MIB, 4 * MIB, 16 * MIB)


class Sweep(Bench):
    """`gather` over `index_select` from a memory map, reused outputs, one thread."""

    timeout = 600
    params = SIZES
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        import torch

        self.torch, self.num_threads = torch, torch.get_num_threads()
        torch.set_num_threads(1)
        self.sample_bytes = sample_bytes
        self.num_samples = SCALE.store_mib * MIB // sample_bytes
        self.path, self.plain_path = self.folder.path / "store.zarr.zip", self.folder.path / "plain.bin"
        self.store = make_store(self.path, num_samples=self.num_samples, sample_bytes=sample_bytes)
        np.ascontiguousarray(self.store[NAME]).tofile(self.plain_path)
        self.store.close()
        for path in (self.path, self.plain_path):
            _read_back(path)
        self.store, self.plain = ups_store.open(self.path), self.map_plain()
        rng, size = np.random.default_rng(0), min(64, max(4, 64 * MIB // sample_bytes))
        self.batches = rng.integers(0, self.num_samples, (NUM_BATCHES, size))
        self.out = self.store.gather(np.arange(self.num_samples), [NAME])  # maps all pages
        self.plain.sum()
        self.out = self.store.gather(self.batches[0], [NAME])
        self.plain_out = torch.ones(self.out[NAME].shape)
        self.gather(1), self.select(1)
        for found in (self.out[NAME], self.plain_out.numpy()):
            check(found, values_of(self.batches[1], sample_bytes))

    def teardown(self, sample_bytes: int) -> None:
        self.torch.set_num_threads(self.num_threads)
        super().teardown()

    def map_plain(self) -> Any:
        shape = (self.num_samples, self.sample_bytes // 4)
        return self.torch.from_numpy(np.memmap(self.plain_path, np.float32, "c", shape=shape))

    def gather(self, i: int) -> None:
        self.store.gather(self.batches[i % NUM_BATCHES], [NAME], out=self.out)

    def select(self, i: int) -> None:
        index = self.torch.from_numpy(self.batches[i % NUM_BATCHES])
        self.torch.index_select(self.plain, 0, index, out=self.plain_out)

    @property
    def num_pairs(self) -> int:
        return max(9, min(SCALE.read_pairs, 8 * NUM_BATCHES * MIB // self.out[NAME].nbytes))

    @tracked("one batch, over np.memmap and index_select", TIME, at_most=1.05)
    def track_over_index_select(self, sample_bytes: int) -> Comparison:
        other = lambda i: self.select(i + NUM_BATCHES // 2)  # noqa: E731 - samples that aren't in the caches
        ours, nbytes = timed(self.gather), self.out[NAME].nbytes
        return compare(ours, timed(other), pairs=self.num_pairs, nbytes=nbytes, num_unmeasured=8)

    @tracked(
        "one batch from pages that weren't mapped yet, over np.memmap and index_select", TIME, at_most=1.05
    )
    def track_first_touch(self, sample_bytes: int) -> Comparison:
        def ours(i: int) -> float:
            self.store.close()
            self.store = ups_store.open(self.path)
            for _ in range(
                3
            ):  # code and tables that every call needs are in the caches then, as the reference's are
                self.store.gather(self.batches[i % NUM_BATCHES][:1], [NAME])
            return timed(self.gather)(i)

        def reference(i: int) -> float:
            self.plain = self.map_plain()
            return timed(self.select)(i)

        pairs, nbytes = min(self.num_pairs, 101), self.out[NAME].nbytes
        return compare(ours, reference, pairs=pairs, nbytes=nbytes)


def _read_back(path: Path) -> None:
    """Have a file in the page cache as readahead leaves it; written ones lie there in other pieces."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(MIB):
            pass
