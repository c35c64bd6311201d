"""How many optimiser steps a stage has, by the sizes of its data alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ups.config import RunConfig
from ups.data.batches import random_order
from ups.data.held_out import divided
from ups.grid import FIELDS
from ups.pipeline.planned_ranks import ALONE, PlannedRanks
from ups.pipeline.sources import TaskSources
from ups.stages import STAGES, StageFacts
from ups.train.schedules import Schedule


def total_steps(
    config: RunConfig, stage: str, tasks: Mapping[str, TaskSources], ranks: PlannedRanks = ALONE
) -> int | None:
    """Optimiser steps of a stage.

    Args:
        stage: Its name.
        tasks: Its sources.
        ranks: That will train together.

    Returns:
        Their number; None where a budget says it, or nothing is known of the data.
    """
    settings = config.stage(stage)
    if settings.budget is not None and settings.steps is None:
        return None
    facts = STAGES[stage]
    if facts.items == "frames" and not config.encoder.residual:
        return 0
    if facts.learns == "solutions":
        tasks = {name: task for name, task in tasks.items() if task.info is None or task.info.steady}
    sizes = [size for task in tasks.values() for size in _sizes(config, facts, task)]
    if not all(sizes) or not sizes:
        return None
    size = ranks.batch_size_of(settings)
    drop_last = facts.items == "frames" and min(sizes) >= size  # as `frame_data`
    order = random_order(sizes, global_batch_size=size, seed=config.seed, drop_last=drop_last)
    accum_steps = config.training.accum_steps
    return Schedule.of(settings, num_batches=order.num_steps, accum_steps=accum_steps).total_steps


def _sizes(config: RunConfig, stage: StageFacts, task: TaskSources) -> Iterator[int]:
    """Items of a pass: frames of each array, windows, residuals, or a teacher's pairs."""
    takes_pairs = stage.items == "pairs" and (config.stage(stage.name).method or "reflow") == "reflow"
    num_samples = task.num_samples("train")
    if task.info is None:
        yield 0
    elif takes_pairs:
        yield config.training.distill_num_pairs
    elif stage.items in ("residuals", "pairs"):
        yield _num_residuals(config, task)
    elif stage.items == "frames":
        for array in task.info.grid.arrays:
            yield num_samples * (task.num_times if array == FIELDS else 1)
    elif task.info.steady:
        yield num_samples
    else:
        yield num_samples * max(0, task.num_times - config.training.horizon * config.training.stride)


def _num_residuals(config: RunConfig, task: TaskSources) -> int:
    """As `ups.data.residuals` takes them, of the validation trajectories that aren't "dev"."""
    num_val, diffusion = (task.num_samples("val") + 1) // 2, config.diffusion
    num_fit = len(divided(num_val, diffusion.residual_share)["fit"])
    starts, lead_times = rollouts_of(config, task)
    return min(num_fit * starts, max(1, diffusion.num_pairs // lead_times)) * lead_times


def rollouts_of(config: RunConfig, task: TaskSources) -> tuple[int, int]:
    """From how many time steps of a trajectory the operator is rolled out for residuals, and how far."""
    if task.info is None or task.info.steady:
        return 1, 1
    lead_times = config.diffusion.lead_times
    return max(0, (task.num_times - 1) // config.training.stride - lead_times + 1), lead_times
