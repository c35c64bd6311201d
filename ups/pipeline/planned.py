"""The ranks that a run will have, and the steps of its stages by the sizes of its data; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ups.config import RunConfig
from ups.data.held_out import divided
from ups.grid import FIELDS
from ups.pipeline.sources import TaskSources
from ups.stages import STAGES, StageFacts


@dataclass(frozen=True)
class PlannedRanks:
    """Ranks that train together, as the configuration says; this process is alone.

    Attributes:
        num: Their number.
        parallel: As `training.parallel`.
        num_shards: Over how many of them parameters, gradients and states of the optimiser are shared out.
    """

    num: int = 1
    parallel: str = "ddp"
    num_shards: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> PlannedRanks:
        """Those that `ups run` would start."""
        training = config.training
        num = config.pipeline.num_processes or training.num_gpus or 1
        shards = {"ddp": 1, "fsdp2": num, "hsdp": min(num, training.shard_size or num)}
        return cls(num, training.parallel, shards[training.parallel])

    def steps_of(self, alone: int) -> int:
        """Optimiser steps of a budget that lasts one rank so many: all of them draw on it."""
        return max(1, alone // self.num)

    def memory_of_rank(self, measured: int, *, states: int) -> int:
        """Memory of one of them, of what a process took that held all states of the training itself."""
        return measured - states + -(-states // self.num_shards)

    def shown(self, device: str) -> str:
        """Name the device and how many there are of it, for people."""
        if self.num == 1:
            return device
        shards = f", {self.num_shards} shards" if self.num_shards > 1 else ""
        return f"{self.num} x {device} ({self.parallel}{shards})"


ALONE = PlannedRanks()


def total_steps(
    config: RunConfig, stage: str, tasks: Mapping[str, TaskSources], ranks: PlannedRanks = ALONE
) -> int | None:
    """Count the optimiser steps of a stage; None where a budget says it, or nothing is known of the data."""
    from ups.data.batches import random_order  # with torch, which ranks don't need
    from ups.train.schedules import Schedule

    settings, facts = config.stage(stage), STAGES[stage]
    if settings.budget is not None and settings.steps is None:
        return None
    if facts.items == "frames" and not config.encoder.residual:
        return 0
    if facts.learns == "solutions":
        tasks = {name: task for name, task in tasks.items() if task.info is None or task.info.steady}
    sizes = [size for task in tasks.values() for size in _sizes(config, facts, task)]
    if not all(sizes) or not sizes:
        return None
    size = settings.rows_over(ranks.num)
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
        # As `ups.data.residuals` takes them, of the validation trajectories that aren't "dev".
        num_val, diffusion = (task.num_samples("val") + 1) // 2, config.diffusion
        num_fit = len(divided(num_val, diffusion.residual_share)["fit"])
        starts, lead_times = rollouts_of(config, task)
        yield min(num_fit * starts, max(1, diffusion.num_pairs // lead_times)) * lead_times
    elif stage.items == "frames":
        for array in task.info.grid.arrays:
            yield num_samples * (task.num_times if array == FIELDS else 1)
    elif task.info.steady:
        yield num_samples
    else:
        yield num_samples * max(0, task.num_times - config.training.horizon * config.training.stride)


def rollouts_of(config: RunConfig, task: TaskSources) -> tuple[int, int]:
    """From how many time steps of a trajectory the operator is rolled out for residuals, and how far."""
    if task.info is None or task.info.steady:
        return 1, 1
    lead_times = config.diffusion.lead_times
    return max(0, (task.num_times - 1) // config.training.stride - lead_times + 1), lead_times
