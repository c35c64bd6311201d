"""`Ranks`: the processes that train one model together, and what they send each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ups.device import choose_device
from ups.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train together, and what they send each other.

    Every method but `device` and `share` is a collective: all ranks call it at the same point.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes.
        local_rank: Number of this process on its machine.
        local_world_size: Number of processes on its machine.
        group: Through which they send; by default the one of all.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group: dist.ProcessGroup | None = None

    def apart(self) -> Ranks:
        """The same ranks with a group of their own, for another thread than the one that trains."""
        if self.world_size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo"))

    @property
    def is_first(self) -> bool:
        """Whether this rank logs and writes."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this rank: with "auto" and "cuda" the GPU of its local number.

        Raises:
            ConfigError: Kind "too_many_ranks", if there are more ranks than GPUs on a machine.
        """
        if self.world_size == 1 or not (name.startswith("cuda") or name == "auto"):
            return choose_device(name)
        num_gpus = torch.cuda.device_count()
        if name == "auto" and num_gpus == 0:
            return torch.device("cpu")
        if self.local_rank >= num_gpus:
            raise ConfigError(
                "more processes than GPUs on this machine",
                kind="too_many_ranks",
                expected=f"torchrun --nproc-per-node {num_gpus}" if num_gpus else "training.device=cpu",
                found=f"local rank {self.local_rank}",
            )
        return torch.device("cuda", self.local_rank)

    def tell(self, value: Any = None) -> Any:
        """What the first rank says, as JSON values, to all."""
        if self.world_size == 1:
            return value
        raw = json.dumps(value).encode() if self.is_first else b""
        nbytes = torch.tensor(len(raw))
        dist.broadcast(nbytes, src=0, group=self.group)
        text = torch.frombuffer(bytearray(raw or int(nbytes)), dtype=torch.uint8)
        dist.broadcast(text, src=0, group=self.group)
        return json.loads(text.numpy().tobytes())

    def first_does(self, work: Callable[[], Any]) -> Any:
        """What the first rank gets by doing something, JSON values, sent to all; the others wait.

        If it fails, the first rank raises and the others end with it.
        """
        return self.tell(work() if self.is_first else None)

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the ranks, elementwise; on the CPU."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def least(self, values: Tensor) -> Tensor:
        """Minima over the ranks, elementwise; on the CPU."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's tensor of one shape, stacked along a new first axis; on the CPU."""
        if self.world_size == 1:
            return values.cpu().unsqueeze(0)
        parts = [torch.empty_like(values, device="cpu") for _ in range(self.world_size)]
        dist.all_gather(parts, values.cpu(), group=self.group)
        return torch.stack(parts)

    def share(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """This rank's part of some items, neighbours, as many as on every other rank.

        The last one is repeated where they don't suffice: a sharded model is called by all ranks alike, so
        one with nothing to do goes along. `joined` takes every item once.

        Args:
            items: At least one, shape (N,).

        Returns:
            New, shape (ceil(N / world_size),).
        """
        num = -(-len(items) // self.world_size)
        return items[np.minimum(self.rank * num + np.arange(num), len(items) - 1)]

    def joined(self, numbers: Tensor, values: Tensor) -> Tensor:
        """What all ranks found for their shares, each item once; on the CPU, the same on every rank.

        Args:
            numbers: Of the items of this rank's `share`, int64, shape (S,).
            values: What was found for each, shape (S, ...).

        Returns:
            New, shape (N, ...), by numbers that go up.
        """
        _, firsts = np.unique(self.gather(numbers).flatten().numpy(), return_index=True)
        return self.gather(values).flatten(0, 1)[torch.from_numpy(firsts)]

    def _reduced(self, values: Tensor, kind: dist.ReduceOp.RedOpType) -> Tensor:
        values = values.cpu()
        if self.world_size > 1:
            dist.all_reduce(values, kind, group=self.group)
        return values


ALONE = Ranks()
