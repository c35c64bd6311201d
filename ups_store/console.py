"""What the commands share: results on stdout, all else on stderr, errors as one message and an exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console

from ups_store.errors import BuildInterruptedError, StoreError

EXIT_ERROR = 1
VERBOSITY_OF_TRACEBACKS = 2

console = Console(stderr=True)


def print_json(document: Any) -> None:
    """Write a result to stdout as JSON, for machines."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_error(message: str) -> None:
    """Write an error to stderr, never wrapped or coloured in parts, so that it can be searched for."""
    console.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def interruptible(hint: str = "run the same command again to continue") -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, and both as `BuildInterruptedError`: whoever works says what is kept."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        raise BuildInterruptedError("interrupted", hint=hint) from error
    finally:
        signal.signal(signal.SIGTERM, previous)


def run(app: Callable[[], Any], *, verbosity: int = 0) -> NoReturn:
    """Run a command line to its exit code.

    Args:
        app: The command, such as a typer app, which exits by itself on success and wrong usage.
        verbosity: How often -v was given; from 2 on tracebacks are shown.
    """
    try:
        app()
        sys.exit(0)
    except StoreError as error:
        _show_traceback(verbosity)
        print_error(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)
    except OSError as error:
        _show_traceback(verbosity)
        print_error(str(error))
        sys.exit(EXIT_ERROR)


def _show_traceback(verbosity: int) -> None:
    if verbosity >= VERBOSITY_OF_TRACEBACKS:
        console.print_exception()
