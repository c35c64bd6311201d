"""safetensors: a file per sample, or one file with a tensor per sample."""

from __future__ import annotations

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer


class SafetensorsMany(Peer):
    """A file per sample."""

    name = "safetensors, many files"
    package = "safetensors"

    def write(self, values: Floats) -> None:
        for index, value in enumerate(values):
            save_file({"fields": torch.from_numpy(value)}, self.folder / f"{index}.safetensors")

    def open(self) -> None:
        """Nothing stays open."""

    def sample(self, index: int) -> Tensor:
        return load_file(self.folder / f"{index}.safetensors")["fields"]

    def window(self, index: int, start: int, length: int) -> Tensor:
        with safe_open(self.folder / f"{index}.safetensors", "pt") as file:
            window: Tensor = file.get_slice("fields")[start : start + length]
            return window


class SafetensorsOne(Peer):
    """One file, a tensor per sample."""

    name = "safetensors, one file"
    package = "safetensors"

    def write(self, values: Floats) -> None:
        tensors = {str(index): torch.from_numpy(value) for index, value in enumerate(values)}
        save_file(tensors, self.folder / "samples.safetensors")

    def open(self) -> None:
        self._file = safe_open(self.folder / "samples.safetensors", "pt").__enter__()

    def close(self) -> None:
        self._file.__exit__(None, None, None)
        del self._file

    def sample(self, index: int) -> Tensor:
        tensor: Tensor = self._file.get_tensor(str(index))
        return tensor

    def window(self, index: int, start: int, length: int) -> Tensor:
        window: Tensor = self._file.get_slice(str(index))[start : start + length]
        return window
