"""TensorDict: a mapped folder, and its `.tdz` archive."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class TensorDictFolder(Peer):
    """Mapped tensors in a folder, indexed as a TensorDict."""

    name = "TensorDict memmap"
    package = "tensordict"

    def write(self, values: Floats) -> None:
        fields = {"fields": torch.from_numpy(values)}
        TensorDict(fields, batch_size=[len(values)]).memmap(self.folder / "samples")

    def open(self) -> None:
        self._rows = TensorDict.load_memmap(self.folder / "samples")

    def close(self) -> None:
        del self._rows

    def sample(self, index: int) -> Tensor:
        tensor: Tensor = self._rows[index]["fields"]
        return tensor

    def batch(self, indices: Items) -> Tensor:
        tensor: Tensor = self._rows[torch.from_numpy(indices)]["fields"]
        return tensor


class TensorDictArchive(TensorDictFolder):
    """One file; its tensor is indexed with `index_select` into a reused one, which is faster."""

    name = "TensorDict .tdz"

    def write(self, values: Floats) -> None:
        fields = {"fields": torch.from_numpy(values)}
        TensorDict(fields, batch_size=[len(values)]).save(self.folder / "samples.tdz")

    def open(self) -> None:
        self._rows = TensorDict.load(self.folder / "samples.tdz")
        self._tensor = self._rows["fields"].as_subclass(Tensor)
        self._out = torch.empty(self.samples.batch, *self._tensor.shape[1:])

    def close(self) -> None:
        super().close()
        del self._tensor, self._out

    def sample(self, index: int) -> Tensor:
        return self._tensor[index]

    def batch(self, indices: Items) -> Tensor:
        return torch.index_select(self._tensor, 0, torch.from_numpy(indices), out=self._out[: len(indices)])
