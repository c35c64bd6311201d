"""Opening: independent of the number of samples; importing: light, and without torch."""

from __future__ import annotations

import subprocess
import sys
from functools import cached_property, partial
from pathlib import Path

import numpy as np

import ups_store
from benchmarks.harness.inputs import Bench, check
from benchmarks.harness.measure import TIME, Comparison, compare, median_s, timed, tracked
from benchmarks.harness.scale import SCALE
from ups_store import ArraySpec

FEW, MANY = 1_000, 1_000_000
SOURCES = [
    {"name": f"1D_Burgers_Sols_Nu{nu}.hdf5", "size": 8234567890, "digest": "0" * 64} for nu in (0.001, 0.01)
]


def make_store(folder: Path, num_samples: int) -> Path:
    """A store as a build makes them, but for the size of a sample."""
    path = folder / f"{num_samples}.zarr.zip"
    latent, nu = np.ones((num_samples, 4), np.float16), np.ones(num_samples)
    specs = {"latent": ArraySpec(latent.shape, "float16"), "nu": ArraySpec(nu.shape, "float64")}
    constants = {"x": np.linspace(0, 1, 1024), "t": np.linspace(0, 2, 201)}
    identity = {"task": "burgers1d", "split": "train", "sources": SOURCES}
    with ups_store.create(path, specs, constants=constants, identity=identity, durability="lazy") as writer:
        writer.commit_many(np.arange(num_samples), {"latent": latent, "nu": nu})
        writer.finish()
    with ups_store.open(path) as store:
        check(store["latent"], latent)
    return path


class Open(Bench):
    params = (FEW, MANY)
    param_names = ("num_samples",)

    def setup(self, num_samples: int) -> None:
        self.path = make_store(self.folder.path, num_samples)

    def time_open(self, num_samples: int) -> None:
        ups_store.open(self.path).close()

    @tracked("open", "ms", at_most=1.0)
    def track_open(self, num_samples: int) -> float:
        return 1e3 * median_s(lambda i: self.time_open(num_samples), repeats=SCALE.read_pairs)


class OpenManyOverFew(Bench):
    def setup(self) -> None:
        self.few, self.many = (make_store(self.folder.path, num) for num in (FEW, MANY))

    @tracked(f"open {MANY:,} samples, over {FEW:,}; equal within 10 %", TIME, at_most=1.1)
    def track_open_many_over_few(self) -> Comparison:
        few, many = (
            timed(lambda i, path=path: ups_store.open(path).close()) for path in (self.few, self.many)
        )
        return compare(many, few, pairs=SCALE.read_pairs)


class Import:
    def setup(self) -> None:
        if "torch" in _imported("ups_store.read.open"):
            raise AssertionError("import ups_store imports torch")

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """Each over the import of NumPy, which opening needs too."""
        sides = {"package": "ups_store", "reader": "ups_store.read.open"}
        return {
            side: compare(partial(_import_s, module), partial(_import_s, "numpy"), pairs=SCALE.process_pairs)
            for side, module in sides.items()
        }

    @tracked("import ups_store in a new process", "s", at_most=0.15)
    def track_import(self) -> Comparison:
        return self.comparisons["package"]

    @tracked("import ups_store and what opening needs, over import numpy", TIME)
    def track_reader_over_numpy(self) -> Comparison:
        return self.comparisons["reader"]


def _import_s(module: str, i: int) -> float:
    code = f"import time; a = time.perf_counter(); import {module}; print(time.perf_counter() - a)"
    return float(_run(code))


def _imported(module: str) -> set[str]:
    return set(_run(f"import sys, {module}; print(*sys.modules)").split())


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
