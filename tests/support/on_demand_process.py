"""What a process does in the tests of on-demand mode: the first pass, alone or as a rank of gloo."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from on_demand_helpers import open_windows

from ups.data.windows import WindowBatch
from ups.train.distributed import joined_ranks


def digest(batch: WindowBatch) -> str:
    raw = batch.states.numpy().tobytes() + batch.parameters.numpy().tobytes()
    return f"{batch.task} {hashlib.sha256(raw).hexdigest()}"


def main(folder: Path, said: Path, num: int, overrides: Sequence[str]) -> None:
    """Say what was drawn, unless it kills itself after `num` batches."""
    torch.set_num_threads(1)
    notes: list[str] = []
    with joined_ranks("cpu", timeout_s=60, note=notes.append) as (ranks, _):
        windows = open_windows(folder, *overrides, notes=notes)
        digests = []
        for number in range(windows.batches_per_pass + 1):
            if number == num:
                os.kill(os.getpid(), signal.SIGKILL)
            digests.append(digest(windows.batch(number)))
        # Every rank has the same batch at the same step, or training would mix them up.
        both = ranks.gather(torch.frombuffer(bytearray("".join(digests).encode()), dtype=torch.uint8))
        assert bool((both == both[0]).all())
    said.write_text(json.dumps({"digests": digests, "notes": notes}))
