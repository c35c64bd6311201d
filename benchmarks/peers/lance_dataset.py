"""Lance: a dataset of one column, read by `take`."""

from __future__ import annotations

import lance
import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.arrow_ipc import COLUMN, table_of, values_of
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class Lance(Peer):
    """A row per sample; rows come into new memory."""

    name = "Lance"
    package = "pylance"

    def write(self, values: Floats) -> None:
        lance.write_dataset(table_of(values), str(self.folder / "samples.lance"))

    def open(self) -> None:
        self._rows = lance.dataset(str(self.folder / "samples.lance"))

    def close(self) -> None:
        del self._rows

    def sample(self, index: int) -> Tensor:
        return self.batch(np.array([index]))[0]

    def batch(self, indices: Items) -> Tensor:
        rows = self._rows.take(indices.tolist(), columns=[COLUMN])
        values = values_of(rows[COLUMN], (self.samples.frames, self.samples.width))
        return torch.from_numpy(np.require(values, requirements="W"))
