"""Tensors over a store's memory, and memory for new ones.

`BufferPool`: memory of batches that is used again once nothing refers to it any more.

New memory costs more than the copy into it: the kernel clears every page first.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.format.metadata import dtype_of
from ups_store.system import files

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


@functools.cache  # NumPy works the name of a dtype out each time, for 3 µs
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of the same name; every dtype of the format has one."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory of this process."""
    return torch.empty(shape, dtype=dtype)


def shared_copy(tensor: Tensor) -> Tensor:
    """A copy in memory that other processes can map, made by a write call.

    Filling new shared memory through a mapping faults once per page, which takes twice as long as this.
    """
    fd = files.create_anonymous("ups_store_batch")
    try:
        files.write_at(fd, 0, tensor.reshape(-1).view(torch.uint8).numpy().data)
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, tensor.nbytes)  # type: ignore[attr-defined]
    finally:
        files.close(fd)  # the storage has a descriptor of its own
    return torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape)


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """A writable array as a tensor over the same memory."""
    dtype = torch_dtype(array.dtype)
    if dtype == torch.bfloat16:  # which torch doesn't take from NumPy
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array)


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """A contiguous tensor as an array over the same memory."""
    if tensor.dtype == torch.bfloat16:  # which torch doesn't give to NumPy
        return tensor.view(torch.int16).numpy().view(dtype_of("bfloat16"))
    return tensor.numpy()


def writable(view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array of a store over the same memory without the read-only flag, which torch doesn't know.

    What is changed there is seen by this process only: the mapping is private and the file stays as it is.
    """
    if view.size == 0:
        return np.empty(view.shape, view.dtype)
    return np.ndarray(view.shape, view.dtype, view.base, offset_in_base(view), view.strides)


def offset_in_base(view: npt.NDArray[Any]) -> int:
    """First byte of a view in the buffer that it lies in."""
    assert view.base is not None
    return int(view.ctypes.data - np.frombuffer(view.base, np.uint8).ctypes.data)


SMALL_BYTES = 64 << 10  # below, malloc reuses memory itself, and an `index` that is kept keeps nothing else

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
