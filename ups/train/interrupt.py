"""What ends a training before its last step: signals, after the step that is running; and no progress."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ups.errors import InterruptedTrainingError, StalledError
from ups_store.system.stalls import DeadlineThread
from ups_store.system.stalls import listening_to_stalls as listening_to_stalls

if TYPE_CHECKING:
    import torch

SAME_COMMAND = "the same command"  # continues; not with --restart, as `ups train` then says


class StopRequest:
    """Whether the run was asked to stop.

    Attributes:
        number: Of the signal; 0 if there was none.
    """

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.number = number


@contextmanager
def before_steps(stage: str, state_path: Path, *, restart: bool = False) -> Iterator[None]:
    """Inside, where no step is made yet, SIGINT ends with a sentence.

    Args:
        state_path: Where its state is, if it was trained before.
        restart: Whether it begins from scratch although there is one.
    """
    try:
        yield
    except KeyboardInterrupt:
        is_begun = state_path.exists()
        kept = f"{state_path} is as it was" if is_begun else "there is nothing to save yet"
        is_continued = is_begun and not restart
        raise InterruptedTrainingError(
            f"stage {stage} was stopped before its first step; {kept}",
            kind="interrupted_at_start",
            hint=None if is_continued else f"{SAME_COMMAND} begins again",
            continued_by=SAME_COMMAND if is_continued else None,
        ) from None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Inside, SIGTERM, SIGUSR1 and SIGINT only leave a note; a second SIGINT interrupts as usual."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may handle signals
        return
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}

    def stop(number: int, frame: FrameType | None) -> None:
        request(number, frame)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    try:
        for number in before:
            signal.signal(number, stop)
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        from ups.device import (
            cuda_state,  # not before, as commands that train nothing import this module, too
        )

        return f"\n{cuda_state(self._device)}\n"

    def _record(self, error: Exception) -> None:
        self._take_error(str(error))
