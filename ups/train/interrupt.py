"""SIGTERM, SIGUSR1 and SIGINT end training after the step that is running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ups.errors import InterruptedTrainingError

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

    Raises:
        InterruptedTrainingError: Kind "interrupted_at_start"; other ranks learn nothing of it.
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
