"""Stores and memory to measure with; every value is known, so that what is read can be checked."""

from __future__ import annotations

import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store
from benchmarks.harness.scale import MIB
from ups_store import ArraySpec

NAME = "fields"
_BLOCK_BYTES = 16 * MIB

Floats = npt.NDArray[np.float32]


class Folder(tempfile.TemporaryDirectory[str]):
    """A temporary folder in `UPS_BENCH_DIR`, by default where the system has them."""

    def __init__(self) -> None:
        super().__init__(prefix="ups-bench-", dir=os.environ.get("UPS_BENCH_DIR"))
        self.path = Path(self.name)

    def remove(self, *names: str) -> None:
        """Remove files and wait for the file system's journal, so that freeing them isn't measured later."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        fd = os.open(self.path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class Bench:
    """A benchmark in a folder of its own: whatever its `setup` opened is closed, the last first."""

    timeout = 900

    @cached_property
    def folder(self) -> Folder:
        """Made when it is needed first."""
        return Folder()

    def teardown(self, *values: object) -> None:
        """Close, remove the folder, and let go of memory."""
        for value in reversed([*vars(self).values()]):
            if hasattr(value, "close"):
                value.close()
        if folder := vars(self).get("folder"):
            folder.cleanup()
        vars(self).clear()


def values_of(samples: npt.ArrayLike, sample_bytes: int) -> Floats:
    """Values of the samples, shape (B, sample_bytes / 4): a ramp that begins at another place in each."""
    first = np.asarray(samples, np.int64)[:, None] * 7919
    return ((first + np.arange(sample_bytes // 4)) % 65521).astype(np.float32)


def make_store(path: Path, *, num_samples: int, sample_bytes: int) -> ups_store.Store:
    """Make and open a store of one array of such samples; mapped, compared, and so in memory."""
    spec = ArraySpec((num_samples, sample_bytes // 4), "float32", dims=("sample", "x"))
    per_batch = max(1, _BLOCK_BYTES // sample_bytes)
    batches = np.split(np.arange(num_samples), range(per_batch, num_samples, per_batch))
    with ups_store.create(
        path, {NAME: spec}, identity={"made_for": "a benchmark"}, durability="lazy"
    ) as writer:
        for samples in batches:
            writer.commit_many(samples, {NAME: values_of(samples, sample_bytes)})
        writer.finish()
    store = ups_store.open(path)
    for samples in batches:
        check(store[NAME][samples[0] : samples[-1] + 1], values_of(samples, sample_bytes))
    return store


def save_values(
    path: Path, values: npt.NDArray[Any], *, dims: tuple[str, ...] | None = None
) -> ups_store.Store:
    """Make and open a store of one array of these values."""
    spec, identity = ArraySpec(values.shape, values.dtype, dims=dims), {"made_for": "a benchmark"}
    with ups_store.create(path, {NAME: spec}, identity=identity, durability="lazy") as writer:
        writer.commit_many(range(len(values)), {NAME: values})
        writer.finish()
    return ups_store.open(path)


def check(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Fail before anything wrong is timed."""
    if not np.array_equal(found, expected):
        raise AssertionError(f"wrong data: expected {expected.ravel()[:4]}..., found {found.ravel()[:4]}...")


class Memory:
    """Touched memory, contiguous bytes copied from random places of it: the measure of any reader."""

    def __init__(self, nbytes: int, block_bytes: int, *, num_places: int = 512) -> None:
        self._bytes = np.ones(nbytes, np.uint8)
        places = np.random.default_rng(1).integers(0, nbytes - block_bytes + 1, num_places)
        self._blocks = [self._bytes[first : first + block_bytes] for first in places.tolist()]
        self._out = np.ones(block_bytes, np.uint8)

    def copy(self, i: int) -> None:
        """One memcpy on one thread, into a reused buffer."""
        np.copyto(self._out, self._blocks[i % len(self._blocks)])
