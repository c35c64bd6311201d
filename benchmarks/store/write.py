"""Writing: durable commits over `dd conv=fdatasync`, lazy ones over a `np.memmap`, of the same bytes.

The loop alone is what a long build spends its time on; the whole also has `create`, which reserves the room
and syncs it, and `finish`, which syncs everything and publishes.
"""

from __future__ import annotations

import subprocess
import time
from functools import cached_property
from typing import Literal

import numpy as np

import ups_store
from benchmarks.harness.inputs import NAME, Bench, check, values_of
from benchmarks.harness.measure import RATE, Comparison, compare, tracked
from benchmarks.harness.scale import MIB, SCALE
from ups_store import ArraySpec

STORE, SOURCE, COPY = "store.zarr.zip", "source.bin", "copy.bin"
NUM_DURABLE_PAIRS = 20  # disks vary


class _Writing(Bench):
    params = ((102_400, 4096), SCALE.batch_mib)
    param_names = ("sample_bytes", "batch_mib")
    durability: Literal["durable", "lazy"]

    def setup(self, sample_bytes: int, batch_mib: int) -> None:
        self.batch_bytes = batch_mib * MIB
        self.per_batch = -(-self.batch_bytes // sample_bytes)
        self.values = values_of(np.arange(SCALE.write_mib * MIB // sample_bytes), sample_bytes)
        self.values.tofile(self.folder.path / SOURCE)  # stays in the page cache, for dd to read
        self.build()
        with ups_store.open(self.folder.path / STORE) as store:
            check(store[NAME], self.values)

    def build(self, *, one_at_a_time: bool = False) -> tuple[float, float]:
        """Seconds of the loop of commits, and from `create` to `finish`."""
        self.folder.remove(STORE, COPY)  # before each side: both get the memory and blocks that this frees
        spec = ArraySpec(self.values.shape, self.values.dtype)
        path = self.folder.path / STORE
        began = time.perf_counter()
        with ups_store.create(path, {NAME: spec}, identity={}, durability=self.durability) as writer:
            created = time.perf_counter()
            (self.hand_over if one_at_a_time else self.commit_batches)(writer)
            committed = time.perf_counter()
            writer.finish()
        return committed - created, time.perf_counter() - began

    def commit_batches(self, writer: ups_store.StoreWriter) -> None:
        for first in range(0, len(self.values), self.per_batch):
            samples = np.arange(first, min(first + self.per_batch, len(self.values)))
            writer.commit_many(samples, {NAME: self.values[first : first + self.per_batch]})

    def hand_over(self, writer: ups_store.StoreWriter) -> None:
        """A sample at a time; as many are committed together."""
        with writer.batched(buffer_bytes=self.batch_bytes, save_every_s=1e9) as batch:
            for sample, value in enumerate(self.values):
                batch.commit(sample, {NAME: value})

    def dd(self) -> float:
        """Seconds of copying the same bytes, read from the page cache, synced once at the end."""
        source, copy = (f"{self.folder.path / name}" for name in (SOURCE, COPY))
        command = ["dd", f"if={source}", f"of={copy}", f"bs={self.batch_bytes}", "conv=fdatasync"]
        self.folder.remove(STORE, COPY)
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - began

    def memmap(self, *, flush: bool) -> float:
        """Seconds of writing the same bytes, batch by batch, into a new `np.memmap`."""
        self.folder.remove(STORE, COPY)
        began = time.perf_counter()
        target = np.memmap(self.folder.path / COPY, np.float32, "w+", shape=self.values.shape)
        for first in range(0, len(self.values), self.per_batch):
            target[first : first + self.per_batch] = self.values[first : first + self.per_batch]
        if flush:
            target.flush()
        return time.perf_counter() - began


class WriteDurable(_Writing):
    durability = "durable"

    @cached_property
    def comparisons(self) -> tuple[Comparison, Comparison]:
        """Loop and whole of the same builds, each over the `dd` that followed."""
        seconds = []
        for _ in range(min(NUM_DURABLE_PAIRS, 4 * SCALE.write_pairs) + 1):
            built = self.build()
            seconds.append((*built, self.dd()))
        loops, wholes, references = zip(*seconds[1:], strict=True)
        nbytes = self.values.nbytes
        return Comparison.of(loops, references, nbytes=nbytes), Comparison.of(
            wholes, references, nbytes=nbytes
        )

    @tracked("durable commit_many, over dd conv=fdatasync", RATE, at_least=0.8)
    def track_loop_over_dd(self, sample_bytes: int, batch_mib: int) -> Comparison:
        return self.comparisons[0]

    @tracked("durable create to finish, over dd conv=fdatasync", RATE)
    def track_whole_over_dd(self, sample_bytes: int, batch_mib: int) -> Comparison:
        return self.comparisons[1]


class WriteLazy(_Writing):
    durability = "lazy"

    @cached_property
    def comparisons(self) -> tuple[Comparison, Comparison]:
        """Loop over a memmap that isn't flushed, and whole, which ends synced, over one that is."""
        seconds = []
        for _ in range(2 * SCALE.write_pairs + 1):
            built = self.build()
            dirty = self.memmap(flush=False)
            seconds.append((*built, dirty, self.memmap(flush=True)))
        loops, wholes, dirty_ones, flushed_ones = zip(*seconds[1:], strict=True)
        nbytes = self.values.nbytes
        return (
            Comparison.of(loops, dirty_ones, nbytes=nbytes),
            Comparison.of(wholes, flushed_ones, nbytes=nbytes),
        )

    @tracked("lazy commit_many, over np.memmap without flush", RATE, at_least=0.9)
    def track_loop_over_memmap(self, sample_bytes: int, batch_mib: int) -> Comparison:
        return self.comparisons[0]

    @tracked("lazy create to finish (synced), over np.memmap with flush", RATE)
    def track_whole_over_memmap(self, sample_bytes: int, batch_mib: int) -> Comparison:
        return self.comparisons[1]


class WriteOneAtATime(_Writing):
    durability = "durable"

    @tracked("durable commits through batched(), a sample at a time, over commit_many", RATE)
    def track_batched_over_commit_many(self, sample_bytes: int, batch_mib: int) -> Comparison:
        return compare(
            lambda i: self.build(one_at_a_time=True)[0],
            lambda i: self.build()[0],
            pairs=SCALE.write_pairs,
            nbytes=self.values.nbytes,
        )
