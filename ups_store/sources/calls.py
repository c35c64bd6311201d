"""`CallRequest`: any function in a reader process, found by name there; itself it imports nothing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ups_store.sources.reader import Reader


@dataclass(frozen=True, eq=False)
class CallRequest:
    """One call, as `reader.Request`.

    What it imports counts as the reader's start, which has a deadline of its own, and not as the call's time.

    Attributes:
        path: What it works on, for messages.
        subject: Likewise, such as "input 4".
        module: Has `prepare(payload)`, called first, and `run(reader, payload)`.
        payload: Pickled by the caller, as its parts may only be importable after that.
    """

    path: str
    subject: str
    module: str
    payload: bytes
    first_sample = None

    def run(self, reader: Reader) -> object:
        """Prepare and run it."""
        reader.doing("starting")
        module = import_module(self.module)
        prepared = module.prepare(self.payload)
        reader.progressed()
        reader.doing("calling")
        found: object = module.run(reader, prepared)
        return found
