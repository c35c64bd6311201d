"""Vortex: one file, read by a scan of given rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
import vortex
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.arrow_ipc import COLUMN, table_of, values_of
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class Vortex(Peer):
    """A scan takes rising rows only, so batches are put into their order afterwards."""

    name = "Vortex"
    package = "vortex-data"

    def write(self, values: Floats) -> None:
        vortex.io.write(vortex.array(table_of(values)), str(self.folder / "samples.vortex"))

    def open(self) -> None:
        self._file = vortex.open(str(self.folder / "samples.vortex"))

    def close(self) -> None:
        del self._file

    def sample(self, index: int) -> Tensor:
        return self.batch(np.array([index]))[0]

    def batch(self, indices: Items) -> Tensor:
        rising, places = np.unique(indices, return_inverse=True)
        rows = vortex.array(pa.array(rising, pa.uint64()))
        found = self._file.scan([COLUMN], indices=rows).read_all().to_arrow_table()
        values = values_of(found[COLUMN], (self.samples.frames, self.samples.width))
        return torch.from_numpy(values[places])
