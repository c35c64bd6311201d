"""Memory of a process and of its GPU: now, and the most of a stage."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ups.config import StageConfig
from ups.errors import UpsError

SMALLER = "take a smaller training.batch_size, or training.activation_checkpointing"
_MOST_SHOWN = 160  # characters of what PyTorch says, whose end has the number of bytes
_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # to clear_refs: VmHWM begins again with what is resident (proc_pid_clear_refs(5))
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB", re.MULTILINE)


def memory_of(device: torch.device) -> dict[str, float]:
    """GiB in memory now, and the most that tensors had on the GPU; of this process, as they are logged."""
    found = dict[str, float]()
    with suppress(OSError):  # no /proc
        pages = int(Path("/proc/self/statm").read_text().split()[1])  # proc_pid_statm(5): resident
        found["training/memory_gib"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    if device.type == "cuda":
        found["training/gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a GPU or of the machine, for which PyTorch has a plain RuntimeError."""
    known = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, known) or "can't allocate memory" in str(error)


@contextmanager
def saying_what_takes_memory(stage: str, settings: StageConfig) -> Iterator[None]:
    """Inside, an error about memory names the batch.

    Raises:
        UpsError: Kind "out_of_memory".
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        each, over_all = settings.batch_size, settings.global_batch_size
        size = f"training.batch_size = {each}" if over_all is None else f"global_batch_size = {over_all}"
        found = str(error).partition("\n")[0][-_MOST_SHOWN:] or None
        raise UpsError(
            f"stage {stage} ran out of memory with {size}", kind="out_of_memory", found=found, hint=SMALLER
        ) from error


class PeakMemory:
    """The most memory that this process, and tensors on its GPU, had since this object was made.

    Where the system doesn't let the peak be reset, it is that of the process so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with suppress(OSError):
            (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, float]:
        """GiB, under their names in the log."""
        found = dict[str, float]()
        with suppress(OSError):  # no /proc
            if peak := _PEAK.search((_PROCESS / "status").read_text()):
                found["training/peak_memory_gib"] = int(peak[1]) / 2**20
        if self._device.type == "cuda":
            found["training/peak_gpu_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return found
