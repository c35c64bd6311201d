"""A training that makes no progress ends itself, and leaves stacks of its threads and the GPU's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from ups.device import cuda_state
from ups.errors import StalledError
from ups.train.interrupt import SAME_COMMAND
from ups_store.system.stalls import DeadlineThread
from ups_store.system.stalls import listening_to_stalls as listening_to_stalls

FIRST_TIMES = 10.0  # longer for the first of its kind, which compiles and opens things
_TIMES = 3.0  # what was over in some time before may take so many times as long
_STEP = "step"


class StallWatch(DeadlineThread):
    """Ends the process with exit code 4 if nothing is expected again in time; a context manager.

    Args:
        timeout_s: Seconds for one step, validation or saving; None watches nothing.
        path: Where what it was doing then is written.
        device: Whose memory is described.
        record: Takes the error's sentence, for the log.
    """

    def __init__(
        self,
        timeout_s: float | None,
        *,
        path: Path,
        stage: str,
        device: torch.device,
        record: Callable[[str], None],
    ) -> None:
        super().__init__("stall-watch", path=path, shortest_s=timeout_s)
        self._timeout_s, self._stage, self._device = timeout_s, stage, device
        self._take_error = record
        self._longest_s: dict[str, float] = {}  # by kind
        self._running = (_STEP, 0.0)  # and since when

    def expect(self, kind: str, *, after: int) -> None:
        """From now on a step, validation or saving has its time.

        Args:
            kind: What begins; the first of a kind has `FIRST_TIMES` as long, a later validation or saving at
                least `_TIMES` as long as it has taken before.
            after: Optimiser step after which it comes.
        """
        if self._timeout_s is None:
            return
        (before, began_s), now_s = self._running, time.monotonic()
        if began_s and before != _STEP:
            self._longest_s[before] = max(self._longest_s[before], now_s - began_s)
        allowed_s = self._timeout_s * (1.0 if kind in self._longest_s else FIRST_TIMES)
        allowed_s = max(allowed_s, _TIMES * self._longest_s.setdefault(kind, 0.0))
        self._running = (kind, now_s)
        self.allow(f"{kind} after step {after}", allowed_s)

    def _error(self, what: str, allowed_s: float) -> StalledError:
        return StalledError(
            f"stage {self._stage} stalled: {what} wasn't over in {allowed_s:g} s",
            path=self.path,
            hint="the file has the stacks of all threads; raise training.stall_timeout_s if it only was slow",
            continued_by=SAME_COMMAND,
        )

    def _state(self) -> str:
        return f"\n{cuda_state(self._device)}\n"

    def _record(self, error: Exception) -> None:
        self._take_error(str(error))
