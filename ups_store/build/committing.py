"""Commits in a thread of their own: the disk writes one batch while the next is read and encoded."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ups_store.write.writer import Committer

DEPTH = 2  # batches that wait: enough to overlap, and what they hold in memory stays small
_POLL_S = 0.2  # how soon a full queue notices that the thread has failed

Pending = tuple[npt.NDArray[np.int64], Mapping[str, npt.NDArray[Any]]]


class CommitThread:
    """Commits batches in the order in which they are put, one at a time.

    Used as a context manager: leaving it normally waits for every batch; leaving it by an exception finishes
    the batch at work, drops the others and lets the exception go on.

    Args:
        committer: Where batches go; nobody else commits meanwhile.
        committed: Told the number of samples of every batch that is durable, in the thread.
        depth: How many batches may wait.
    """

    def __init__(
        self, committer: Committer, *, committed: Callable[[int], None] | None = None, depth: int = DEPTH
    ) -> None:
        self._committer = committer
        self._committed = committed
        self._batches: queue.Queue[Pending | None] = queue.Queue(depth)
        self._failure: BaseException | None = None
        self._is_dropping = False
        self._thread = threading.Thread(target=self._run, name="ups-store-commit", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Batches that wait for the disk."""
        return self._batches.qsize()

    def put(self, samples: npt.NDArray[np.int64], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Hand a batch over, waiting while `depth` others wait; its memory is the thread's from then on.

        Raises:
            StoreError: What an earlier commit failed with.
        """
        self._put((samples, arrays))

    def _put(self, batch: Pending | None) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                self._batches.put(batch, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            if self._is_dropping:
                continue
            try:
                self._committer.commit_many(*batch)
                if self._committed is not None:
                    self._committed(len(batch[0]))
            except BaseException as error:
                self._failure = error
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_dropping = error is not None
        try:
            if self._failure is None:
                self._put(None)
        except BaseException:
            if self._failure is None:  # interrupted while it waited: the thread still has to be told
                self._is_dropping = True
                self._batches.put(None)
            raise
        finally:
            self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure
