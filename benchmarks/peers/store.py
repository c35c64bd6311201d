"""Ours: a store, read through `gather`, `make_loader`, and a DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import ups_store
from benchmarks.harness.inputs import NAME, Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items, Samples
from ups_store import ArraySpec
from ups_store.torch import StoreDataset, make_loader


class UpsStore(Peer):
    """With the defaults: durable commits of one batch each, checksums, mapped."""

    name = "ups_store"
    package = "ups-store"
    has_preload = True

    def __init__(self, folder: Path, samples: Samples) -> None:
        super().__init__(folder, samples)
        self._path = folder / "samples.zarr.zip"

    def write(self, values: Floats) -> None:
        spec = ArraySpec(values.shape, "float32", dims=("sample", "time", "x"))
        with ups_store.create(self._path, {NAME: spec}, identity={"made_for": "a benchmark"}) as writer:
            for first in range(0, len(values), self.samples.batch):
                indices = np.arange(first, min(len(values), first + self.samples.batch))
                writer.commit_many(indices, {NAME: values[indices[0] : indices[-1] + 1]})
            writer.finish()

    def open(self) -> None:
        self._store = ups_store.open(self._path)
        self._out = None
        self._window_out = None

    def close(self) -> None:
        self._store.close()
        del self._store, self._out, self._window_out

    def preload(self) -> None:
        self._store.preload(mode="page-cache")

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self._store.sample(index)[NAME].copy())

    def batch(self, indices: Items) -> Tensor:
        self._out = self._store.gather(indices, [NAME], out=self._out)
        return torch.from_numpy(self._out[NAME])

    def windows(self, indices: Items, starts: Items, length: int) -> Tensor:
        out = self._window_out
        self._window_out = self._store.gather(indices, [NAME], start=starts, length=length, out=out)
        return torch.from_numpy(self._window_out[NAME])

    def loader(self, num_workers: int) -> Iterable[Tensor]:
        dataset = StoreDataset(self._path)
        if not num_workers:
            return _Fields(make_loader(dataset, batch_size=self.samples.batch, drop_last=True, shuffle=True))
        return _Fields(
            DataLoader(
                dataset,
                batch_size=self.samples.batch,
                shuffle=True,
                drop_last=True,
                num_workers=num_workers,
                persistent_workers=True,
            )
        )


class _Fields:
    """The one array of every batch."""

    def __init__(self, batches: Iterable[dict[str, Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._batches:
            yield batch[NAME]
