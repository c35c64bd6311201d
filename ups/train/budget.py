"""Budgets of training become numbers of optimiser steps, before the first of them.

Of counted operations each kind of step counts as often as it comes; that, and samples, are the same on every
machine. Processor time is measured: a few steps of each stage in turns, in one process, so that whatever else
the machine does meets all of them alike; compared is the median of their ratios. Validation isn't part of any
budget.
"""

from __future__ import annotations

import dataclasses
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from ups.config import RunConfig, StageConfig
from ups.config.checks import check_countable
from ups.config.stages import BudgetConfig
from ups.config.training import QuerySamplingConfig
from ups.data.batches import DataOrder, FrameBatch, WindowBatch, endless
from ups.data.stores import Store
from ups.distributed.ranks import ALONE, Ranks
from ups.errors import CheckpointError
from ups.log import logger
from ups.train.flops import count_step
from ups.train.physics_priors import PhysicsBatch
from ups.train.saved_state import SavedState, state_path
from ups.train.schedules import total_queries
from ups.train.stage import Curriculum, Stage, StageStart, make_stage
from ups.train.trainer import Trainer, autocast_of

ROUNDS = 15  # steps of each stage that are timed
_WARM_UP = 3  # before them


@dataclass(frozen=True)
class Costs:
    """What the batches of a stage cost, in the mean over a pass.

    Attributes:
        flops: Counted operations of a batch's losses and gradients, for rollouts of 1, 2, ... steps.
        rows: Frames or windows of a batch.
        curriculum: How long rollouts are.
        accum_steps: Batches of an optimiser step.
        prior_flops: What physics priors add, for rollouts of as many steps.
        num_due: How many of so many batches take them.
        query_flops: What each point that is asked at adds, by the points of a grid; `flops` are without.
        sampling: At how many points a step asks.
    """

    flops: Sequence[float]
    rows: float
    curriculum: Curriculum
    accum_steps: int
    prior_flops: Sequence[float] = ()
    num_due: Callable[[int], int] = lambda num_batches: 0
    query_flops: Mapping[int, float] = field(default_factory=dict)
    sampling: QuerySamplingConfig = field(default_factory=QuerySamplingConfig)

    def total(self, num_steps: int) -> float:
        """Counted operations of a training of so many optimiser steps."""
        num_batches = num_steps * self.accum_steps
        curriculum = dataclasses.replace(self.curriculum, num_batches=num_batches)
        total, begin = 0.0, 0
        for steps in range(1, curriculum.horizon + 1):
            end = bisect_right(range(num_batches), steps, key=curriculum.steps_at)
            total += (end - begin) * self.flops[steps - 1]
            if self.prior_flops:
                total += (self.num_due(end) - self.num_due(begin)) * self.prior_flops[steps - 1]
            begin = end
        for num_points, flops in self.query_flops.items():
            num = total_queries(self.sampling, num_steps=num_steps, num_points=num_points)
            total += flops * num * self.accum_steps
        return total

    def steps_within(self, budget: BudgetConfig) -> int:
        """The most optimiser steps that cost no more than a budget of operations or samples; at least 1."""
        if budget.samples is not None:
            return max(1, int(budget.samples / (self.rows * self.accum_steps)))
        assert budget.flops is not None
        least = min(self.flops) + sum(self.query_flops.values())  # at one point of each grid
        most = math.ceil(budget.flops / (least * self.accum_steps))
        return max(1, bisect_right(range(most + 1), budget.flops, key=self.total) - 1)


def measure_costs(stage: Stage, config: RunConfig, *, device: torch.device, ranks: Ranks = ALONE) -> Costs:
    """Count what the batches of a stage cost; a collective. Its data have to be asked for anew then."""
    check_countable(stage.name)
    autocast = autocast_of(config, stage.name, device)
    whole, priors = stage.curriculum, stage.priors
    lengths = range(1, whole.horizon + 1)
    flops, of_priors, of_points = [0.0 for _ in lengths], [0.0 for _ in lengths], dict[int, float]()
    rows, num = 0, 0

    def mean_of(batches: Sequence[object]) -> float:
        return sum(count_step(stage, batch, autocast=autocast) for batch in batches) / len(batches)

    stage.model.train()
    try:
        stage.curriculum = dataclasses.replace(whole, share=0.0)
        for number, times in _kinds_of_batches(stage).items():
            batch = next(endless(stage.loader, number))
            if isinstance(batch, FrameBatch):
                num_points = math.prod(batch.values.shape[1:-1])
                one, all_points = (
                    mean_of([dataclasses.replace(batch, points=torch.arange(asked))])
                    for asked in (1, num_points)
                )
                each = (all_points - one) / max(1, num_points - 1)
                of_points[num_points] = of_points.get(num_points, 0.0) + times * each
                flops[0] += times * (one - each)
            for steps in () if isinstance(batch, FrameBatch) else lengths:
                some = _of_length(batch, steps, has_pushforward=config.training.pushforward)
                plain = mean_of(some)
                flops[steps - 1] += times * plain
                if priors is not None:
                    of_priors[steps - 1] += times * (mean_of([*map(priors.of_all, some)]) - plain)
            rows, num = rows + times * batch.num_rows, num + times
    finally:
        stage.curriculum = whole
    counted = torch.tensor([*flops, *of_priors, *of_points.values()], dtype=torch.float64)
    means = (ranks.sum(counted) / num).tolist()
    return Costs(
        means[: len(lengths)],
        rows / num,
        whole,
        config.training.accum_steps,
        prior_flops=means[len(lengths) : 2 * len(lengths)] if priors is not None else (),
        num_due=priors.num_due if priors is not None else Costs.num_due,
        query_flops=dict(zip(of_points, means[2 * len(lengths) :], strict=True)),
        sampling=config.training.query_sampling,
    )


def _kinds_of_batches(stage: Stage) -> dict[int, int]:
    """How often batches of one source and length come in a pass, by the number of the first such batch."""
    order = stage.loader.order
    if not isinstance(order, DataOrder):
        return {0: 1}  # batches come as their data do; the first one stands for all
    kinds = [(step.source, step.num_rows) for step in order.steps(0)]
    return {kinds.index(kind): times for kind, times in Counter(kinds).items()}


def _of_length(batch: Any, steps: int, *, has_pushforward: bool) -> list[Any]:
    """The batch with rollouts of so many steps, once for each number that may go before the trained one."""
    if isinstance(batch, PhysicsBatch):
        batch = dataclasses.replace(batch, prior_weights={})
    if not isinstance(batch, WindowBatch):
        return [batch]
    cut = dataclasses.replace(batch, states=batch.states[:, : steps + 1], pushed=0)
    num_steps = cut.states.shape[1] - 1
    return [dataclasses.replace(cut, pushed=num) for num in range(num_steps if has_pushforward else 1)]


def within_budget(
    name: str,
    config: RunConfig,
    *,
    device: torch.device,
    ranks: Ranks = ALONE,
    is_continued: bool = True,
    latents: Mapping[str, Store] | None = None,
) -> RunConfig:
    """The configuration with a stage's budget as its number of steps; unchanged where there is no budget.

    A budget of seconds stays what it became when the training that is continued began.

    Args:
        device: Where it is trained.
        is_continued: Whether a training state that is there is continued from.
        latents: As `StageStart.latents`.
    """
    settings = config.stage(name)
    if settings.budget is None or settings.steps is not None:
        return config
    if settings.budget.seconds is not None and is_continued:
        saved = _steps_before(name, config, settings.budget)
        if saved is not None:
            return with_steps(config, name, saved)
    own = config
    if settings.budget.seconds is not None:  # a thread that prepares batches would be measured, too
        own = without_preparing(config)
    stage = make_stage(name, own, device=device, start=StageStart(latents=latents))
    try:
        if settings.budget.seconds is None:
            costs = measure_costs(stage, config, device=device, ranks=ranks)
            steps = costs.steps_within(settings.budget)
        else:
            (seconds,) = step_seconds([(stage, own)], device=device)
            steps = ranks.tell(max(1, int(settings.budget.seconds / median(seconds) / ranks.world_size)))
    finally:
        stage.close()
    logger.info(f"{name}: {settings.budget}: {steps:,} steps")
    return with_steps(config, name, steps)


def with_steps(config: RunConfig, name: str, steps: int) -> RunConfig:
    """The configuration with another number of steps of a stage."""
    stage = config.stages.get(name, StageConfig())
    # As if it had been said in the file: `model_copy` adds to what is said.
    changed = stage.model_copy(update={"steps": steps})
    return config.model_copy(update={"stages": {**config.stages, name: changed}})


def without_preparing(config: RunConfig) -> RunConfig:
    """With batches that are made when they are needed, not ahead by a thread."""
    training = config.training.model_copy(update={"prefetch_factor": 0})
    return config.model_copy(update={"training": training})


def _steps_before(name: str, config: RunConfig, budget: BudgetConfig) -> int | None:
    """What a budget became in the training that would be continued; None without one."""
    try:
        saved = SavedState.read(state_path(config, name)).document["config"]["stages"][name]
    except (CheckpointError, KeyError, TypeError):
        return None
    known = saved.get("budget") == budget.model_dump(mode="json")
    return int(saved["steps"]) if known and saved.get("steps") else None


def step_seconds(
    stages: Sequence[tuple[Stage, RunConfig]], *, device: torch.device, rounds: int = ROUNDS
) -> list[list[float]]:
    """Time of an optimiser step of each stage, measured in turns.

    It is processor time, or wall time where a GPU works. Steps are spread over the training, as rollouts may
    grow. The weights are changed by them.

    Args:
        stages: Stages with their configurations, which should prepare no batches ahead
            (`training.prefetch_factor=0`), or a thread's work counts for another stage.
        device: Where their models are.
        rounds: How many steps of each.

    Returns:
        Seconds by stage and round; those of one round belong together.
    """
    trainers = [Trainer(stage, config, device=device, restart=True) for stage, config in stages]
    seconds: list[list[float]] = [[] for _ in trainers]
    for number in range(-_WARM_UP, rounds):
        for trainer, found in zip(trainers, seconds, strict=True):
            spent = seconds_of_step(trainer, share=(max(0, number) + 0.5) / rounds)
            if number >= 0:
                found.append(spent)
    return seconds


def seconds_of_step(
    trainer: Trainer, *, share: float | None, clock: Callable[[], float] = time.process_time
) -> float:
    """Of the step after some share of the training, or of the next one; of a GPU's always wall time."""
    if share is not None:
        trainer.seek(int(share * trainer.total_steps))
    is_gpu = trainer.device.type == "cuda"
    clock = time.perf_counter if is_gpu else clock
    began = clock()
    trainer.train_step()
    if is_gpu:
        torch.cuda.synchronize(trainer.device)
    return clock() - began


def ratio_of(seconds: Sequence[float], others: Sequence[float]) -> float:
    """How much longer one stage's steps take than another's: the median over the rounds."""
    return median(one / other for one, other in zip(seconds, others, strict=True))
