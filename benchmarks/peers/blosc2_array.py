"""blosc2: one array file, mapped, a chunk per sample."""

from __future__ import annotations

import blosc2
import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class Blosc2(Peer):
    """Not compressed, as nothing is here; samples are read one by one, which is its faster way."""

    name = "blosc2"
    package = "blosc2"

    def write(self, values: Floats) -> None:
        path, chunks = str(self.folder / "samples.b2nd"), (1, *values.shape[1:])
        blosc2.asarray(values, urlpath=path, chunks=chunks, mode="w", cparams={"clevel": 0})

    def open(self) -> None:
        self._values = blosc2.open(str(self.folder / "samples.b2nd"), mode="r", mmap_mode="r")
        self._out = np.empty((self.samples.batch, *self._values.shape[1:]), np.float32)

    def close(self) -> None:
        del self._values, self._out

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self._values[index])

    def batch(self, indices: Items) -> Tensor:
        for row, index in enumerate(indices.tolist()):
            self._out[row] = self._values[index]
        return torch.from_numpy(self._out[: len(indices)])

    def window(self, index: int, start: int, length: int) -> Tensor:
        return torch.from_numpy(self._values[index, start : start + length])
