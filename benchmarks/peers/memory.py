"""The limit: bytes that lie in memory already, copied from contiguous places by one memcpy each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class Memcpy(Peer):
    """An array in RAM, indexed; an epoch is as many block copies as there are batches."""

    name = "memcpy (the limit)"

    def write(self, values: Floats) -> None:
        del values

    def open(self) -> None:
        self._values = self.samples.values(np.arange(self.samples.num))
        self._out = np.empty_like(self._values[: self.samples.batch])

    def close(self) -> None:
        del self._values, self._out

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self._values[index])

    def batch(self, indices: Items) -> Tensor:
        np.take(self._values, indices, axis=0, out=self._out[: len(indices)], mode="clip")
        return torch.from_numpy(self._out[: len(indices)])

    def windows(self, indices: Items, starts: Items, length: int) -> Tensor:
        return torch.from_numpy(self._values[indices[:, None], starts[:, None] + np.arange(length)])

    def loader(self, num_workers: int) -> _Copies:
        return _Copies(self)

    def copies(self) -> Iterator[Tensor]:
        num, batch = self.samples.num, self.samples.batch
        for first in np.random.default_rng(0).integers(0, num - batch + 1, num // batch).tolist():
            np.copyto(self._out, self._values[first : first + batch])
            yield torch.from_numpy(self._out)


class _Copies:
    """One epoch per iteration."""

    def __init__(self, peer: Memcpy) -> None:
        self._peer = peer

    def __iter__(self) -> Iterator[Tensor]:
        if not hasattr(self._peer, "_values"):
            self._peer.open()
        return self._peer.copies()
