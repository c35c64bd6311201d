"""Batches made ahead of their use, by one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from ups.train.distributed import map_tensors


class BatchFeed:
    """Makes the batches of coming numbers while training uses the present one; a context manager.

    Batches are made in the order of their numbers, by one thread, or without any by who asks. An error in
    making a batch is raised when that batch is asked for.

    Args:
        make: Makes the batch of a number.
        ahead: Batches that are made ahead; 0 for none.
        end: Number after the last batch.
        is_pinned: Whether tensors are moved to page-locked memory, from which a GPU copies by itself.
    """

    def __init__(self, make: Callable[[int], Any], *, ahead: int, end: int, is_pinned: bool) -> None:
        self._make, self._ahead, self._end, self._is_pinned = make, ahead, end, is_pinned
        self._coming: deque[Future[Any]] = deque()
        self._next: int | None = None
        self._thread: ThreadPoolExecutor | None = None

    def get(self, number: int) -> Any:
        """The batch of a number; numbers are asked for one after another."""
        if self._ahead == 0:
            return self._made(number)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        begin = number if self._next is None else self._next
        self._next = max(number + 1, min(number + 1 + self._ahead, self._end))
        self._coming.extend(self._thread.submit(self._made, n) for n in range(begin, self._next))
        return self._coming.popleft().result()

    def close(self) -> None:
        """Drop what was made ahead; the batch that is being made is waited for."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._coming.clear()
        self._thread, self._next = None, None

    def _made(self, number: int) -> Any:
        batch = self._make(number)
        return map_tensors(batch, _pinned) if self._is_pinned else batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pinned(tensor: Tensor) -> Tensor:
    """In page-locked memory; what a preloaded store gives lies on the GPU already."""
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
