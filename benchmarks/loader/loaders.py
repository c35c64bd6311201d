"""Shuffled epochs in an empty loop: `make_loader`, and a `DataLoader` with workers, over np.memmap's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.inputs import NAME, Bench, Floats, check, make_store, values_of
from benchmarks.harness.measure import RATE, Comparison, compare, timed, tracked
from benchmarks.harness.scale import MIB, SCALE
from ups_store.torch import StoreDataset, make_loader

BATCH = 64
NUM_WORKERS = 2


class Epochs(Bench):
    """The same samples as a store and as a `.npy` file."""

    def prepare(self, sample_bytes: int) -> None:
        self.num_samples = SCALE.store_mib * MIB // sample_bytes
        path = self.folder.path / "store.zarr.zip"
        with make_store(path, num_samples=self.num_samples, sample_bytes=sample_bytes) as store:
            np.save(self.folder.path / "samples.npy", store[NAME])
        self.mapped = np.load(self.folder.path / "samples.npy", mmap_mode="c")
        self.dataset = StoreDataset(path)
        self.nbytes = self.num_samples // BATCH * BATCH * sample_bytes

    def check_batch(self, index: Tensor, values: Tensor) -> None:
        check(values.numpy(), values_of(index.numpy(), values[0].nbytes))

    def over(
        self, ours: Callable[[int], None], reference: Callable[[int], None], *, pairs: int
    ) -> Comparison:
        return compare(timed(ours), timed(reference), pairs=pairs, nbytes=self.nbytes)


class Loop(Epochs):
    """Without workers: the reference is what people write, indexing a map with a shuffled batch."""

    params = (102_400, 4096)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.prepare(sample_bytes)
        self.loader = make_loader(self.dataset, batch_size=BATCH, drop_last=True, shuffle=True)
        batch = next(iter(self.loader))
        self.check_batch(batch["index"], batch[NAME])

    def loaded(self, _: int) -> None:
        _run(self.loader)

    def indexed(self, i: int) -> None:
        order = np.random.default_rng(i).permutation(self.num_samples)
        _run(
            torch.from_numpy(self.mapped[order[first : first + BATCH]])
            for first in range(0, self.num_samples - BATCH + 1, BATCH)
        )

    @tracked("shuffled epoch of make_loader, over indexing np.memmap", RATE, at_least={102_400: 0.95})
    def track_over_memmap(self, sample_bytes: int) -> Comparison:
        return self.over(self.loaded, self.indexed, pairs=SCALE.process_pairs)


class Workers(Epochs):
    """With a DataLoader's worker processes, which were started before."""

    params = (102_400, 4096)
    param_names = ("sample_bytes",)

    def setup(self, sample_bytes: int) -> None:
        self.prepare(sample_bytes)
        self.ours, self.memmap = _loader(self.dataset), _loader(_Mapped(self.mapped))
        batch = next(iter(self.ours))
        self.check_batch(batch["index"], batch[NAME])

    @tracked(
        f"shuffled epoch of DataLoader(store, num_workers={NUM_WORKERS}), over np.memmap's",
        RATE,
        at_least={102_400: 1.0},
    )
    def track_over_memmap(self, sample_bytes: int) -> Comparison:
        ours, memmap = self.ours, self.memmap
        return self.over(lambda _: _run(ours), lambda _: _run(memmap), pairs=SCALE.process_pairs)


class _Mapped(Dataset[Tensor]):
    """Samples of a map, as views, which default collate stacks in shared memory."""

    def __init__(self, mapped: Floats) -> None:
        self._mapped = torch.from_numpy(mapped)

    def __len__(self) -> int:
        return len(self._mapped)

    def __getitem__(self, index: int) -> Tensor:
        return self._mapped[index]


def _loader(dataset: Dataset[object]) -> Iterable[object]:
    return DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        multiprocessing_context="fork",
    )


def _run(batches: Iterable[object]) -> None:
    for _ in batches:
        pass
