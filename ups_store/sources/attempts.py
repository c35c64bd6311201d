"""Trying again: how long and how often, what may go better next time, and what it is called in the end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ups_store.errors import DownloadError, ReadTimeoutError, SourceError, StoreError
from ups_store.sources.origins import TransientError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Attempts:
    """How long and how often.

    Attributes:
        stall_s: Without a byte, until an attempt is given up.
        retries: Attempts after the first one, each time that no attempt brought a byte.
        backoff_s: Pause before the first of them; it doubles, and up to half of it is left out by chance.
    """

    stall_s: float = 50.0
    retries: int = 2
    backoff_s: float = 0.5

    def pause(self, failure: Exception, num_failed: int) -> None:
        """Wait a little before the next one, longer each time, or as long as the other side asks for."""
        usual_s = self.backoff_s * 2 ** max(0, num_failed - 1)
        asked_s = failure.pause_s if isinstance(failure, TransientError) else 0.0
        time.sleep(max(usual_s * random.uniform(0.5, 1.0), min(asked_s, self.stall_s)))


class CutError(TransientError):
    """The bytes ended early."""

    def __init__(self) -> None:
        super().__init__("the bytes ended early")


def persistently(work: Callable[[], Result], *, origin: str, attempts: Attempts) -> Result:
    """What `work` returns, tried again while it fails in ways that may pass.

    Raises:
        DownloadError: Kind "unreachable".
        ReadTimeoutError: If the last attempt took too long.
    """
    for num_failed in range(1, attempts.retries + 2):
        try:
            return work()
        except (TransientError, OSError) as error:
            if not is_transient(error):
                raise
            failure = error
        if num_failed <= attempts.retries:
            attempts.pause(failure, num_failed)
    raise _unreachable(origin, failure) from failure


def is_transient(error: Exception) -> bool:
    """Whether it is of the network or a disk, not of ours and not of the place that the copy goes to."""
    return not isinstance(error, StoreError | FileNotFoundError | PermissionError | IsADirectoryError)


def given_up(location: str, failure: Exception, offset: int, size: int) -> SourceError:
    """The error for bytes that stopped at an offset, whatever was tried."""
    if isinstance(failure, CutError):
        return DownloadError(
            "the bytes end early, time and again",
            kind="cut_short",
            path=location,
            expected=f"{size:,} bytes",
            found=f"{offset:,}",
            hint="run again to go on from there",
        )
    error = _unreachable(location, failure)
    error.found = f"{offset:,} of {size:,} bytes there"
    return error


def _unreachable(location: str, failure: Exception) -> SourceError:
    hint = "check the network and the place, and run again to go on from there"
    if isinstance(failure, TimeoutError):
        return ReadTimeoutError("it gives no byte any more", path=location, hint=hint)
    text = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
    return DownloadError(f"it can't be fetched ({text})", kind="unreachable", path=location, hint=hint)
