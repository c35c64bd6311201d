"""The ranks that a run will have, as its configuration says; this process is alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ups.config import RunConfig
from ups.config.stages import StageConfig


@dataclass(frozen=True)
class PlannedRanks:
    """Ranks that train together.

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
        """As `ups run` would start them."""
        training = config.training
        num = config.pipeline.num_processes or training.num_gpus or 1
        shards = {"ddp": 1, "fsdp2": num, "hsdp": min(num, training.shard_size or num)}
        return cls(num, training.parallel, shards[training.parallel])

    def batch_size_of(self, settings: StageConfig) -> int:
        """Rows of a whole batch over all of them, from either of a stage's two batch sizes."""
        if settings.global_batch_size is not None:
            return settings.global_batch_size
        assert settings.batch_size is not None  # one of both is taken from `training`
        return settings.batch_size * self.num

    def steps_of(self, alone: int) -> int:
        """Optimiser steps of a budget that lasts one rank so many: all of them draw on it."""
        return max(1, alone // self.num)

    def memory_of_rank(self, measured: int, *, states: int) -> int:
        """Memory of one of them, of what a process took that held all states itself.

        Args:
            measured: Of that process, in bytes.
            states: Parameters, gradients, and states of the optimiser, in bytes.
        """
        return measured - states + -(-states // self.num_shards)

    def shown(self, device: str) -> str:
        """The device and how many there are of it, for people."""
        if self.num == 1:
            return device
        shards = f", {self.num_shards} shards" if self.num_shards > 1 else ""
        return f"{self.num} x {device} ({self.parallel}{shards})"


ALONE = PlannedRanks()
