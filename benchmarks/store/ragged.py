"""Ragged arrays over arrays of equal samples of the same bytes; a generator over a list."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import ups_store
from benchmarks.harness.inputs import NAME, Bench, check, values_of
from benchmarks.harness.measure import TIME, Comparison, compare, timed, tracked
from benchmarks.harness.scale import MIB, SCALE
from ups_store import ArraySpec

BATCH = 64
ROWS = "rows"


class GatherRagged(Bench):
    """All samples have one length, so that both arrays give the same bytes."""

    params = (4096, 102_400)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        num_samples, length = SCALE.store_mib * MIB // sample_bytes // 2, sample_bytes // 4
        arrays = {
            NAME: ArraySpec((num_samples, length), "float32"),
            ROWS: ArraySpec((num_samples, None), "float32", lengths=[length] * num_samples),
        }
        path = self.folder.path / "store.zarr.zip"
        with ups_store.create(path, arrays, identity={}, durability="lazy") as writer:
            for first in range(0, num_samples, 1024):
                samples = np.arange(first, min(first + 1024, num_samples))
                values = values_of(samples, sample_bytes)
                writer.commit_many(samples, {NAME: values, ROWS: values})
            writer.finish()
        self.store = ups_store.open(path)
        self.batches = np.random.default_rng(0).integers(0, num_samples, (512, BATCH))
        self.out = {NAME: np.ones((BATCH, length), np.float32)}
        self.padded = {ROWS: np.ones((BATCH, length), np.float32), f"{ROWS}.lengths": np.ones(BATCH, int)}
        self.fixed(0), self.into_padded(0)
        check(self.padded[ROWS], self.out[NAME])

    def fixed(self, i: int) -> Any:
        return self.store.gather(self.batches[i % 512], [NAME], out=self.out)

    def views(self, i: int) -> Any:
        return self.store.gather(self.batches[i % 512], [ROWS])

    def into_padded(self, i: int) -> Any:
        return self.store.gather(self.batches[i % 512], [ROWS], ragged="padded", out=self.padded)

    def over_fixed(self, ours: Any) -> Comparison:
        nbytes = self.out[NAME].nbytes
        return compare(timed(ours), timed(self.fixed), pairs=SCALE.read_pairs, nbytes=nbytes)

    @tracked("gather of ragged samples, views, over gather of equal ones", TIME)
    def track_views_over_fixed(self, sample_bytes: int) -> float:
        return self.over_fixed(self.views)

    @tracked("gather of ragged samples, padded, over gather of equal ones", TIME)
    def track_padded_over_fixed(self, sample_bytes: int) -> float:
        return self.over_fixed(self.into_padded)


class WriteUnknown(Bench):
    """`write` of a generator, whose number isn't known, over `write` of the same as a list; both synced."""

    params = (4096, 102_400)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.values = values_of(np.arange(SCALE.write_mib * MIB // sample_bytes), sample_bytes)
        self.write(is_known=False)
        with ups_store.open(self.folder.path / "a.zarr.zip") as store:
            check(store[NAME], self.values)

    def write(self, *, is_known: bool) -> float:
        self.folder.remove("a.zarr.zip")
        samples = [{NAME: sample} for sample in self.values]
        began = time.perf_counter()
        given = samples if is_known else iter(samples)
        ups_store.write(self.folder.path / "a.zarr.zip", given, identity={}).close()
        return time.perf_counter() - began

    @tracked("a generator of unknown length over a list of known length", TIME)
    def track_unknown_over_known(self, sample_bytes: int) -> Comparison:
        seconds = [
            (self.write(is_known=False), self.write(is_known=True)) for _ in range(SCALE.write_pairs + 1)
        ]
        unknown, known = zip(*seconds[1:], strict=True)
        return Comparison.of(unknown, known, nbytes=self.values.nbytes)
