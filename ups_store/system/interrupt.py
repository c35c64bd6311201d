"""Ctrl-C and SIGTERM while modules are imported: one line and exit code 5.

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
INTERRUPTED_LINE = "interrupted; run the same command again"
_STDERR = 2


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Handler that makes of SIGTERM what Python makes of Ctrl-C."""
    raise KeyboardInterrupt


_REPLACED = {signal.SIGINT: (signal.default_int_handler,), signal.SIGTERM: (signal.SIG_DFL, interrupt)}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """End the process at Ctrl-C and SIGTERM for the duration of a block that only imports.

    Where one of them is ignored or handled by other code, that stays so.
    """
    with contextlib.ExitStack() as stack:
        for signum, handlers in _REPLACED.items():
            if signal.getsignal(signum) in handlers:
                stack.callback(signal.signal, signum, signal.signal(signum, _end))
        yield


def _end(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(_STDERR, f"error: {INTERRUPTED_LINE}\n".encode())
    os._exit(INTERRUPTED)
