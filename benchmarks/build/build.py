"""`python -m ups_store.build`, as a user types it: over copying the source, and again when all is valid."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import h5py
import numpy as np

import ups_store
from benchmarks.harness.inputs import Bench, check, values_of
from benchmarks.harness.measure import RATE, Comparison, Timed, compare, median_s, timed, tracked
from benchmarks.harness.scale import MIB, SCALE
from ups_store.building.config import BuildConfig, load_config
from ups_store.building.progress import Watcher
from ups_store.building.stores import build_all

TASK, SOURCE = "burgers1d", "1D_Burgers_Sols_Nu0.01.hdf5"
NUM_STEPS, NUM_POINTS = 201, 1024  # PDEBench's


def make_source(path: Path, nbytes: int) -> None:
    """A Burgers file in PDEBench's layout; ramps, which cost as much to copy as solutions."""
    num_samples = nbytes // (4 * NUM_STEPS * NUM_POINTS)
    with h5py.File(path, "w") as file:
        tensor = file.create_dataset("tensor", (num_samples, NUM_STEPS, NUM_POINTS), "f4")
        for i in range(num_samples):
            tensor[i] = values_of([i], 4 * NUM_STEPS * NUM_POINTS).reshape(NUM_STEPS, NUM_POINTS)
        file["x-coordinate"] = np.linspace(-1, 1, NUM_POINTS, dtype=np.float32)
        file["t-coordinate"] = np.linspace(0, 2, NUM_STEPS + 1, dtype=np.float32)


def expect_nothing_to_do(arguments: list[str]) -> None:
    """Run a build once more: it must find its stores valid, and not import torch for that."""
    code = "import runpy, sys; sys.argv = sys.argv[1:]\n"
    code += "try: runpy.run_module(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit as end: assert not end.code, end.code\n"
    code += "print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    if not shown.stdout.decode().endswith("False\n") or b"valid" not in shown.stdout:
        raise AssertionError(f"the second run imports torch, or builds: {shown.stdout.decode()}")


class _Built(Bench):
    def setup(self) -> None:
        self.root = self.folder.path / "data"
        self.root.mkdir()
        make_source(self.root / SOURCE, SCALE.write_mib * MIB)
        self.build(0)
        self.check()

    def check(self) -> None:
        stores = [ups_store.open(path) for path in self.cache.glob("*.zarr.zip")]
        with h5py.File(self.root / SOURCE) as file:
            tensor, firsts = file["tensor"], file["tensor"][:, 0, 0].tolist()  # all different
            if sum(map(len, stores)) != len(tensor):
                raise AssertionError(f"{sum(map(len, stores))} of {len(tensor)} samples")
            for sample in (np.squeeze(store["fields"][-1]) for store in stores):
                check(sample, tensor[firsts.index(sample[0, 0])])

    @property
    def cache(self) -> Path:
        return self.folder.path / "cache"

    @property
    def arguments(self) -> list[str]:
        return ["ups_store.build", "--tasks", TASK, "--root", str(self.root), "--cache-dir", str(self.cache)]

    def build(self, i: int) -> None:
        subprocess.run([sys.executable, "-m", *self.arguments], check=True, capture_output=True)

    def build_from_scratch(self, i: int) -> float:
        shutil.rmtree(self.cache, ignore_errors=True)
        self.folder.remove()
        return timed(self.build)(i)

    def over_copy(self, build: Timed) -> Comparison:
        """A build from scratch beside copying its source."""
        nbytes = (self.root / SOURCE).stat().st_size
        return compare(build, self.copy_from_scratch, pairs=SCALE.write_pairs, nbytes=nbytes)

    def copy_from_scratch(self, i: int) -> float:
        copy = self.folder.path / "copy.hdf5"
        self.folder.remove(copy.name)
        return timed(lambda i: self.copy(copy))(i)

    def copy(self, path: Path) -> None:
        subprocess.run(["cp", "--reflink=never", self.root / SOURCE, path], check=True)
        subprocess.run(["sync", path], check=True)


class Build(_Built):
    @cached_property
    def measured(self) -> Comparison:
        return self.over_copy(self.build_from_scratch)

    @tracked("build of a Burgers file, new process, over cp and sync", RATE)
    def track_build_over_cp(self) -> Comparison:
        return self.measured

    @tracked("build of a Burgers file, new process", "s", at_most=0.9)
    def track_build(self) -> Comparison:
        return self.measured


class BuildOnly(_Built):
    """The same without the start of Python and its imports; its reader starts."""

    @property
    def config(self) -> BuildConfig:
        flags = {"data.tasks": TASK, "data.root": str(self.root), "cache.dir": str(self.cache)}
        return load_config(flags=flags)

    def build_here(self, i: int) -> float:
        shutil.rmtree(self.cache, ignore_errors=True)
        self.folder.remove()
        config = self.config
        return timed(lambda i: build_all(config, watcher=Watcher()))(i)

    @tracked(
        "build of a Burgers file, without the start of Python and imports, over cp and sync",
        RATE,
        at_least=0.5,
    )
    def track_build_over_cp(self) -> Comparison:
        return self.over_copy(self.build_here)


class BuildAgain(_Built):
    def setup(self) -> None:
        super().setup()
        expect_nothing_to_do(self.arguments)

    @tracked("second run of a build: the stores are valid", "s", at_most=1.0)
    def track_second_run(self) -> float:
        return median_s(self.build, repeats=SCALE.process_pairs)
