"""Functions that workers import: of numbers into samples, well or badly."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def several(number: int) -> Iterator[dict[str, Any]]:
    """0 to 3 samples of a number."""
    for j in range(number % 4):
        yield {"i": number, "j": j, "text": "x" * number}


def one(number: int) -> dict[str, Any] | None:
    """One sample; none of multiples of 5."""
    return {"i": number, "u": np.full((3, 3), number, "f4")} if number % 5 else None


def noting(call: tuple[str, int]) -> dict[str, Any]:
    """One sample; leaves a file that says that it was called; the 13th raises unless there is one `go`."""
    folder, number = call
    if number == 13 and not Path(folder, "go").exists():
        raise RuntimeError("not yet")
    Path(folder, f"{number}-{os.getpid()}-{time.monotonic_ns()}").touch()
    return {"i": number}


def badly(number: int) -> dict[str, Any]:
    """Number 3 raises, 6 is killed, 9 hangs, 12 is no sample."""
    if number == 3:
        raise ValueError("three")
    if number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 9:
        time.sleep(600)
    return {"i": None if number == 12 else number}


def large(number: int) -> dict[str, Any]:
    """One sample that is longer than a message; 6 is killed."""
    if number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"i": number, "u": np.full(100_000, number, "f4")}
