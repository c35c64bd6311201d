"""What a reader process and its supervisor say to each other; without HDF5, which the supervisor needn't."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ups_store.errors import StoreError
from ups_store.ingest.slots import Placed

MAX_MESSAGE_BYTES = 200_000  # what a Unix socket takes at once by default
STACK_SIGNAL = signal.SIGUSR1  # makes a reader write its stacks to stderr, also from inside a C call


@dataclass(frozen=True)
class Done:
    """A request succeeded."""

    request_id: int
    placed: tuple[Placed, ...]
    value: object


@dataclass(frozen=True)
class Failed:
    """A request failed; is_transient: so that another attempt may succeed."""

    request_id: int
    error: StoreError
    is_transient: bool
