"""`Rows`: copies samples of one array, or windows of them, into tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups_store.read.order import Items
from ups_store.read.store import Store
from ups_store.torch.memory import as_array, torch_dtype

SCRATCH_BYTES = 1 << 20  # of rows before conversion: stays in the second-level cache


class Rows:
    """Samples of one array, or windows of them.

    Args:
        store: The store.
        name: Its array.
        length: Time steps of a window; None for whole samples.
        stride: Time steps from one to the next.

    Attributes:
        dtype: Dtype of the array.
        shape: Shape of one copied sample, `(length, ...)` for windows.
    """

    def __init__(self, store: Store, name: str, *, length: int | None = None, stride: int = 1) -> None:
        spec = store.arrays[name]
        self._store, self._name, self._length, self._stride = store, name, length, stride
        self.dtype = torch_dtype(np.dtype(spec.dtype))
        self.shape: tuple[int, ...] = tuple(spec.shape[1:]) if length is None else (length, *spec.shape[2:])

    def gather(self, samples: Items, starts: Items | None, out: Tensor) -> None:
        """Copy samples, or windows from time steps `starts` on.

        Args:
            samples: Sample numbers, all valid, int64, shape (B,).
            starts: First time step of each window, all valid, int64, shape (B,); None for whole samples.
            out: Contiguous output of B * prod(`shape`) elements; converted to if it has another dtype.
        """
        rows = out.view(len(samples), *self.shape)
        if out.dtype == self.dtype or not out.numel():
            self._copy(samples, starts, rows)
            return
        num = min(len(samples), max(1, SCRATCH_BYTES // (math.prod(self.shape) * self.dtype.itemsize)))
        scratch = torch.empty((num, *self.shape), dtype=self.dtype)
        for first in range(0, len(samples), num):
            part = slice(first, first + num)
            copied = scratch[: len(rows[part])]
            self._copy(samples[part], None if starts is None else starts[part], copied)
            rows[part].copy_(copied)  # several times faster than NumPy's conversion of float16

    def _copy(self, samples: Items, starts: Items | None, out: Tensor) -> None:
        window: dict[str, Any] = {}
        if self._length is not None:
            window = {"start": starts, "length": self._length, "stride": self._stride}
        self._store.gather(samples, [self._name], out={self._name: as_array(out)}, **window)
