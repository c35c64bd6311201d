"""A function in a process of its own: what it leaves behind, or dies of, stays there."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Result = TypeVar("Result")

_FORK = multiprocessing.get_context("fork")  # imports were made already, and take seconds


class FailedError(Exception):
    """The function raised, died, or took too long; the text says which."""


def isolated(function: Callable[..., Result], *arguments: Any, timeout_s: float) -> Result:
    """Call the function in a forked process, and kill it with all of its children if it takes too long.

    Raises:
        FailedError: With one line that says why there is no result.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_run, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise FailedError(f"took longer than {timeout_s:.0f} s")
        succeeded, found = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise FailedError(f"its process ended with {name}") from None
    finally:
        _end(process.pid)
        process.join()
        receiver.close()
    if not succeeded:
        raise FailedError(found)
    result: Result = found
    return result


def _run(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # so that it can be ended with its workers
    try:
        answer = (True, function(*arguments))
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        answer = (False, f"{type(error).__name__}: {lines[0][:200]}")
    sender.send(answer)
    sender.close()
    os._exit(0)  # some libraries wait for threads of theirs at exit, for ever


def _end(pid: int | None) -> None:
    if pid:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
