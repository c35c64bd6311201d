"""`PreloadReport`: what a preload did, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["page-cache", "copy", "pinned", "device", "mapped"]


@dataclass(frozen=True)
class PreloadReport:
    """What `Store.preload` did.

    Attributes:
        mode: Where the data lie now; "mapped" if `auto` found room nowhere: they are read when they are used.
        why: Why this mode, with needed and available bytes, and what the modes before it were refused for.
        nbytes: Bytes that lie there now, also where they did before; 0 for "mapped".
        seconds: How long it took, in seconds.
        on_device: For "pinned" and "device" an `ups_store.torch.DeviceStore`, whose `gather` returns tensors
            on the device; None for the others, where the store itself gathers from what was preloaded.
    """

    mode: Outcome
    why: str
    nbytes: int
    seconds: float
    on_device: Any = None
