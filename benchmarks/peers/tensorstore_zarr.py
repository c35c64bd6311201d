"""TensorStore: a Zarr v3 folder, a chunk per sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorstore
import torch
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class TensorStoreZarr(Peer):
    """Batches by one index operation, which TensorStore reads with several threads."""

    name = "TensorStore"
    package = "tensorstore"

    def _spec(self) -> dict[str, Any]:
        path = str(self.folder / "samples.zarr")
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}

    def write(self, values: Floats) -> None:
        chunks = {"name": "regular", "configuration": {"chunk_shape": [1, *values.shape[1:]]}}
        metadata = {
            "shape": list(values.shape),
            "data_type": "float32",
            "chunk_grid": chunks,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
        array = tensorstore.open({**self._spec(), "metadata": metadata}, create=True).result()
        array[...].write(values).result()

    def open(self) -> None:
        self._array = tensorstore.open(self._spec(), read=True).result()

    def close(self) -> None:
        del self._array

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(np.asarray(self._array[index].read().result()))

    def batch(self, indices: Items) -> Tensor:
        return torch.from_numpy(np.asarray(self._array[indices].read().result()))

    def window(self, index: int, start: int, length: int) -> Tensor:
        return torch.from_numpy(np.asarray(self._array[index, start : start + length].read().result()))
