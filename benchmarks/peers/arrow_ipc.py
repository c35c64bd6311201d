"""Arrow IPC: one file, one record batch, mapped."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.harness.inputs import Floats
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Items

COLUMN = "fields"


def table_of(values: Floats) -> pa.Table:
    """Samples as rows of one column: lists of one length, as Arrow has no arrays of several axes."""
    flat = pa.array(values.reshape(-1))
    return pa.table({COLUMN: pa.FixedSizeListArray.from_arrays(flat, values[0].size)})


def values_of(column: pa.ChunkedArray | pa.Array, shape: tuple[int, ...]) -> Floats:
    """Rows of that column, shape (B, *shape); a view where the column is in one piece."""
    rows = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    rows = rows.chunk(0) if isinstance(rows, pa.ChunkedArray) else rows
    values: Floats = rows.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(-1, *shape)


class ArrowIpc(Peer):
    """Batches by `index_select` from a view of the mapped column, which is faster than Arrow's own `take`."""

    name = "Arrow IPC"
    package = "pyarrow"

    def write(self, values: Floats) -> None:
        table = table_of(values)
        with pa.OSFile(str(self._path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    @property
    def _path(self) -> object:
        return self.folder / "samples.arrow"

    def open(self) -> None:
        self._file = pa.memory_map(str(self._path))
        column = pa.ipc.open_file(self._file).get_batch(0).column(COLUMN)
        values = values_of(column, (self.samples.frames, self.samples.width))
        values = np.lib.stride_tricks.as_strided(values, writeable=True)  # torch warns of what is read-only
        self._tensor = torch.from_numpy(values)
        self._out = torch.empty(self.samples.batch, *values.shape[1:])

    def close(self) -> None:
        del self._file, self._tensor, self._out

    def sample(self, index: int) -> Tensor:
        return self._tensor[index]

    def batch(self, indices: Items) -> Tensor:
        return torch.index_select(self._tensor, 0, torch.from_numpy(indices), out=self._out[: len(indices)])
