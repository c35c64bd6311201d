"""Checking every byte: `verify` over memcpy of as many bytes on one thread."""

from __future__ import annotations

from benchmarks.harness.inputs import Bench, Memory, make_store
from benchmarks.harness.measure import RATE, Comparison, compare, timed, tracked
from benchmarks.harness.scale import MIB, SCALE

BLOCK_BYTES = 4 * MIB


class Verify(Bench):
    params = ((102_400, 4096), (1, 2))
    param_names = ("sample_bytes", "num_threads")

    def setup(self, sample_bytes: int, num_threads: int) -> None:
        num_samples = SCALE.store_mib * MIB // sample_bytes
        path = self.folder.path / "store.zarr.zip"
        self.store = make_store(path, num_samples=num_samples, sample_bytes=sample_bytes)
        self.num_threads = num_threads
        self.memory = Memory(self.store.nbytes, BLOCK_BYTES)
        self.verify(0)

    def verify(self, i: int) -> None:
        report = self.store.verify(num_threads=self.num_threads)
        if not report.ok or report.nbytes != self.store.nbytes:
            raise AssertionError(
                f"{report.nbytes} of {self.store.nbytes} bytes checked: {report.problems[:3]}"
            )

    def copy_all(self, i: int) -> None:
        for block in range(self.store.nbytes // BLOCK_BYTES):
            self.memory.copy(block)

    @tracked("verify, over memcpy on one thread", RATE)
    def track_verify_over_memcpy(self, sample_bytes: int, num_threads: int) -> Comparison:
        nbytes = self.store.nbytes
        return compare(timed(self.verify), timed(self.copy_all), pairs=SCALE.write_pairs, nbytes=nbytes)
