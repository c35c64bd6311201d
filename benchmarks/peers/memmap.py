"""Plain `np.memmap`: one `.npy` file, indexed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class Memmap(Peer):
    """Batches by `index_select` into a reused tensor; without workers an epoch is a plain loop."""

    name = "np.memmap"
    package = "numpy"
    has_preload = True

    def write(self, values: Floats) -> None:
        np.save(self.folder / "samples.npy", values)

    def open(self) -> None:
        # Copy-on-write: torch has no read-only tensors, and warns.
        self._values = np.load(self.folder / "samples.npy", mmap_mode="c")
        self._tensor = torch.from_numpy(self._values)
        self._out = torch.empty(self.samples.batch, *self._values.shape[1:])
        self._width = self.samples.width

    def close(self) -> None:
        del self._values, self._tensor, self._out

    def preload(self) -> None:
        torch.sum(self._tensor.view(-1)[:: 4096 // 4])

    def sample(self, index: int) -> Tensor:
        return self._tensor[index]

    def batch(self, indices: Items) -> Tensor:
        return torch.index_select(self._tensor, 0, torch.from_numpy(indices), out=self._out[: len(indices)])

    def windows(self, indices: Items, starts: Items, length: int) -> Tensor:
        frames = starts[:, None] + np.arange(length)
        return torch.from_numpy(self._values[indices[:, None], frames])

    def loader(self, num_workers: int) -> object:
        return super().loader(num_workers) if num_workers else _PlainLoop(self)


class _PlainLoop:
    """What people write first, and what a loader is measured against."""

    def __init__(self, peer: Memmap) -> None:
        self._peer = peer

    def __iter__(self) -> Iterator[Tensor]:
        if not hasattr(self._peer, "_values"):
            self._peer.open()
        num, batch = self._peer.samples.num, self._peer.samples.batch
        order = np.random.default_rng(0).permutation(num)
        for first in range(0, num - batch + 1, batch):
            yield torch.from_numpy(self._peer._values[order[first : first + batch]])
