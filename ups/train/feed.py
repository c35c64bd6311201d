"""Batches made ahead of their use, by one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from ups.train.distributed import map_tensors

_LOOK_EVERY_S = 0.2  # how long a request to stop may go unnoticed


class WaitEndedError(Exception):
    """Who waited for a batch was asked to stop; the batch may still be had."""


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

    def get(self, number: int, *, is_stopping: Callable[[], bool] | None = None) -> Any:
        """The batch of a number; numbers are asked for one after another.

        Args:
            number: Of the batch.
            is_stopping: Asked while the thread is waited for, whether waiting has no use any more.

        Raises:
            WaitEndedError: If it hasn't; only where batches are made ahead.
        """
        if self._ahead == 0:
            return self._made(number)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        begin = number if self._next is None else self._next
        self._next = max(number + 1, min(number + 1 + self._ahead, self._end))
        self._coming.extend(self._thread.submit(self._made, n) for n in range(begin, self._next))
        batch = _awaited(self._coming[0], is_stopping)
        self._coming.popleft()
        return batch

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


def _awaited(batch: Future[Any], is_stopping: Callable[[], bool] | None) -> Any:
    """The result; in short waits, between which Python runs the handlers of signals."""
    while is_stopping is not None and not batch.done():
        if is_stopping():
            raise WaitEndedError
        wait([batch], timeout=_LOOK_EVERY_S)
    return batch.result()


def _pinned(tensor: Tensor) -> Tensor:
    """In page-locked memory; what a preloaded store gives lies on the GPU already."""
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
