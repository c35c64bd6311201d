"""LitData: samples in chunk files, streamed by its own loader."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.cache import Cache
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer


class LitData(Peer):
    """Chunks of 64 MB; epochs through `StreamingDataLoader`."""

    name = "LitData"
    package = "litdata"

    def write(self, values: Floats) -> None:
        cache = Cache(str(self.folder / "samples"), chunk_bytes="64MB")
        for index, value in enumerate(values):
            cache[index] = torch.from_numpy(value)
        cache.done()
        cache.merge()

    def _dataset(self) -> StreamingDataset:
        return StreamingDataset(str(self.folder / "samples"), shuffle=True, drop_last=True)

    def open(self) -> None:
        self._rows = StreamingDataset(str(self.folder / "samples"))

    def close(self) -> None:
        del self._rows

    def sample(self, index: int) -> Tensor:
        tensor: Tensor = self._rows[index]
        return tensor

    def loader(self, num_workers: int) -> Iterable[Tensor]:
        return StreamingDataLoader(
            self._dataset(),
            batch_size=self.samples.batch,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            drop_last=True,
        )
