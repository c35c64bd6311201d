"""What a run measures of itself: losses, waiting, memory, work, and the phases until the first step.

Losses are summed on the device, so that no step waits for a number; phases are logged as
`startup/<phase>_sec`. What steps cost is counted in floating-point operations and in processor time.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.config import StageConfig
from ups.distributed.ranks import ALONE, Ranks
from ups.errors import DivergedError, UpsError
from ups.train.flops import ShapesOf, count_step, shape_of
from ups.train.stage import Stage
from ups.train.tracking import STARTUP_MINUTES

# Step of a loss that was always finite.
_NEVER = 2**62
_SECONDS_END = "_sec"
_SECONDS = "startup/{}" + _SECONDS_END
FLOPS, PROCESSOR_S = "training/flops", "training/processor_s"
MFU = "training/mfu"


@dataclass
class _Sums:
    """Of the losses that came together, each tensor of shape (losses,)."""

    sums: Tensor
    first_bad: Tensor  # step at which a loss wasn't finite
    count: int = 0


class LossMeter:
    """Sums of named losses, and the first step at which one of them wasn't finite.

    Args:
        ranks: The processes that train together; each knows the losses of its rows alone.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._together: dict[tuple[str, ...], _Sums] = {}

    @torch.no_grad()
    def add(self, losses: dict[str, Tensor], *, step: int, share: float = 1.0, is_rest: bool = False) -> None:
        """Take in the losses of a batch; neither waits for the device nor sends it anything.

        Args:
            losses: Means over rows of this rank.
            step: The step, counted from 1.
            share: Share of the batch that these rows are.
            is_rest: Whether other rows of the same batch were taken in before.
        """
        names = tuple(losses)
        values = torch.stack([loss.detach().float() for loss in losses.values()])
        if names not in self._together:
            never = torch.full(values.shape, _NEVER, dtype=torch.int64, device=values.device)
            self._together[names] = _Sums(torch.zeros_like(values), never)
        some = self._together[names]
        some.count += not is_rest
        some.sums.add_(values, alpha=share)
        some.first_bad.masked_fill_(~values.isfinite() & (some.first_bad == _NEVER), step)

    def read(self) -> dict[str, float]:
        """Means since the last call, over the rows of all ranks; a collective, and waits for the device.

        Raises:
            DivergedError: If a loss wasn't finite; on every rank.
        """
        if not self._together:
            return {}
        together = sorted(self._together.items())
        first_bad = self._ranks.least(torch.cat([some.first_bad for _, some in together])).tolist()
        sums = self._ranks.sum(torch.cat([some.sums for _, some in together])).tolist()
        places = [(name, some.count) for names, some in together for name in names]
        step, bad = min(zip(first_bad, (name for name, _ in places), strict=True))
        if step != _NEVER:
            raise diverged(bad, step)
        totals, counts = dict[str, float](), dict[str, int]()
        for (name, count), total in zip(places, sums, strict=True):
            totals[name], counts[name] = totals.get(name, 0.0) + total, counts.get(name, 0) + count
        self._together.clear()
        return {name: totals[name] / counts[name] for name in sorted(totals)}


def diverged(loss_name: str, step: int) -> DivergedError:
    """The error for a loss that isn't finite."""
    error = DivergedError(
        f"step {step}: loss {loss_name!r} is not finite",
        hint="lower training.lr or set training.grad_clip, and begin again with --restart; "
        "what was exported before is kept",
    )
    error.step, error.loss_name = step, loss_name
    return error


class Work:
    """What optimiser steps took: floating-point operations, and processor time.

    Args:
        stage: Whose steps they are.
        autocast: Precision of its forward passes.
        peak: Gives the most operations a second of this rank's device, when it is first needed.
        shapes: Of the model, if that is sharded.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        autocast: Callable[[], AbstractContextManager[Any]],
        peak: Callable[[], float],
        ranks: Ranks = ALONE,
        shapes: ShapesOf | None = None,
    ) -> None:
        self._stage, self._autocast, self._peak, self._ranks = stage, autocast, peak, ranks
        self._shapes = shapes
        self._flops_of: dict[tuple[object, ...], int] = {}
        self._recent = 0  # of this rank's steps since the last look
        self._flops = self._processor_s = 0.0  # of this rank
        self._before = torch.zeros(2, dtype=torch.float64)

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Inside, the processor works on a step; so it does where threads of this process prepare batches."""
        began = time.process_time()
        yield
        self._processor_s += time.process_time() - began

    def add(self, batch: Any) -> None:
        """Count a batch that is trained on; the first one of a shape is computed once more for that."""
        began, shape = time.process_time(), shape_of(batch)
        if shape not in self._flops_of:
            with self._shapes.in_place_of(self._stage) if self._shapes is not None else nullcontext():
                self._flops_of[shape] = count_step(self._stage, batch, autocast=self._autocast)
        self._recent += self._flops_of[shape]
        self._flops += self._flops_of[shape]
        self._processor_s -= time.process_time() - began

    def utilization(self, seconds: float) -> dict[str, float]:
        """Model FLOPs utilisation of this rank since the last call: counted operations over possible ones."""
        recent, self._recent = self._recent, 0
        return {MFU: recent / self._peak() / max(seconds, 1e-9)} if recent else {}

    def read(self) -> dict[str, float]:
        """Totals since the beginning of the stage, over all ranks; a collective."""
        here = torch.tensor([self._flops, self._processor_s], dtype=torch.float64)
        flops, processor_s = (self._before + self._ranks.sum(here)).tolist()
        return {FLOPS: flops, PROCESSOR_S: processor_s}

    def restore(self, totals: Mapping[str, float]) -> None:
        """Continue from what `read` gave; of a state that says nothing from zero."""
        self._before = torch.tensor([totals.get(FLOPS, 0.0), totals.get(PROCESSOR_S, 0.0)]).double()


class StepClock:
    """Seconds in total and waiting for data, and samples: since the last look and since the beginning.

    Attributes:
        seconds: That the last look was about.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._waited = self._waited_before = 0.0
        self._seconds_before = 0.0
        self._begin()

    def _begin(self) -> None:
        self._start = time.perf_counter()
        self._waited = 0.0
        self._num_samples = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, training waits for data."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    def count(self, num_samples: int) -> None:
        """Samples that were trained on."""
        self._num_samples += num_samples

    def read(self) -> dict[str, float]:
        """Rates since the last call."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rates = {
            "training/samples_per_sec": self._num_samples / seconds,
            "training/data_wait_share": self._waited / seconds,
        }
        self.seconds = seconds
        self._seconds_before += seconds
        self._waited_before += self._waited
        self._begin()
        return rates

    def skip(self) -> None:
        """Leave out what passed since the last call of `read`, such as a validation."""
        self._begin()

    @property
    def data_wait_share(self) -> float:
        """Share of all time between looks that was spent waiting for data."""
        return self._waited_before / max(self._seconds_before, 1e-9)


class StartupClock:
    """Seconds of the phases before the first step. Phases may nest: each has what its inner ones leave.

    Args:
        began: When the start began, in seconds since 1970; by default now. What passed since is "imports".
        before: Seconds and other metrics of what was measured elsewhere, such as by a build of stores; with
            `began` these seconds passed since then, and aren't those of "imports".
    """

    def __init__(self, *, began: float | None = None, before: Mapping[str, float] | None = None) -> None:
        self._began = time.time() if began is None else began
        self.metrics = dict(before or {})
        if began is not None:
            measured_s = sum(value for name, value in self.metrics.items() if name.endswith(_SECONDS_END))
            self._add("imports", max(0.0, time.time() - began - measured_s))
        self._inner_s: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, the time belongs to a phase."""
        start = time.perf_counter()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._add(name, seconds - self._inner_s.pop())
            if self._inner_s:
                self._inner_s[-1] += seconds

    def take(self, metrics: Mapping[str, float]) -> None:
        """Add what was measured elsewhere, such as by a build of stores."""
        self.metrics |= metrics

    def end(self) -> dict[str, float]:
        """All metrics, with the minutes from the beginning until now."""
        return {**self.metrics, STARTUP_MINUTES: (time.time() - self._began) / 60}

    def _add(self, name: str, seconds: float) -> None:
        key = _SECONDS.format(name)
        self.metrics[key] = self.metrics.get(key, 0.0) + seconds


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
    """Inside, an error about memory names the batch."""
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
