"""The encode pipeline: over its slowest stage alone, over encoding alone, and over the sequential way.

Burgers' equation in PDEBench's layout with PDEBench's own reduction, 1024 x 201 to 256 x 41, and the encoder
of the demo with weights that were never trained, which takes as long. Readers have started, files are open.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import psutil
import torch

import ups_store
from benchmarks.build.build import expect_nothing_to_do
from benchmarks.harness.inputs import Bench
from benchmarks.harness.measure import RATE, TIME, Comparison, compare, median_s, timed, tracked
from benchmarks.harness.scale import MIB, SCALE
from ups.grid import GridSpec
from ups.trained.autoencoder import Autoencoder, save_autoencoder
from ups.trained.encoder import LatentEncoder
from ups.trained.specs import AutoencoderSpec, TaskSpec
from ups_store.building.config import BuildConfig, load_config
from ups_store.building.encode import OverlappingEncoder
from ups_store.building.fill import Filling
from ups_store.building.plan import DigestCache, plan_store
from ups_store.building.progress import Stopwatch, Watcher
from ups_store.building.read import read_batches
from ups_store.building.readers import Readers
from ups_store.system.memory import num_cores

TASK, SOURCE = "burgers1d", "1D_Burgers_Sols_Nu0.01.hdf5"
NUM_STEPS, NUM_POINTS = 201, 1024  # PDEBench's
REDUCE_TIME, REDUCE_SPACE = 5, 4  # of its published numbers
NUM_MODES = 4

Arrays = Mapping[str, npt.NDArray[Any]]


def make_solutions(path: Path, *, num_samples: int, is_compressed: bool) -> None:
    """Sums of travelling waves: smooth, but with mantissas that gzip finds as hard as those of solutions."""
    x, t = np.linspace(0, 1, NUM_POINTS, endpoint=False), np.linspace(0, 2, NUM_STEPS)
    random = np.random.default_rng(0)
    how = {"chunks": (1, NUM_STEPS, NUM_POINTS), "compression": "gzip", "compression_opts": 1}
    with h5py.File(path, "w") as file:
        shape = (num_samples, NUM_STEPS, NUM_POINTS)
        tensor = file.create_dataset("tensor", shape, "f4", **(how if is_compressed else {}))
        for i in range(num_samples):
            waves = random.uniform(size=(NUM_MODES, 3))
            phases = (x - (t * waves[:, :1])[..., None]) * np.arange(1, NUM_MODES + 1)[:, None, None]
            amplitudes = waves[:, 1, None, None]
            tensor[i] = (amplitudes * np.sin(2 * np.pi * (phases + waves[:, 2, None, None]))).sum(0)
        file["x-coordinate"] = x.astype(np.float32)
        file["t-coordinate"] = np.linspace(0, 2, NUM_STEPS + 1, dtype=np.float32)
        file.attrs["Nu"] = 0.01


def make_checkpoint(path: Path) -> None:
    """The demo's autoencoder."""
    torch.manual_seed(0)
    grid = GridSpec((NUM_POINTS // REDUCE_SPACE,), (True,), (("fields", 1),))
    task = TaskSpec(grid, ("u",), steady=False, statistics={"fields": {"mean": [0.0], "std": [1.0]}})
    sizes = {"width": 64, "depth": 3, "num_heads": 4}
    spec = AutoencoderSpec(
        {TASK: task},
        ("nu",),
        latent_dim=4,
        num_tokens=32,
        patch_size=8,
        encoder=sizes,
        decoder={**sizes, "radius": 1},
    )
    save_autoencoder(path, Autoencoder(spec), config={}, report={})


class _Latents(Bench):
    """Three stages over the same samples: each alone, all as a pipeline, and one after the other."""

    timeout = 1800
    device, num_readers = "cpu", 1

    def setup(self, source: str) -> None:
        root = self.make_sources(source)
        self.checkpoint = self.folder.path / "autoencoder.safetensors"
        make_checkpoint(self.checkpoint)
        self.config = self._configured(root)
        self.readers = Readers(self.config.reading, note=lambda message: None)
        self.pool = self.readers.pool
        self.plan = plan_store(self.config, TASK, "train", readers=self.readers)
        self.content = self.plan.identity(DigestCache(self.config.cache.dir), lambda nbytes: None)
        self.everything = np.arange(self.plan.num_samples)
        assert isinstance(self.plan.encoder, OverlappingEncoder)
        self.plan.encoder.prepare()
        self.encoder = self.plan.encoder
        self.batches = [
            (batch.samples, {name: np.array(values) for name, values in batch.arrays.items()})
            for batch in self._read()
        ]
        self.encoded = [
            (rows, self._cast(self.encoder.encode(batch, samples=rows))) for rows, batch in self.batches
        ]
        self.sequential = LatentEncoder.load(self.checkpoint, device=self.device)
        self.file = h5py.File(root / SOURCE)
        self.tensor = self.file["tensor"]
        self.check()

    def make_sources(self, source: str) -> Path:
        """Make the HDF5 file, and return its folder."""
        root = self.folder.path / "data"
        root.mkdir()
        num_samples = SCALE.write_mib * MIB // (4 * NUM_STEPS * NUM_POINTS)
        make_solutions(root / SOURCE, num_samples=num_samples, is_compressed=source == "compressed")
        return root

    def _cast(self, arrays: Arrays) -> Arrays:
        return {name: value.astype(self.plan.arrays[name].dtype) for name, value in arrays.items()}

    def _configured(self, root: Path) -> BuildConfig:
        cache = self.folder.path / "cache"
        cache.mkdir()
        return load_config(
            flags={
                "data.tasks": TASK,
                "data.split": "train",
                "data.split_fractions": [1, 0, 0],
                "data.root": str(root),
                "data.reduce_time": REDUCE_TIME,
                "data.reduce_space": REDUCE_SPACE,
                "data.source_digest": "sampled",
                "cache.dir": str(cache),
                "cache.dtype": "float16",
                "reading.num_workers": self.num_readers,
                "latent.checkpoint": str(self.checkpoint),
                "latent.device": self.device,
            }
        )

    def check(self) -> None:
        """The pipeline's latents are those of the sequential way."""
        self.pipeline(0)
        with ups_store.open(self.plan.path) as store:
            for i in (0, len(store) - 1):
                found = store["latent"][i].astype(np.float32)
                np.testing.assert_allclose(found, self.encode_one(i).numpy(), atol=5e-3)

    @property
    def pt_folder(self) -> Path:
        return self.folder.path / "pt"

    def _read(self) -> Any:
        return read_batches(self.plan, self.everything, on_nan="fail", readers=self.readers)

    def read(self, i: int) -> None:
        for _ in self._read():
            pass

    def encode(self, i: int) -> None:
        finish: Callable[[], object] = lambda: None  # noqa: E731
        for rows, batch in self.batches:
            following = self.encoder.begin(batch, samples=rows)
            finish()
            finish = following
        finish()

    def commit(self, i: int) -> None:
        with self._writer() as writer:
            for rows, arrays in self.encoded:
                writer.commit_many(rows, arrays)
            writer.finish()

    def pipeline(self, i: int) -> None:
        """What a build does once its sources are known."""
        with self._writer() as writer:
            filling = Filling(
                self.plan, writer, self.readers, watcher=Watcher(), clock=Stopwatch(), on_nan="fail"
            )
            filling.fill(self.everything)
            writer.finish()

    def _writer(self) -> ups_store.StoreWriter:
        plan = self.plan
        return ups_store.create(
            plan.path, plan.arrays, constants=plan.constants, dims=plan.dims, identity=self.content
        )

    def write_pt(self, i: int) -> None:
        """As the earlier system: read a sample, encode its frames, write a file, and only then the next."""
        self.pt_folder.mkdir(exist_ok=True)
        for number in range(len(self.tensor)):
            sample = {"latent": self.encode_one(number).half(), "nu": 0.01}
            torch.save(sample, self.pt_folder / f"sample_{number:05d}.pt")

    def encode_one(self, number: int) -> torch.Tensor:
        """Latents of one sample, read from the file, shape (T, L, D)."""
        frames = self.tensor[number, ::REDUCE_TIME, ::REDUCE_SPACE][None, ..., None]
        encoded = self.sequential.encode({"fields": frames, "nu": np.full(1, 0.01)})
        return torch.from_numpy(encoded["latent"][0])

    def from_scratch(self, function: Callable[[int], None]) -> Callable[[int], float]:
        """The function, timed, with nothing left of what it wrote before."""

        def call(i: int) -> float:
            self.plan.path.unlink(missing_ok=True)
            shutil.rmtree(self.pt_folder, ignore_errors=True)
            self.folder.remove()
            return timed(function)(i)

        return call


class OverSlowestStage(_Latents):
    params = ("contiguous", "compressed")
    param_names = ("source",)

    def slowest(self, i: int) -> float:
        return max(self.from_scratch(stage)(i) for stage in (self.read, self.encode, self.commit))

    # Decoding a compressed source wants the cores that the encoder has when it is alone.
    @tracked(
        "reading, encoding and committing as a pipeline, over the slowest of them alone",
        TIME,
        at_most={"contiguous": 1.15},
    )
    def track_pipeline_over_slowest_stage(self, source: str) -> Comparison:
        return compare(self.from_scratch(self.pipeline), self.slowest, pairs=SCALE.write_pairs)


class OverBound(_Latents):
    """Over what the cores allow: the processor time of the stages by their number, or the slowest stage."""

    params = ("compressed",)
    param_names = ("source",)

    def processor_s(self) -> float:
        """Of this process and of the readers that it has."""
        pids = [reader.pid for reader in self.readers.pool.status().readers]
        others = [psutil.Process(pid).cpu_times() for pid in pids]
        return time.process_time() + sum(times.user + times.system for times in others)

    def bound(self, i: int) -> float:
        seconds, processor = [], []
        for stage in (self.read, self.encode, self.commit):
            before = self.processor_s()
            seconds.append(self.from_scratch(stage)(i))
            processor.append(self.processor_s() - before)
        return max(*seconds, sum(processor) / num_cores())

    @tracked(
        "reading, encoding and committing as a pipeline, over their processor time by the cores",
        TIME,
        at_most=1.2,
    )
    def track_pipeline_over_bound(self, source: str) -> Comparison:
        return compare(self.from_scratch(self.pipeline), self.bound, pairs=SCALE.write_pairs)


class OverEncoding(_Latents):
    params = ("contiguous",)
    param_names = ("source",)

    @tracked("a build of latents, over encoding what is in memory", RATE, at_least=0.9)
    def track_pipeline_over_encoding(self, source: str) -> Comparison:
        return compare(self.from_scratch(self.pipeline), timed(self.encode), pairs=SCALE.write_pairs)


class OverSequential(_Latents):
    params = ("contiguous", "compressed")
    param_names = ("source",)

    @tracked("a build of latents, over a sample at a time into .pt files", RATE, at_least={"compressed": 1.5})
    def track_pipeline_over_pt(self, source: str) -> Comparison:
        return compare(
            self.from_scratch(self.pipeline), self.from_scratch(self.write_pt), pairs=SCALE.write_pairs
        )


class BuildAgain(Bench):
    """The command once more when all is valid: the weights are hashed, torch isn't imported."""

    def setup(self) -> None:
        root = self.folder.path / "data"
        root.mkdir()
        num_samples = SCALE.write_mib * MIB // (4 * NUM_STEPS * NUM_POINTS)
        make_solutions(root / SOURCE, num_samples=num_samples, is_compressed=False)
        checkpoint = self.folder.path / "autoencoder.safetensors"
        make_checkpoint(checkpoint)
        words = ["--tasks", TASK, "--root", str(root), "--cache-dir", str(self.folder.path / "cache")]
        words += ["cache.dtype=float16", f"latent.checkpoint={checkpoint}", "latent.device=cpu"]
        words += [f"data.reduce_time={REDUCE_TIME}", f"data.reduce_space={REDUCE_SPACE}"]
        self.arguments = ["ups_store.build", *words]
        self.build(0)
        expect_nothing_to_do(self.arguments)

    def build(self, i: int) -> None:
        subprocess.run([sys.executable, "-m", *self.arguments], check=True, capture_output=True)

    @tracked("second run of a build of latents: the stores are valid, weights hashed", "s", at_most=1.0)
    def track_second_run(self) -> float:
        return median_s(self.build, repeats=SCALE.process_pairs)
