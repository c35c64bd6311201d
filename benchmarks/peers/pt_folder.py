"""The old system: a folder of `.pt` files, read when they are used, or all at the start."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer


class PtFolder(Peer):
    """One `.pt` file per sample."""

    name = "folder of .pt"
    package = "torch"

    def write(self, values: Floats) -> None:
        for index, value in enumerate(values):
            torch.save({"fields": torch.from_numpy(value.copy())}, self.folder / f"{index}.pt")

    def open(self) -> None:
        """Nothing stays open."""

    def sample(self, index: int) -> Tensor:
        tensor: Tensor = torch.load(self.folder / f"{index}.pt", weights_only=True)["fields"]
        return tensor


class PtPreloaded(PtFolder):
    """The same, all loaded into a list by every process."""

    name = ".pt, preloaded"
    has_preload = True

    def open(self) -> None:
        self._loaded = [super(PtPreloaded, self).sample(index) for index in range(self.samples.num)]

    def close(self) -> None:
        del self._loaded

    def preload(self) -> None:
        """What `open` did."""

    def sample(self, index: int) -> Tensor:
        return self._loaded[index]
