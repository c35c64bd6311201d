"""Continuing an unfinished store: reading back what is committed, over reading the same file with `pread`."""

from __future__ import annotations

import os

import numpy as np

import ups_store
from benchmarks.harness.inputs import NAME, Bench, values_of
from benchmarks.harness.measure import RATE, Comparison, compare, timed, tracked
from benchmarks.harness.scale import MIB, SCALE
from ups_store import ArraySpec

STORE = "store.zarr.zip"
BATCH_BYTES = 16 * MIB


class Resume(Bench):
    params = (102_400, 4096)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.spec = ArraySpec((SCALE.store_mib * MIB // sample_bytes + 1, sample_bytes // 4), np.float32)
        num_samples = self.spec.shape[0] - 1  # one stays missing
        self.nbytes = num_samples * sample_bytes
        per_batch = BATCH_BYTES // sample_bytes
        with self.create() as writer:
            for samples in np.split(np.arange(num_samples), range(per_batch, num_samples, per_batch)):
                writer.commit_many(samples, {NAME: values_of(samples, sample_bytes)})
        self.fd = os.open(self.folder.path / f"{STORE}.building", os.O_RDONLY)
        self.resume(0)

    def teardown(self, sample_bytes: int) -> None:
        os.close(self.fd)
        super().teardown()

    def create(self) -> ups_store.StoreWriter:
        return ups_store.create(self.folder.path / STORE, {NAME: self.spec}, identity={}, durability="lazy")

    def resume(self, i: int) -> None:
        with self.create() as writer:
            assert len(writer.missing()) == 1

    def read(self, i: int) -> None:
        """On one thread, into memory that is used again."""
        block = bytearray(MIB)
        for offset in range(0, self.nbytes, MIB):
            os.preadv(self.fd, [block], offset)

    @tracked("create that continues, over pread on one thread", RATE)
    def track_resume_over_pread(self, sample_bytes: int) -> Comparison:
        return compare(timed(self.resume), timed(self.read), pairs=SCALE.write_pairs, nbytes=self.nbytes)
