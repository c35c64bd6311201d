"""What a process does in the tests of latents: builds what is missing, joins its ranks, and draws a pass."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cache_runs import checkpoint, configure, open_windows
from numbered_batches import batch_of

from ups.data.batches import WindowBatch
from ups.data.latents import make_latents
from ups.train.distributed import joined_ranks
from ups.trained.encoder import LatentEncoder


def digest(batch: WindowBatch) -> list[str]:
    """Of each row; of none where a rank has a row only to take part."""
    rows = zip(batch.states.numpy(), batch.parameters.numpy(), strict=True)
    digests = [hashlib.sha256(one.tobytes() + other.tobytes()).hexdigest() for one, other in rows]
    return [f"{batch.task} {one}" for one in digests] if batch.share else []


def main(folder: Path, said: Path, num: int, overrides: Sequence[str]) -> None:
    """Say what was drawn, unless it kills itself after `num` micro-batches."""
    torch.set_num_threads(1)
    encode, left = LatentEncoder.encode_on_device, iter(range(num))

    def encode_or_die(self: LatentEncoder, batch: Any, **options: Any) -> Any:
        if next(left, None) is None and num >= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, batch, **options)

    LatentEncoder.encode_on_device = encode_or_die  # type: ignore[method-assign]
    config = configure(folder, *overrides)
    made = make_latents(config, autoencoder_path=checkpoint(folder), device="cpu")
    with joined_ranks("cpu", timeout_s=60):
        windows = open_windows(folder, *overrides, made=made)
        digests = [digest(batch_of(windows, number)) for number in range(windows.order.num_steps + 1)]
    said.write_text(json.dumps(digests))
