"""Ragged arrays over arrays of equal samples of the same bytes; parts and merging over a direct build."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import numpy as np

import ups_store
from benchmarks.harness.inputs import NAME, Folder, check, values_of
from benchmarks.harness.measure import TIME, Comparison, compare, timed, tracked
from benchmarks.harness.scale import MIB, SCALE
from ups_store import ArraySpec

BATCH = 64
ROWS = "rows"
BUFFER_MIB = 64


class GatherRagged:
    """All samples have one length, so that both arrays give the same bytes."""

    params = (4096, 102_400)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.folder = Folder()
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

    def teardown(self, sample_bytes: int) -> None:
        self.store.close()
        self.folder.cleanup()

    def fixed(self, i: int) -> Any:
        return self.store.gather(self.batches[i % 512], [NAME], out=self.out)

    def views(self, i: int) -> Any:
        return self.store.gather(self.batches[i % 512], [ROWS])

    def into_padded(self, i: int) -> Any:
        return self.store.gather(self.batches[i % 512], [ROWS], ragged="padded", out=self.padded)

    def over_fixed(self, ours: Any) -> float:
        nbytes = self.out[NAME].nbytes
        self.comparison = compare(timed(ours), timed(self.fixed), pairs=SCALE.read_pairs, nbytes=nbytes)
        return self.comparison.time_ratio

    @tracked("gather of ragged samples, views, over gather of equal ones", TIME)
    def track_views_over_fixed(self, sample_bytes: int) -> float:
        return self.over_fixed(self.views)

    @tracked("gather of ragged samples, padded, over gather of equal ones", TIME)
    def track_padded_over_fixed(self, sample_bytes: int) -> float:
        return self.over_fixed(self.into_padded)


class WriteParts:
    """`write_parts` from the first sample to the merged file, over `create` of the same, both synced."""

    params = (4096, 102_400)
    param_names = ("sample_bytes",)
    timeout = 900

    def setup(self, sample_bytes: int) -> None:
        self.folder = Folder()
        self.values = values_of(np.arange(SCALE.write_mib * MIB // sample_bytes), sample_bytes)
        self.by_parts()
        with ups_store.open(self.folder.path / "parts.zarr.zip") as store:
            check(store[NAME], self.values)

    def teardown(self, sample_bytes: int) -> None:
        self.folder.cleanup()

    def by_parts(self, *, merge: bool = True) -> float:
        self.folder.remove("parts.zarr.zip", "parts.zarr.json", "direct.zarr.zip")
        for part in self.folder.path.glob("parts.parts/*"):
            part.unlink()
        spec = ArraySpec((None, *self.values.shape[1:]), "float32")
        began = time.perf_counter()
        with ups_store.write_parts(
            self.folder.path / "parts.zarr.zip",
            {NAME: spec},
            identity={},
            merge=merge,
            buffer_bytes=BUFFER_MIB * MIB,
        ) as writer:
            writer.extend({NAME: sample} for sample in self.values)
            writer.finish()
        return time.perf_counter() - began

    def direct(self) -> float:
        self.folder.remove("parts.zarr.zip", "parts.zarr.json", "direct.zarr.zip")
        began, num = time.perf_counter(), BUFFER_MIB * MIB // self.values[0].nbytes
        path, spec = self.folder.path / "direct.zarr.zip", ArraySpec(self.values.shape, "float32")
        with ups_store.create(path, {NAME: spec}, identity={}) as writer:
            for first in range(0, len(self.values), num):
                samples = np.arange(first, min(first + num, len(self.values)))
                writer.commit_many(samples, {NAME: self.values[first : first + num]})
            writer.finish()
        return time.perf_counter() - began

    @cached_property
    def comparisons(self) -> tuple[Comparison, Comparison]:
        """Parts that are merged, and parts that stay, each over the direct build that followed."""
        seconds = []
        for _ in range(SCALE.write_pairs + 1):
            merged = self.by_parts()
            reference = self.direct()
            seconds.append((merged, self.by_parts(merge=False), reference))
        merged_ones, sets, references = zip(*seconds[1:], strict=True)
        nbytes = self.values.nbytes
        return Comparison.of(merged_ones, references, nbytes=nbytes), Comparison.of(
            sets, references, nbytes=nbytes
        )

    @tracked("parts and their merging, over a build of known length", TIME)
    def track_merged_over_direct(self, sample_bytes: int) -> float:
        self.comparison, _ = self.comparisons
        return self.comparison.time_ratio

    @tracked("parts that stay a set, over a build of known length", TIME)
    def track_set_over_direct(self, sample_bytes: int) -> float:
        _, self.comparison = self.comparisons
        return self.comparison.time_ratio
