"""Threads that look at something every so often; one of them ends a process that doesn't get on.

Such a thread needs the interpreter: a call that holds the interpreter's lock and never returns isn't seen.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, Self, TextIO

STALLED = 4  # exit code of what a deadline ended
_POLLS = 20  # looks in one deadline
# What is done at the end may wait for the one who stalls, such as for an allocator's lock or a disk.
_LAST_WORDS_S = 10.0
_LISTENERS_S = 75.0  # a command that is to be notified has a minute


class LookingThread(ABC):
    """Looks every so often in a daemon thread, while the block lasts; a context manager, one block at a time.

    Args:
        name: Of the thread.
        every_s: From one look to the next; None never looks.
        is_waited_for: Whether the end of the block waits for a look that is going on.
    """

    def __init__(self, name: str, *, every_s: float | None, is_waited_for: bool = True) -> None:
        self._name, self._every_s, self._is_waited_for = name, every_s, is_waited_for
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _look(self) -> bool:
        """Look once, in the thread; returns whether to look again."""

    def __enter__(self) -> Self:
        if self._every_s is not None:
            self._over.clear()
            self._thread = threading.Thread(
                target=self._keep_looking, args=(self._every_s,), name=self._name, daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        thread, self._thread = self._thread, None
        self._over.set()
        if thread is not None and self._is_waited_for:
            thread.join()

    def _keep_looking(self, every_s: float) -> None:
        while not self._over.wait(every_s) and self._look():
            pass


_before_end: list[Callable[[BaseException], None]] = []


@contextmanager
def listening_to_stalls(listener: Callable[[BaseException], None]) -> Iterator[None]:
    """Tell a listener of the error before a stall ends the process, which no `finally` sees."""
    _before_end.append(listener)
    try:
        yield
    finally:
        _before_end.remove(listener)


class DeadlineThread(LookingThread):
    """Ends the process with exit code 4 once something that is expected isn't over in time.

    What every thread was doing goes to stderr and into a file. Several things may be expected at a time, each
    in a slot of its own.

    Args:
        name: Of the thread.
        path: The file.
        shortest_s: The shortest deadline that there will be; None if there is none.
    """

    def __init__(self, name: str, *, path: Path, shortest_s: float | None) -> None:
        super().__init__(name, every_s=None if shortest_s is None else shortest_s / _POLLS)
        self.path = path
        self._looked_s, self._stopped_s = time.monotonic(), 0.0
        self._expected: dict[str, tuple[str, float, float]] = {}  # what, allowed seconds, deadline

    @abstractmethod
    def _error(self, what: str, allowed_s: float) -> Exception:
        """The error that ends the process."""

    def _state(self) -> str:
        """Write what else the file should hold, such as a device's memory; may fail, or never return."""
        return ""

    def _record(self, error: Exception) -> None:
        """Write the error into a log; may fail, or never return."""

    def allow(self, what: str, allowed_s: float, *, slot: str = "") -> None:
        """From now on something has so long, instead of what was expected in the slot."""
        self._expected[slot] = (what, allowed_s, time.monotonic() - self._stopped_s + allowed_s)

    def rest(self, *, slot: str = "") -> None:
        """Nothing is expected in the slot until `allow` is called again."""
        self._expected.pop(slot, None)

    def __enter__(self) -> Self:
        self._looked_s = time.monotonic()
        return super().__enter__()

    def _look(self) -> bool:
        now, every_s = time.monotonic(), self._every_s or 0.0
        late_s, self._looked_s = now - self._looked_s - every_s, now
        if late_s > every_s:  # the whole process was stopped, such as by SIGSTOP, and so was what is expected
            self._stopped_s += late_s
        for step, allowed_s, deadline_s in tuple(self._expected.values()):
            if now - self._stopped_s > deadline_s:
                self._end(self._error(step, allowed_s))
        return True

    def _end(self, error: Exception) -> NoReturn:
        for work, most_s in ((self._last_words, _LAST_WORDS_S), (_notify, _LISTENERS_S)):
            last = threading.Thread(target=work, args=(error,), daemon=True)
            last.start()
            last.join(most_s)
        os._exit(STALLED)

    def _last_words(self, error: Exception) -> None:
        _write_stacks(error, sys.__stderr__)
        with suppress(OSError), self.path.open("w", encoding="utf-8") as file:
            _write_stacks(error, file)
            with suppress(Exception):
                file.write(self._state())
        with suppress(Exception):
            self._record(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()


def _notify(error: Exception) -> None:
    for listener in tuple(_before_end):
        with suppress(Exception):
            listener(error)


def _write_stacks(error: Exception, file: TextIO | None) -> None:
    """The sentence and the stacks of all threads."""
    if file is not None:
        with suppress(OSError, ValueError):
            print(f"error: {error}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
