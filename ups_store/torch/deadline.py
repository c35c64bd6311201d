"""Deadlines of batches: a read that hangs, in a page fault or at an unreachable server, ends as an error.

A thread that hangs can't be ended. It is left behind, with its buffers, and doesn't keep the program from
ending. It has to have let go of the interpreter's lock, as copies of batches do: else nothing runs that could
look at the time.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ups_store.errors import BatchTimeoutError
from ups_store.read.order import expect

Result = TypeVar("Result")

Where = tuple[str | None, Sequence[int]]  # path of a store, and numbers of its samples

_SHOWN = 4

_HINT = "look whether its disk or server answers; `load_state_dict`, or the same command, goes on from there"


def late(where: Where, *, timeout_s: float, thread: int | None) -> BatchTimeoutError:
    """The error of a batch that hasn't come.

    Args:
        where: What it is of.
        timeout_s: How long it was waited for.
        thread: Identifier of the thread that makes it, whose stack is part of the error; None if none does.
    """
    path, samples = where
    frame = None if thread is None else sys._current_frames().get(thread)
    found, stack = "nothing is being read", ""
    if frame is not None:
        calls = traceback.extract_stack(frame)
        stack = "".join(calls.format())
        file = os.path.basename(calls[-1].filename)
        found = f"{_shown(samples)}, in {calls[-1].name} ({file}:{calls[-1].lineno})"
    problem = f"a batch hasn't come for {timeout_s:g} s"
    sample = samples[0] if samples else None
    error = BatchTimeoutError(problem, path=path, sample=sample, found=found, hint=_HINT)
    error.samples, error.stack = tuple(samples), stack
    if stack:
        error.add_note(f"What makes the batch:\n{stack}")
    return error


def _shown(samples: Sequence[int]) -> str:
    first, more = ", ".join(map(str, samples[:_SHOWN])), len(samples) - _SHOWN
    return f"samples {first} and {more} more" if more > 0 else f"samples {first}"


def check_timeout(timeout: object) -> None:
    """Refuse what is no time that a batch could be waited for."""
    is_time = isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < math.inf
    expect("timeout", timeout is None or is_time, "a number of seconds above 0, or None", timeout)


def in_time(work: Callable[[], Result], timeout_s: float, where: Callable[[], Where]) -> Result:
    """What a function returns, or raises, if it does so in time.

    Args:
        work: Called in a thread of its own, which is left behind when it is late.
        timeout_s: How long it may take.
        where: Says what it is of.
    Raises:
        BatchTimeoutError: If it is late.
    """
    done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:
            done.put((None, error))

    thread = threading.Thread(target=run, name="ups_store dataset", daemon=True)
    thread.start()
    try:
        result, error = done.get(timeout=timeout_s)
    except Empty:
        raise late(where(), timeout_s=timeout_s, thread=thread.ident) from None
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]
