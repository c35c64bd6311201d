"""Ctrl-C while modules are imported: one line and exit code 5, where Python would show a traceback.

An interrupt inside of an import may come out as another error, or be printed and swallowed by a callback of
the import system. Nothing is at stake before a program begins, so the process ends at once. What this module
imports itself is what Python has loaded at its start anyway.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 5
_STDERR = 2


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """End the process at Ctrl-C for the duration of a block that only imports.

    Where Ctrl-C is ignored or handled by somebody else, that stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(_STDERR, b"error: interrupted\n")
    os._exit(INTERRUPTED)
