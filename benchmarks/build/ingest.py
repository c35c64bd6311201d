"""Reading sources: readers over h5py alone, over each other, and what supervising them costs."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

import ups_store
from benchmarks.build.build import SOURCE, TASK, make_source
from benchmarks.harness.inputs import Bench, check, values_of
from benchmarks.harness.measure import RATE, TIME, Comparison, compare, median_s, timed, tracked
from benchmarks.harness.scale import MIB, SCALE
from ups_store.building.config import load_config
from ups_store.building.progress import Watcher
from ups_store.building.read import BATCH_BYTES
from ups_store.building.stores import build_all
from ups_store.sources.contents import EVERYTHING
from ups_store.sources.reader_pool import ReadBatch, ReaderPool
from ups_store.sources.reader_process import ALIGN, Reader, ReadRequest
from ups_store.sources.tasks import get_task

GROUPS_TASK, GROUPS = "diffreact2d", "2D_diff-react_NA_NA.h5"
GROUP_SHAPE = (101, 128, 128, 2)  # PDEBench's
GROUP_BYTES = 4 * 101 * 128 * 128 * 2


def make_groups(path: Path, num_samples: int) -> None:
    """Reaction-diffusion in PDEBench's layout, a compressed group per sample."""
    axes = {"t": GROUP_SHAPE[0], "x": GROUP_SHAPE[2], "y": GROUP_SHAPE[1]}
    with h5py.File(path, "w") as file:
        for i in range(num_samples):
            data = values_of([i], GROUP_BYTES).reshape(GROUP_SHAPE)
            file.create_dataset(f"{i:04}/data", data=data, compression="gzip", shuffle=True)
            for axis, length in axes.items():
                file[f"{i:04}/grid/{axis}"] = np.linspace(0, 1, length, dtype=np.float32)


def requests_of(
    path: Path, *, task: str, num_samples: int, sample_bytes: int, checked: bool = True
) -> list[ReadRequest]:
    """All samples in a build's batches; checked: NaN looked for and ranges taken, as builds do."""
    size = max(1, BATCH_BYTES // sample_bytes)
    batches = [np.arange(i, min(i + size, num_samples)) for i in range(0, num_samples, size)]
    checks = {"check_finite": checked, "with_ranges": checked}
    return [
        ReadRequest(path, get_task(task), EVERYTHING, batch, batch, {"fields": "float32"}, **checks)
        for batch in batches
    ]


class _Pool:
    """Readers that have started and opened the file."""

    def __init__(self, requests: Sequence[ReadRequest], *, num_workers: int, sample_bytes: int) -> None:
        nbytes = max(len(request.samples) for request in requests) * sample_bytes
        slot_nbytes = -(-nbytes // ALIGN) * ALIGN
        self.pool = ReaderPool(num_workers, slot_nbytes=slot_nbytes)
        self.requests = requests

    def read(self, i: int) -> None:
        for _ in self.pool.read(self.requests):
            pass

    def close(self) -> None:
        self.pool.close()

    def batches(self) -> Iterator[ReadBatch]:
        for item in self.pool.read(self.requests):
            assert isinstance(item, ReadBatch)
            yield item


class Contiguous(Bench):
    params = ("left out", "made")  # NaN looked for and ranges taken, as builds do
    param_names = ("checks",)

    def setup(self, checks: str) -> None:
        path = self.folder.path / SOURCE
        make_source(path, 4 * SCALE.write_mib * MIB)
        self.file = h5py.File(path)
        self.tensor = self.file["tensor"]
        num_samples, sample_bytes = len(self.tensor), self.tensor[0].nbytes
        requests = requests_of(
            path, task=TASK, num_samples=num_samples, sample_bytes=sample_bytes, checked=checks == "made"
        )
        self.readers = _Pool(requests, num_workers=1, sample_bytes=sample_bytes)
        self.out = np.empty((len(requests[0].samples), *self.tensor.shape[1:]), np.float32)
        for batch in self.readers.batches():
            rows = slice(batch.samples[0], batch.samples[-1] + 1)
            check(batch.arrays["fields"][..., 0], self.tensor[rows])

    def read_direct(self, i: int) -> None:
        """As fast as h5py reads, in one process, into memory that was used before."""
        for request in self.readers.requests:
            first, num = int(request.samples[0]), len(request.samples)
            self.tensor.read_direct(self.out, np.s_[first : first + num], np.s_[:num])

    @tracked("one reader of a contiguous file, over h5py.read_direct", RATE, at_least={"left out": 0.9})
    def track_reader_over_read_direct(self, checks: str) -> Comparison:
        pairs, nbytes = 4 * SCALE.write_pairs, self.tensor.nbytes
        return compare(timed(self.readers.read), timed(self.read_direct), pairs=pairs, nbytes=nbytes)


class _Compressed(Bench):
    num_samples: int
    num_workers: tuple[int, ...]

    def setup(self) -> None:
        path = self.folder.path / GROUPS
        make_groups(path, self.num_samples)
        self.nbytes = self.num_samples * GROUP_BYTES
        requests = requests_of(path, task=GROUPS_TASK, num_samples=self.num_samples, sample_bytes=GROUP_BYTES)
        self.pools = [_Pool(requests, num_workers=num, sample_bytes=GROUP_BYTES) for num in self.num_workers]
        for readers in self.pools:
            for batch in readers.batches():
                check(batch.arrays["fields"][0].ravel(), values_of(batch.samples[:1], GROUP_BYTES)[0])

    def teardown(self) -> None:
        for readers in self.pools:
            readers.close()
        super().teardown()


class CompressedGroups(_Compressed):
    num_samples = SCALE.write_mib // 32 * 2  # a reader gets as many as the other
    num_workers = (2, 1)

    @tracked("two readers of compressed groups, over one", RATE, at_least=1.6)
    def track_two_readers_over_one(self) -> Comparison:
        two, one = (timed(readers.read) for readers in self.pools)
        return compare(two, one, pairs=SCALE.write_pairs, nbytes=self.nbytes)


@functools.cache
def _silent_reader() -> Reader:
    """The only one of this process: it reports nothing, and its files stay open."""
    return Reader()


@dataclass(frozen=True)
class SilentRead:
    """Many batches that a reader process reads without a word between them: supervised once."""

    requests: Sequence[ReadRequest]  # all of the same arrays in the same shapes
    subject = "all samples"
    first_sample = None

    @property
    def path(self) -> Path:
        """The file of the first batch."""
        return self.requests[0].path

    def run(self, reader: Reader) -> None:
        """Read every batch to the same place in the slot."""
        place = functools.cache(lambda name, shape, dtype: reader.place(name, shape, dtype))
        for number, request in enumerate(self.requests):
            _silent_reader().run(request, request_id=number, place=place)


class Supervision(_Compressed):
    """The same reader process with and without: two equal processes differ by more than is looked for."""

    num_samples = 8
    num_workers = (1,)

    def read_supervised(self, i: int) -> None:
        self.pools[0].read(i)

    def read_unsupervised(self, i: int) -> None:
        self.pools[0].pool.ask(SilentRead(self.pools[0].requests))

    @tracked("deadlines, heartbeats and hand-over of a reader, over its reads without", TIME, at_most=1.02)
    def track_supervised_over_unsupervised(self) -> Comparison:
        supervised, unsupervised = timed(self.read_supervised), timed(self.read_unsupervised)
        return compare(supervised, unsupervised, pairs=10 * SCALE.write_pairs, nbytes=self.nbytes)


class WholeBuild(Bench):
    """Plan, digest, start of a reader, read, check, commit durably, finish: all but the start of Python."""

    params = ("sampled", "full")
    param_names = ("source_digest",)

    def setup(self, source_digest: str) -> None:
        self.root = self.folder.path / "data"
        self.root.mkdir()
        self.source = self.root / SOURCE
        make_source(self.source, 4 * SCALE.write_mib * MIB)
        flags = {"data.tasks": TASK, "data.split_fractions": [1, 0, 0], "data.split": "train"}
        flags["data.source_digest"] = source_digest
        self.cache = self.folder.path / "cache"
        folders = {"data.root": str(self.root), "cache.dir": str(self.cache)}
        self.config = load_config(flags=flags | folders)
        self.build(0)
        (path,) = self.cache.glob("*.zarr.zip")
        with ups_store.open(path) as store, h5py.File(self.source) as file:
            check(store["fields"][-1, ..., 0], file["tensor"][-1])

    def build(self, i: int) -> None:
        build_all(self.config, watcher=Watcher())

    def build_from_scratch(self, i: int) -> float:
        shutil.rmtree(self.cache, ignore_errors=True)
        self.folder.remove()
        return timed(self.build)(i)

    def copy_from_scratch(self, i: int) -> float:
        self.folder.remove("copy.hdf5")
        return timed(self.copy)(i)

    def copy(self, i: int) -> None:
        copy = self.folder.path / "copy.hdf5"
        subprocess.run(["cp", "--reflink=never", self.source, copy], check=True)
        subprocess.run(["sync", copy], check=True)

    @tracked("durable build of a contiguous file, over cp and sync", RATE, at_least={"sampled": 0.6})
    def track_build_over_cp(self, source_digest: str) -> Comparison:
        nbytes = self.source.stat().st_size
        return compare(
            self.build_from_scratch, self.copy_from_scratch, pairs=SCALE.write_pairs, nbytes=nbytes
        )


class FirstSample(Bench):
    """From the start of Python to a store of one sample: the first commit is sooner still."""

    def setup(self) -> None:
        root = self.folder.path / "data"
        root.mkdir()
        make_source(root / SOURCE, SCALE.write_mib * MIB)
        self.cache = self.folder.path / "cache"
        words = ["--tasks", TASK, "--split", "train", "--limit", "1", "--num-workers", "1"]
        words += ["--source-digest", "sampled", "--root", str(root), "--cache-dir", str(self.cache)]
        self.command = [sys.executable, "-m", "ups_store.build", *words]

    def build(self, i: int) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)
        subprocess.run(self.command, check=True, capture_output=True)

    @tracked("start of a build to its first sample, with a reader, source digest aside", "s", at_most=2.0)
    def track_first_sample(self) -> float:
        return median_s(self.build, repeats=SCALE.process_pairs)
