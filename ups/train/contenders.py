"""`Contender`: one configuration in training beside others, a few steps at a time, in one process.

Each has its own model, optimiser, averages, batches and random numbers, all from the same seed: so the
others change nothing of what it computes. Time, memory and losses are measured by round.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from ups.data.batches import batch_size_of
from ups.device import matmul_precision
from ups.errors import DivergedError
from ups.log import quiet
from ups.train.budget import with_steps
from ups.train.memory import is_out_of_memory
from ups.train.stage import make_stage
from ups.train.trainer import Trainer
from ups.train.variants import Variant

_LAST = 0.1  # of the rounds: their mean loss is the loss at the end


@dataclass
class Measured:
    """What was measured of a contender.

    Attributes:
        step_s: Wall time of a step, by round.
        processor_s: Processor time of a step, by round; threads that prepare batches are in it.
        losses: Mean total loss, by round.
        warm_up_s: Wall time of the first steps, with what they compile.
        first_step_s: Of the very first one.
        peak_nbytes: Memory at the fullest moment of a step; None if it couldn't be measured.
        waiting_share: Share of the steps' time that was spent waiting for batches, by round.
        nrmse: Validation error after the last step; None until then.
        failure: Why it was given up; None if it wasn't.
    """

    step_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    warm_up_s: float = 0.0
    first_step_s: float = 0.0
    peak_nbytes: int | None = None
    waiting_share: list[float] = field(default_factory=list)
    nrmse: float | None = None
    failure: str | None = None

    @property
    def loss(self) -> float | None:
        """Mean over the last tenth of the rounds; None before the first."""
        last = self.losses[-max(1, round(_LAST * len(self.losses))) :]
        return sum(last) / len(last) if last else None


class Contender:
    """A variant in training; a context manager that ends what it opened.

    Args:
        steps: Optimiser steps in all.

    Attributes:
        measured: So far.
        rows: Samples of an optimiser step.
    """

    def __init__(self, variant: Variant, *, stage: str, steps: int, device: torch.device) -> None:
        self.variant, self.measured = variant, Measured()
        self.rows = rows_of_step(variant, stage)
        self._config = with_steps(variant.config, stage, steps)
        self._device, self._stage_name = device, stage
        self._gpus = [device] if device.type == "cuda" else []
        self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]
        self._stack = ExitStack()
        self._trainer: Trainer | None = None

    def __enter__(self) -> Contender:
        with self._alone():
            with quiet():  # all say the same of their data
                stage = make_stage(self._stage_name, self._config, device=self._device)
            self._stack.callback(stage.close)
            self._stack.enter_context(closing(stage.loader))
            self._trainer = Trainer(stage, self._config, device=self._device, restart=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._trainer = None
        self._stack.close()

    @property
    def is_running(self) -> bool:
        """Whether it hasn't failed."""
        return self.measured.failure is None

    def warm_up(self, num_steps: int) -> None:
        """The first steps, whose time counts apart; memory is measured at the last of them."""
        assert num_steps > 1

        def work(trainer: Trainer) -> None:
            began = time.perf_counter()
            self._steps(trainer, 1)
            self.measured.first_step_s = time.perf_counter() - began
            self._steps(trainer, num_steps - 2)
            self.measured.warm_up_s = time.perf_counter() - began
            resident = trainer.state_nbytes()
            self.measured.peak_nbytes = resident + peak_nbytes(lambda: self._steps(trainer, 1), self._device)
            trainer.meter.read()

        self._try(work)

    def round(self, num_steps: int) -> None:
        """Some steps, timed."""

        def work(trainer: Trainer) -> None:
            trainer.stopwatch.skip()
            wall, processor = time.perf_counter(), time.process_time()
            self._steps(trainer, num_steps)
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            waiting = trainer.stopwatch.read()["training/data_wait_share"]
            losses = trainer.meter.read()
            self.measured.step_s.append(wall / num_steps)
            self.measured.processor_s.append(processor / num_steps)
            self.measured.waiting_share.append(waiting)
            self.measured.losses.append(sum(losses.values()))

        self._try(work)

    def validate(self) -> None:
        """Measure the validation error of the present weights."""

        def work(trainer: Trainer) -> None:
            self.measured.nrmse = trainer.measure()["score"]

        self._try(work)

    def _steps(self, trainer: Trainer, num: int) -> None:
        for _ in range(num):
            trainer.train_step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _try(self, work: Callable[[Trainer], None]) -> None:
        """What ends this contender ends none of the others."""
        assert self._trainer is not None
        try:
            with self._alone():
                work(self._trainer)
        except DivergedError as error:
            self._give_up(str(error.problem))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._give_up("out of memory: " + str(error).partition("\n")[0])

    def _give_up(self, why: str) -> None:
        self.measured.failure = why
        self.__exit__()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, random numbers and the precision of products are its own."""
        precision = self._config.training.matmul_precision
        with ExitStack() as stack:
            with quiet():
                stack.enter_context(matmul_precision(precision))
            stack.enter_context(torch.random.fork_rng(devices=self._gpus))
            torch.set_rng_state(self._random[0])
            for gpu, state in zip(self._gpus, self._random[1], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            yield
            self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]


def rows_of_step(variant: Variant, stage: str) -> int:
    """Samples of an optimiser step."""
    return batch_size_of(variant.config.stage(stage)) * variant.config.training.accum_steps


def peak_nbytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes that PyTorch's allocator gave out during some work, beyond those of its beginning.

    On a GPU it is what the allocator counts; on the CPU its calls, as PyTorch's profiler records them.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else the profiler's library writes to stderr
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work()
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    now = most = 0
    for _, nbytes in changes:
        now += nbytes
        most = max(most, now)
    return most
