"""HDF5 through h5py: one dataset, a chunk per sample."""

from __future__ import annotations

import h5py
import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class Hdf5(Peer):
    """Samples are read one by one into a reused batch: h5py's fancy index is several times slower."""

    name = "HDF5"
    package = "h5py"

    def write(self, values: Floats) -> None:
        with h5py.File(self.folder / "samples.h5", "w") as file:
            file.create_dataset("fields", data=values, chunks=(1, *values.shape[1:]))

    def open(self) -> None:
        self._file = h5py.File(self.folder / "samples.h5", "r")
        self._values = self._file["fields"]
        self._out = np.empty((self.samples.batch, *self._values.shape[1:]), np.float32)

    def close(self) -> None:
        self._file.close()
        del self._file, self._values, self._out

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self._values[index])

    def batch(self, indices: Items) -> Tensor:
        for row, index in enumerate(indices.tolist()):
            self._values.read_direct(self._out, np.s_[index], np.s_[row])
        return torch.from_numpy(self._out[: len(indices)])

    def window(self, index: int, start: int, length: int) -> Tensor:
        return torch.from_numpy(self._values[index, start : start + length])
