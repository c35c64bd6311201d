"""`BufferPool`: memory of batches that is used again once nothing refers to it any more.

New memory costs more than the copy into it: the kernel clears every page first.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SMALL_BYTES = 64 << 10  # below, malloc reuses memory itself, and who keeps a batch's `index` keeps only that

Memory = npt.NDArray[Any]


class _Lent(np.ndarray[Any, np.dtype[Any]]):
    """A view of a buffer that gives it back when the last tensor over it is gone.

    Attributes:
        home: Where the buffer goes.
    """

    # Not `weakref.finalize`: between two copies the caches hold nothing of ours, and then it takes 30 µs.
    home: deque[Memory]

    def __del__(self) -> None:
        if self.base is not None:
            self.home.append(self.base)  # the newest is handed out first: some of it is still in a cache


class BufferPool:
    """Hands out uninitialised tensors; their memory comes back when the last tensor over it is gone.

    Slices, detached tensors, NumPy views and what autograd saved for backward all keep it. When nothing has
    come back there is new memory, so holding on to every batch is allowed. Usable from several threads.

    Args:
        limit: Buffers of one shape and dtype that are kept for later; more are given back to the system.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._free: dict[tuple[tuple[int, ...], torch.dtype], deque[Memory]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Without the buffers: threads may be giving some back meanwhile.
        return {"_limit": self._limit, "_free": {}}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in this process' memory."""
        if math.prod(shape) * dtype.itemsize < SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        free = self._free.get((shape, dtype))
        if free is None:  # `setdefault`: two threads may come here at the same time
            free = self._free.setdefault((shape, dtype), deque(maxlen=self._limit))
        try:
            memory = free.pop()
        except IndexError:
            memory = _new_memory(shape, dtype)
        # The storage of the tensor, and so every tensor that shares it, holds `lent` and nothing else does.
        lent = memory.view(_Lent)
        lent.home = free
        tensor = torch.from_numpy(lent)
        return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _new_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Memory:
    stored = torch.int16 if dtype == torch.bfloat16 else dtype  # which NumPy doesn't have
    memory: Memory = torch.empty(shape, dtype=stored).numpy()
    return memory
