"""`Staging`: from a file to a device through two buffers, one being filled while the other is copied."""

from __future__ import annotations

import contextlib
from contextlib import closing

import torch
from torch import Tensor

from ups_store.read.page_cache import STEP_BYTES, read_steps
from ups_store.read.preload import Job

_NUM_BUFFERS = 2


class Staging:
    """Reads parts of a file to a device.

    Args:
        job: The file, and who is told of progress.
        device: A CUDA device, which copies from page-locked memory meanwhile; or the CPU.
        nbytes: Length of the largest part.
    """

    def __init__(self, job: Job, device: torch.device, nbytes: int) -> None:
        self._job = job
        self._device = device
        size = min(nbytes, STEP_BYTES)
        self._buffers = [_buffer(size, device) for _ in range(_NUM_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def fill(self, memory: Tensor, first: int) -> None:
        """Read as many bytes as `memory` has, uint8, from byte `first` of the file on."""
        for offset in range(0, len(memory), STEP_BYTES):
            part = memory[offset : offset + STEP_BYTES]
            turn, self._turn = self._turn, (self._turn + 1) % _NUM_BUFFERS
            copied = self._copied[turn]
            if copied is not None:
                copied.synchronize()  # else it would be read anew before it is copied
            buffer = self._buffers[turn][: len(part)]
            self._read(buffer, first + offset)
            part.copy_(buffer, non_blocking=True)
            if self._device.type == "cuda":
                self._copied[turn] = torch.cuda.current_stream(self._device).record_event()

    def finish(self) -> None:
        """Wait for the last copies."""
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()

    def _read(self, buffer: Tensor, first: int) -> None:
        job = self._job
        steps = read_steps(
            job.fd,
            len(buffer),
            first=first,
            target=buffer.numpy().data,
            num_threads=job.num_threads,
            path=job.file.path,
        )
        with closing(steps):
            for length in steps:
                job.progress(length)


def _buffer(nbytes: int, device: torch.device) -> Tensor:
    """Page-locked memory; ordinary memory, from which copies take longer, where that is refused."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)
