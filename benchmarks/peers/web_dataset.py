"""WebDataset: samples in tar files, read from the front."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import webdataset
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer


class WebDataset(Peer):
    """Shards of 64 MB, shuffled by shard and in a buffer of 1000; single samples can't be asked for."""

    name = "WebDataset"
    package = "webdataset"
    is_random = False

    def write(self, values: Floats) -> None:
        pattern = str(self.folder / "samples-%06d.tar")
        with webdataset.ShardWriter(pattern, maxsize=64e6, verbose=0) as writer:
            for index, value in enumerate(values):
                writer.write({"__key__": f"{index:08d}", "npy": value})

    def open(self) -> None:
        """The iterator opens the shards."""

    def loader(self, num_workers: int) -> Iterable[Tensor]:
        shards = sorted(str(path) for path in self.folder.glob("*.tar"))
        dataset = (
            webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
            .shuffle(1000)
            .decode()
            .to_tuple("npy")
            .batched(self.samples.batch, partial=False)
            .map(_first)
        )
        return DataLoader(
            dataset, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0
        )


def _first(batch: tuple[Floats]) -> Tensor:
    return torch.as_tensor(batch[0])
