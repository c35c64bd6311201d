"""`DecodedSamples`: what was decoded last, for windows: a sample is decoded whole whatever is cut out of it.

With `shuffle="block"` the windows of a sample come soon after one another, so most of them find it here.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Any

import numpy.typing as npt

KEPT_BYTES = 256 << 20  # of all stores of the process: the samples of a window of blocks, see `read.order`

Key = tuple[object, str, int]  # of the store, the array's name, the sample


class DecodedSamples:
    """Samples by store, array and number; the ones that weren't used for longest go first. For any thread.

    Args:
        limit: Bytes that are kept.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.limit = limit
        self._samples: OrderedDict[Key, npt.NDArray[Any]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> npt.NDArray[Any] | None:
        """The sample, if it is kept; not to be written to."""
        with self._lock:
            found = self._samples.get(key)
            if found is not None:
                self._samples.move_to_end(key)
            return found

    def put(self, key: Key, values: npt.NDArray[Any]) -> None:
        """Keep a sample, unless it takes more than all may."""
        if values.nbytes > self.limit:
            return
        with self._lock:
            if key in self._samples:  # another thread decoded it, too
                return
            self._samples[key] = values
            self._nbytes += values.nbytes
            while self._nbytes > self.limit:
                self._nbytes -= self._samples.popitem(last=False)[1].nbytes

    def forget(self, store: object) -> None:
        """Let go of a store's samples."""
        with self._lock:
            for key in [key for key in self._samples if key[0] is store]:
                self._nbytes -= self._samples.pop(key).nbytes

    def renew(self) -> None:
        """In a forked child, where a thread that is gone may have held the lock."""
        self.__init__(self.limit)  # type: ignore[misc]


SHARED = DecodedSamples()
os.register_at_fork(after_in_child=SHARED.renew)
