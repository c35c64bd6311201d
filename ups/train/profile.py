"""`ups train --profile STEPS`: what some steps spend their time on, and what bounds them.

The device works on kernels, copies, or nothing; what it doesn't do while training waits for a batch is the
data's fault, the rest that of whoever launches its work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ups.log import logger
from ups.output import appears_whole
from ups.train.log import RunLog

WARM_UP = 5  # steps of this process that aren't recorded: compilation, caches, the allocator's first blocks
ROWS = 15  # operations of the table
_STEPS, _WAIT = "ups: steps", "ups: wait for data"
_CAUSES = {
    "data": "waiting for batches: more training.prefetch_factor or training.num_workers, or preload",
    "compute": "operations: training.amp, training.compile, or a smaller model",
    "transfer": "copies to and from the device: training.pin_memory, or preload onto it",
    "launch": "Python and launches: training.compile, or a larger training.batch_size",
}

Interval = tuple[float, float]  # beginning and end, microseconds

_wanted: ContextVar[int] = ContextVar("profiled_steps", default=0)


@contextmanager
def profiling(num_steps: int) -> Iterator[None]:
    """Inside, every stage that is trained records so many steps."""
    token = _wanted.set(num_steps)
    try:
        yield
    finally:
        _wanted.reset(token)


class StepProfile:
    """Records steps after the warm-up, within one epoch; a context manager around training.

    Args:
        folder: Where `<stage>.trace.json` goes.
        device: What trains.
        log: Gets the table and the verdict.
        is_first: Whether this is the first rank, which alone is recorded.
    """

    def __init__(
        self, folder: Path, *, stage: str, device: torch.device, log: RunLog, is_first: bool
    ) -> None:
        self._path, self._device, self._log = folder / f"{stage}.trace.json", device, log
        self._wanted = _wanted.get() if is_first else 0
        self._seen = self._recorded = 0
        self._profiler: profile | None = None
        self._range: record_function | None = None

    @property
    def is_on(self) -> bool:
        """Whether steps are still to be recorded."""
        return self._wanted > 0

    def waiting(self) -> AbstractContextManager[Any]:
        """Inside, training waits for a batch."""
        return record_function(_WAIT) if self._profiler is not None else nullcontext()

    def after_step(self, step: int, *, is_last_of_epoch: bool) -> None:
        """Begin, count or end; a validation is never part of it."""
        self._seen += 1
        if self._profiler is not None:
            self._recorded += 1
            if self._recorded == self._wanted or is_last_of_epoch:
                self._end(step)
        elif self._seen >= WARM_UP and not is_last_of_epoch:
            self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:  # training was interrupted amid
            self._stop()
        if self.is_on and error is None:
            logger.warning(f"no step was profiled: that takes more than {WARM_UP} steps")

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._range = record_function(_STEPS)
        self._range.__enter__()

    def _stop(self) -> profile:
        assert self._profiler is not None
        assert self._range is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._range.__exit__(None, None, None)
        self._profiler.stop()
        found, self._profiler, self._range = self._profiler, None, None
        return found

    def _end(self, step: int) -> None:
        found, self._wanted = self._stop(), 0
        on_gpu = self._device.type == "cuda"
        key = f"self_{'device' if on_gpu else 'cpu'}_time_total"
        self._log.note(
            found.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=50).strip()
        )
        shares, seconds = shares_of(found.events() or (), on_gpu=on_gpu)
        verdict = max(shares, key=lambda name: shares[name])
        self._log.note(
            f"{self._recorded} steps of {seconds / self._recorded * 1e3:.3g} ms, {verdict}-bound "
            f"({_CAUSES[verdict]}): {', '.join(f'{name} {share:.0%}' for name, share in shares.items())}"
        )
        self._log.record("profile", step=step, verdict=verdict, shares=shares, seconds=seconds)
        try:
            with appears_whole(self._path) as partial:
                found.export_chrome_trace(str(partial))
        except OSError as error:
            self._log.note(
                f"warning: {self._path}: can't be written ({(error.strerror or str(error)).lower()})"
            )
        else:
            self._log.note(f"{self._path}: for chrome://tracing or ui.perfetto.dev")


def shares_of(events: Iterable[Any], *, on_gpu: bool) -> tuple[Mapping[str, float], float]:
    """What the time of recorded steps went to.

    Args:
        events: Of torch.profiler, with the ranges of `StepProfile`.
        on_gpu: Whether the device is a GPU; on a CPU its operations count, and copies among them.

    Returns:
        Shares that add up to 1, of "data", "compute", "transfer" and "launch"; and the seconds in all.
    """
    window, waits, kernels, copies = list[Interval](), list[Interval](), list[Interval](), list[Interval]()
    for event in events:
        of_device = (event.device_type == DeviceType.CUDA) == on_gpu
        span = (event.time_range.start, event.time_range.end)
        if event.name in (_STEPS, _WAIT):
            if event.device_type == DeviceType.CPU:
                (window if event.name == _STEPS else waits).append(span)
        elif of_device and not event.is_user_annotation:
            is_copy = on_gpu and event.name.startswith(("Memcpy", "Memset"))
            (copies if is_copy else kernels).append(span)
    total = _length(window)
    computing = kernels if on_gpu else _without(kernels, waits)
    compute = _length(computing)
    transfer = _length([*computing, *copies]) - compute
    data = _length([*computing, *copies, *waits]) - compute - transfer
    spent = {"data": data, "compute": compute, "transfer": transfer}
    spent["launch"] = max(total - sum(spent.values()), 0.0)
    whole = max(sum(spent.values()), 1e-9)
    return {name: time / whole for name, time in spent.items()}, total / 1e6


def _merged(spans: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in _merged(spans))


def _without(spans: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """What is left of spans outside of others."""
    left = _merged(spans)
    for begin, end in _merged(removed):
        left = [
            part
            for one in left
            for part in ((one[0], min(one[1], begin)), (max(one[0], end), one[1]))
            if part[0] < part[1]
        ]
    return left
