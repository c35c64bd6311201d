"""What a process does in the tests of on-demand mode: the first pass, alone or as a rank of gloo."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from numbered_batches import batch_of
from on_demand_helpers import open_windows

from ups.data.batches import WindowBatch
from ups.train.distributed import joined_ranks


def digest(batch: WindowBatch) -> list[str]:
    """Of each row; of none where a rank has a row only to take part."""
    rows = zip(batch.states.numpy(), batch.parameters.numpy(), strict=True)
    digests = [hashlib.sha256(one.tobytes() + other.tobytes()).hexdigest() for one, other in rows]
    return [f"{batch.task} {one}" for one in digests] if batch.share else []


def main(folder: Path, said: Path, num: int, overrides: Sequence[str]) -> None:
    """Say what was drawn, unless it kills itself after `num` batches."""
    torch.set_num_threads(1)
    notes: list[str] = []
    with joined_ranks("cpu", timeout_s=60, note=notes.append) as _:
        windows = open_windows(folder, *overrides, notes=notes)
        digests = []
        for number in range(windows.order.num_steps + 1):
            if number == num:
                os.kill(os.getpid(), signal.SIGKILL)
            digests.append(digest(batch_of(windows, number)))
    said.write_text(json.dumps({"digests": digests, "notes": notes}))
