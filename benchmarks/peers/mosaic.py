"""MosaicML Streaming: samples in MDS shards."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer


class MosaicStreaming(Peer):
    """Shards of 64 MB; epochs through a DataLoader, as its documentation says."""

    name = "MosaicML Streaming"
    package = "mosaicml-streaming"

    def write(self, values: Floats) -> None:
        shape = ",".join(str(n) for n in values.shape[1:])
        columns = {"fields": f"ndarray:float32:{shape}"}
        with MDSWriter(out=str(self.folder / "samples"), columns=columns, size_limit=1 << 26) as writer:
            for value in values:
                writer.write({"fields": value})

    def _dataset(self, *, shuffle: bool) -> StreamingDataset:
        clean_stale_shared_memory()
        path, batch = str(self.folder / "samples"), self.samples.batch
        return StreamingDataset(local=path, shuffle=shuffle, batch_size=batch)

    def open(self) -> None:
        self._rows = self._dataset(shuffle=False)

    def close(self) -> None:
        del self._rows

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self._rows[index]["fields"]))

    def loader(self, num_workers: int) -> Iterable[Tensor]:
        return DataLoader(
            self._dataset(shuffle=True),
            batch_size=self.samples.batch,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=_stack,
        )


def _stack(rows: list[dict[str, Floats]]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(row["fields"])) for row in rows])
