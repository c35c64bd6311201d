"""Preloading: from cold over `cat`, memory of several processes, gathers from a copy and on a device.

Cold means that the kernel was asked to drop the file's pages (posix_fadvise), which needs no root; a file
system that keeps them, such as tmpfs, can't be measured.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

import ups_store
from benchmarks.harness.inputs import NAME, Bench, check, make_store, values_of
from benchmarks.harness.measure import RATE, TIME, Comparison, compare, timed, tracked
from benchmarks.harness.memory import pss_bytes
from benchmarks.harness.scale import MIB, SCALE

SAMPLE_BYTES = 102_400
NUM_SAMPLES = SCALE.store_mib * MIB // SAMPLE_BYTES
BATCH = 64
NUM_PROCESSES = 8
NUM_BATCHES = 64


def evict(path: Path) -> None:
    """Drop the file's pages from the page cache; no process may have it mapped."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class _Stored(Bench):
    """A store on the disk, closed, and random batches of it."""

    def prepare(self) -> None:
        self.path = self.folder.path / "store.zarr.zip"
        make_store(self.path, num_samples=NUM_SAMPLES, sample_bytes=SAMPLE_BYTES).close()
        self.batches = np.random.default_rng(0).integers(0, NUM_SAMPLES, (NUM_BATCHES, BATCH))


class PreloadCold(_Stored):
    """`preload("page-cache")` of a file that isn't in memory; opening the store isn't timed."""

    def setup(self) -> None:
        self.prepare()

    def preload(self, i: int) -> float:
        evict(self.path)
        with ups_store.open(self.path) as store:
            if store.residency() > 0.1:
                raise RuntimeError("this file system keeps its pages: choose another folder")
            seconds = timed(lambda i: store.preload("page-cache"))(i)
            assert store.residency() == 1.0
        return seconds

    def cat(self, i: int) -> float:
        evict(self.path)
        started = time.perf_counter()
        subprocess.run(["cat", str(self.path)], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - started

    @tracked("preload from cold, over `cat FILE > /dev/null`", RATE, at_least=0.9)
    def track_over_cat(self) -> Comparison:
        nbytes = self.path.stat().st_size
        return compare(self.preload, self.cat, pairs=4 * SCALE.write_pairs, nbytes=nbytes)


class PreloadShared(_Stored):
    """Memory of processes that read all of one preloaded store."""

    def setup(self) -> None:
        self.prepare()
        with ups_store.open(self.path) as store:
            store.preload("page-cache")

    @tracked(
        f"PSS of the mappings in {NUM_PROCESSES} reading processes, over the store", "x size", at_most=1.05
    )
    def track_pss_over_store(self) -> float:
        spawn = multiprocessing.get_context("spawn")
        barrier = spawn.Barrier(NUM_PROCESSES)
        pipes = [spawn.Pipe() for _ in range(NUM_PROCESSES)]
        readers = [spawn.Process(target=_read_all, args=(self.path, barrier, there)) for _, there in pipes]
        for reader in readers:
            reader.start()
        total = sum(here.recv() for here, _ in pipes)
        for reader in readers:
            reader.join()
        return total / self.path.stat().st_size


def _read_all(path: Path, barrier: Barrier, answers: Connection) -> None:
    with ups_store.open(path) as store:
        for first in range(0, NUM_SAMPLES, BATCH):
            store[NAME][first : first + BATCH].sum()
        barrier.wait()
        answers.send(pss_bytes(path))
        barrier.wait()  # none leaves before all were counted


class PreloadCopy(_Stored):
    """Gathers from a copy in huge pages, over the same from the mapped page cache."""

    def setup(self) -> None:
        self.prepare()
        self.mapped, self.copied = ups_store.open(self.path), ups_store.open(self.path)
        self.mapped.preload("page-cache")
        self.copied.preload("copy")
        self.outs = [store.gather(self.batches[0]) for store in (self.mapped, self.copied)]
        check(self.outs[1][NAME], values_of(self.batches[0], SAMPLE_BYTES))

    @tracked("gather from a copy in huge pages, over the page cache", TIME)
    def track_over_page_cache(self) -> Comparison:
        stores = zip((self.copied, self.mapped), reversed(self.outs), strict=True)
        ours, reference = (timed(self._gather(store, out)) for store, out in stores)
        nbytes = BATCH * SAMPLE_BYTES
        return compare(ours, reference, pairs=SCALE.read_pairs, nbytes=nbytes)

    def _gather(self, store: ups_store.Store, out: Any) -> Any:
        return lambda i: store.gather(self.batches[i % NUM_BATCHES], out=out)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


if _has_cuda():

    class PreloadDevice(_Stored):
        """Gathers by a CUDA device, timed until they are done, over a copy of as many bytes there."""

        def setup(self) -> None:
            import torch

            self.prepare()
            self.torch = torch
            self.store = ups_store.open(self.path)
            self.there = self.store.preload("device").on_device
            batch = self.there.gather(self.batches[0])[NAME].cpu().numpy()
            check(batch, values_of(self.batches[0], SAMPLE_BYTES))
            self.source = torch.ones(BATCH * SAMPLE_BYTES // 4, device="cuda")
            self.target = torch.empty_like(self.source)

        def gather(self, i: int) -> None:
            self.there.gather(self.batches[i % NUM_BATCHES])
            self.torch.cuda.synchronize()

        def copy(self, i: int) -> None:
            self.target.copy_(self.source, non_blocking=True)
            self.torch.cuda.synchronize()

        @tracked(f"gather {BATCH} samples in device memory, over a copy there", RATE, at_least=0.5)
        def track_over_device_copy(self) -> Comparison:
            ours, pairs = timed(self.gather), SCALE.read_pairs
            return compare(ours, timed(self.copy), pairs=pairs, nbytes=self.source.nbytes)
