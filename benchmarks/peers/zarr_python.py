"""zarr-python: a folder, and a ZIP file, with a chunk per sample and no compression."""

from __future__ import annotations

import numpy as np
import torch
import zarr
from torch import Tensor
from zarr.storage import LocalStore, ZipStore

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class ZarrFolder(Peer):
    """A file per chunk."""

    name = "Zarr folder"
    package = "zarr"

    def _store(self, mode: str) -> LocalStore | ZipStore:
        return LocalStore(self.folder / "samples.zarr", read_only=mode == "r")

    def write(self, values: Floats) -> None:
        store = self._store("w")
        array = zarr.create_array(
            store, shape=values.shape, chunks=(1, *values.shape[1:]), dtype="float32", compressors=None
        )
        array[:] = values
        store.close()

    def open(self) -> None:
        self._opened = self._store("r")
        self._array = zarr.open_array(self._opened, mode="r")

    def close(self) -> None:
        self._opened.close()
        del self._opened, self._array

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(np.asarray(self._array[index]))

    def batch(self, indices: Items) -> Tensor:
        return torch.from_numpy(np.asarray(self._array.oindex[indices]))

    def window(self, index: int, start: int, length: int) -> Tensor:
        return torch.from_numpy(np.asarray(self._array[index, start : start + length]))


class ZarrZip(ZarrFolder):
    """The chunks as entries of one ZIP file."""

    name = "Zarr ZIP, zarr-python"

    def _store(self, mode: str) -> LocalStore | ZipStore:
        return ZipStore(self.folder / "samples.zarr.zip", mode=mode)
