"""`BufferPool`: memory of batches that is used again once nothing refers to it any more.

New memory costs more than the copy into it: the kernel clears every page first.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

SMALL_BYTES = 64 << 10  # below, malloc reuses memory itself, and who keeps a batch's `index` keeps only that

Memory = npt.NDArray[Any]


class BufferPool:
    """Hands out uninitialised tensors; their memory comes back when the last tensor over it is gone.

    Slices, detached tensors, NumPy views and what autograd saved for backward all keep it. When nothing has
    come back there is new memory, so holding on to every batch is allowed. Usable from several threads.

    Args:
        limit: Buffers of one size that are kept for later; more are given back to the system.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._free: dict[int, deque[Memory]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in this process' memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        free = self._free.setdefault(nbytes, deque(maxlen=self._limit))
        try:
            memory = free.pop()
        except IndexError:
            memory = torch.empty(nbytes, dtype=torch.uint8).numpy()
        # The storage of the tensor, and so every tensor that shares it, holds `lent` and nothing else does.
        lent = memory.view()
        weakref.finalize(lent, free.append, memory).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)
