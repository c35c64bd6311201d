"""A step of the trainer: over a bare loop, over its products alone, by size of the model; and its waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.measure import TIME, Comparison, Timed, compare, processor_timed, tracked
from benchmarks.harness.scale import SCALE
from benchmarks.train.inputs import TOKENS, demo
from ups.data.batches import endless
from ups.optim import AveragedWeights
from ups.train.flops import counting, of_step
from ups.train.trainer import Trainer

_PAIRS = 20 if SCALE.name == "quick" else 200
_STEPS = 3  # of one side of a pair


def steps_of(trainer: Trainer) -> Timed:
    """Processor time of a step."""

    def work(i: int) -> None:
        for _ in range(_STEPS):
            trainer.train_step()

    return processor_timed(work)


class TrainStep:
    """The demo's step, on one thread, batches made when they are needed."""

    timeout = 600

    def setup(self) -> None:
        self.trainer = demo().trainer()

    def _over(self, reference: Timed) -> Comparison:
        found = compare(steps_of(self.trainer), reference, pairs=_PAIRS, num_unmeasured=5)
        return Comparison(
            found.time_ratio, found.quartiles, found.ours_s / _STEPS, found.reference_s / _STEPS, 0
        )

    @tracked("a training step, over a bare loop of the same model", TIME, at_most=1.03)
    def track_over_bare_loop(self) -> Comparison:
        return self._over(processor_timed(bare_steps(demo().trainer())))

    @tracked("a training step, over its products and FFTs alone", TIME)
    def track_over_products(self) -> Comparison:
        calls = counted_calls(demo().trainer())

        @torch.no_grad()
        def work(i: int) -> None:
            for _ in range(_STEPS):
                for call in calls:
                    call()

        return self._over(processor_timed(work))


class StepOfSize:
    """Tokens a second of processor time, by size of the model."""

    timeout = 600
    param_names = ("size",)
    params = ("demo", "tiny", "small")

    def setup(self, size: str) -> None:
        sizes = ["operator.depths=null", "operator.width=null", f"operator.size={size}"]
        self.trainer = demo().trainer(*([] if size == "demo" else sizes))

    @tracked("tokens a second of processor time, forward and backward", "tokens/s")
    def track_tokens(self, size: str) -> float:
        step = steps_of(self.trainer)
        rows = self.trainer.stage.loader.order.global_batch_size
        step(0)
        seconds = sorted(step(i) for i in range(_PAIRS // 4))
        return TOKENS * rows * _STEPS / seconds[len(seconds) // 2]


class Waiting:
    """How long a step waits for its batch, two of which a thread prepares ahead."""

    timeout = 600

    def setup(self) -> None:
        self.trainer = demo().trainer("training.prefetch_factor=2")

    def teardown(self) -> None:
        self.trainer.stage.loader.close()

    @tracked("share of the wall time that training waits for data", "%", at_most=1.0)
    def track_share(self) -> float:
        for _ in range(10):
            self.trainer.train_step()
        self.trainer.stopwatch.skip()
        until = time.perf_counter() + 0.1 * _PAIRS
        while time.perf_counter() < until:
            self.trainer.train_step()
        return 100 * self.trainer.stopwatch.read()["training/data_wait_share"]


def bare_steps(trainer: Trainer) -> Callable[[int], None]:
    """What one would write without a trainer: the same batches, losses, clipping, optimiser and averages."""
    stage, optimizer, clip = trainer.stage, trainer.optimizer, trainer.settings.grad_clip
    averaged, batches = AveragedWeights(stage.model, decay=0.99), endless(stage.loader, 0)
    assert clip is not None
    stage.model.train()

    def work(i: int) -> None:
        for _ in range(_STEPS):
            losses = stage.losses(stage.model, next(batches))
            sum(losses.values()).backward()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(stage.model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            averaged.update()

    return work


def counted_calls(trainer: Trainer) -> list[Callable[[], object]]:
    """The operations of a step's losses and gradients that are counted, on the tensors that it had."""
    batch = next(endless(trainer.stage.loader, 0))
    trainer.stage.model.train()
    return of_step(trainer.stage, batch, _recorded)


def _recorded(work: Callable[[], object]) -> list[Callable[[], object]]:
    with counting() as counter, _Recorder(counter.get_total_flops) as recorder:
        work()
    return recorder.calls


class _Recorder(TorchDispatchMode):
    """Inside, operations that are counted are kept with their arguments."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self._count = count
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before, given = self._count(), kwargs or {}
        result = func(*args, **given)
        if self._count() > before:
            self.calls.append(lambda: func(*args, **given))
        return result
