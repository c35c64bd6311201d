"""Hugging Face datasets: Arrow files, mapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from datasets import Array2D, Dataset, Features, disable_progress_bars, load_from_disk
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items


class HuggingFace(Peer):
    """Samples as `Array2D`, given as NumPy arrays, which is their fastest format."""

    name = "HF datasets (Arrow)"
    package = "datasets"

    def write(self, values: Floats) -> None:
        disable_progress_bars()
        features = Features({"fields": Array2D(shape=values.shape[1:], dtype="float32")})

        def rows() -> Iterator[dict[str, Any]]:
            for value in values:
                yield {"fields": value}

        cache = str(self.folder.with_name(self.folder.name + "-cache"))
        made = Dataset.from_generator(rows, features=features, cache_dir=cache)
        made.save_to_disk(self.folder / "samples")

    def open(self) -> None:
        self._rows = load_from_disk(self.folder / "samples").with_format("numpy")

    def close(self) -> None:
        del self._rows

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self._rows[index]["fields"]))

    def batch(self, indices: Items) -> Tensor:
        return torch.from_numpy(np.array(self._rows[indices.tolist()]["fields"]))
