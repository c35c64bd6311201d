"""Ctrl-C, SIGTERM and SIGUSR1 while modules are imported: a line and exit code 5; 2 if a package is missing.

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
# What schedulers send some time before they take a machine away: as Slurm does by `--signal=USR1@120`.
STOPPING = (signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED_LINE = "interrupted; run the same command again"
_STDERR = 2
_USAGE = 2  # exit code of what the caller can mend


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Handler that makes of `STOPPING` what Python makes of Ctrl-C."""
    raise KeyboardInterrupt


_REPLACED = {
    signal.SIGINT: (signal.default_int_handler,),
    **dict.fromkeys(STOPPING, (signal.SIG_DFL, interrupt)),
}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """End the process at Ctrl-C, SIGTERM, SIGUSR1 and a missing package, in a block that only imports.

    Where one of the signals is ignored or handled by other code, that stays so. A `MissingExtraError` becomes
    `SystemExit`, once its sentence is on stderr.
    """
    with contextlib.ExitStack() as stack:
        for signum, handlers in _REPLACED.items():
            if signal.getsignal(signum) in handlers:
                stack.callback(signal.signal, signum, signal.signal(signum, _end))
        try:
            yield
        except ImportError as error:
            if getattr(error, "kind", None) != "missing_extra":
                raise
            _print_error(str(error))
            raise SystemExit(_USAGE) from None


def _end(signum: int, frame: FrameType | None) -> None:
    _print_error(INTERRUPTED_LINE)
    os._exit(INTERRUPTED)


def _print_error(line: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(_STDERR, f"error: {line}\n".encode())
