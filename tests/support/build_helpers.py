"""What the tests of `ups_store.build` share: configurations in a test's folder, and watchers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from pdebench_files import Arrays, T, X, coordinate, values, write

from ups_store.building.config import BuildConfig, load_config
from ups_store.building.plan import DigestCache, StorePlan, plan_store
from ups_store.building.progress import BuildReport, BuildResult
from ups_store.building.stores import build_all
from ups_store.format.root import config_hash
from ups_store.sources.reader_pool import ReaderPool
from ups_store.writing.plan import identity_of

BURGERS = "1D_Burgers_Sols_Nu0.01.hdf5"


class Recorder:
    """A watcher that remembers what it was told."""

    def __init__(self, *, on_advance: Callable[[Recorder], None] | None = None) -> None:
        self.stages: list[list[Any]] = []  # name, total, unit, advanced
        self.notes: list[str] = []
        self.waited_for: list[str] = []
        self._on_advance = on_advance

    def stage(self, name: str, total: int, *, unit: str) -> None:
        self.stages.append([name, total, unit, 0])

    def advance(self, num: int) -> None:
        self.stages[-1][3] += num
        if self._on_advance is not None:
            self._on_advance(self)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def watch(self, pool: ReaderPool) -> None:
        self.pool = pool

    def waits(self, what: str) -> None:
        self.waited_for.append(what)

    @property
    def num_samples(self) -> int:
        """Samples done in the last stage; 0 while sources are digested."""
        return self.stages[-1][3] if self.stages[-1][2] == "samples" else 0


def interrupt_after(num_samples: int) -> Recorder:
    """A watcher that presses Ctrl-C as soon as so many samples of a store are done."""

    def press(watcher: Recorder) -> None:
        if watcher.stages[-1][2] == "samples" and watcher.num_samples >= num_samples:
            raise KeyboardInterrupt

    return Recorder(on_advance=press)


def settings(folder: Path, /, *, num_workers: int | str = 0, **keys: Any) -> BuildConfig:
    """Build `folder`/source into `folder`/cache; keys are those of `data`, or of `cache` as `cache_*`.

    One reader; tests of other things read in their own process, see `inline_readers`.
    """
    flags: dict[str, Any] = {
        "data.tasks": "burgers1d",
        "reading.num_workers": num_workers,
        "data.root": str(folder / "source"),
        "cache.dir": str(folder / "cache"),
    }
    for key, value in keys.items():
        is_cache = key.startswith("cache_")
        flags[f"cache.{key.removeprefix('cache_')}" if is_cache else f"data.{key}"] = value
    return load_config(flags=flags)


def build(config: BuildConfig, watcher: Recorder | None = None, **options: Any) -> BuildReport:
    return build_all(config, watcher=watcher or Recorder(), **options)


def plan(config: BuildConfig) -> StorePlan:
    """The plan of the first task and split."""
    return plan_store(config, config.data.tasks[0], config.data.split[0])


def hash_of(config: BuildConfig, *, rehash: bool = False) -> str:
    """Hash of the identity that the first store would get; nothing is built."""
    planned = plan(config)
    content = planned.identity(DigestCache(config.cache.dir, rehash=rehash), lambda nbytes: None)
    document = identity_of(planned.arrays, constants=planned.constants, dims=planned.dims, identity=content)
    return config_hash(document)


def write_burgers(
    path: Path, *, num_samples: int = 20, nu: float = 0.01, fields: np.ndarray | None = None
) -> Path:
    """PDEBench's layout with samples that differ; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensor = values(f"tensor{nu}", (num_samples, T, X)) if fields is None else fields
    datasets = {"tensor": tensor, "x-coordinate": coordinate(X), "t-coordinate": coordinate(T + 1)}
    return write(path, datasets, {"Nu": nu})


def plain(path: Path, read: Callable[[h5py.File], Arrays]) -> Arrays:
    """What a file holds, without the package."""
    with h5py.File(path) as file:
        return read(file)


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start Python with its output in pipes."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(**changes: Any) -> BuildResult:
    """What a build of 16 samples in a few seconds tells of itself, with changes."""
    values = {
        "path": Path("cache/burgers1d_train.zarr.zip"),
        "task": "burgers1d",
        "split": "train",
        "config_hash": "ab" * 32,
        "reused": False,
        "num_samples": 16,
        "num_committed": 16,
        "source_sample_nbytes": 500_000,
        "nbytes": 12_100,
        "age_s": 0.0,
        "seconds": {"digest": 1.0, "read": 2.5, "commit": 0.5, "total": 5.0},
    }
    return BuildResult(**{**values, **changes})  # type: ignore[arg-type]
