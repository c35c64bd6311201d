"""Data-parallel training: every rank computes its rows of a batch, DDP averages the gradients.

Every rank makes the whole batch of a number and takes its rows; so the batch, and every random choice that
was made with it, doesn't depend on the number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ups.train.ranks import Ranks
from ups.train.stage import Losses, Stage


class ParallelLosses:
    """Losses of this rank's rows of a batch, and gradients averaged over the ranks.

    DDP wraps the losses, not the model: so it sees one forward pass for every backward pass, however often
    and by whichever methods the losses call the model. It finds the parameters that a batch doesn't need
    (another task's), so that nobody waits for their gradients.

    Args:
        stage: What is trained.
        forward: The model, or its compiled form.
        ranks: Who takes part.
    """

    def __init__(self, stage: Stage, forward: Callable[..., Any], *, ranks: Ranks) -> None:
        self._ranks = ranks
        self._losses: nn.Module = _StageLosses(stage, forward)
        if ranks.world_size > 1:
            self._losses = DistributedDataParallel(self._losses, find_unused_parameters=True)

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Inside, forward and backward pass of a batch; gradients are exchanged at a step's last one."""
        if is_last or not isinstance(self._losses, DistributedDataParallel):
            return nullcontext()
        return self._losses.no_sync()

    def __call__(self, batch: Any) -> tuple[Losses, float]:
        """Losses of this rank's rows, and their share of the batch.

        The sum over ranks of losses times shares is the batch's; for gradients DDP divides by the number of
        ranks, so there the share is to be multiplied by it.
        """
        if self._ranks.world_size == 1:
            return self._losses(batch), 1.0
        rows, share = self._ranks.rows_of(len(batch))
        return self._losses(take_rows(batch, rows)), share


class _StageLosses(nn.Module):
    """Losses of a stage as a module that has what is trained, and no buffers that DDP would send around."""

    def __init__(self, stage: Stage, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(p for p in stage.model.parameters() if p.requires_grad)
        self._stage = stage
        self._model = (forward,)  # in a tuple, or its frozen parameters and buffers would count as ours

    def forward(self, batch: Any) -> Losses:
        return self._stage.losses(self._model[0], batch)


def take_rows(batch: Any, rows: slice) -> Any:
    """Some rows of a batch; views. Every tensor in it has the batch as its first axis."""
    return map_tensors(batch, lambda tensor: tensor[rows])


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with every tensor changed; whatever isn't a tensor (task, generator) as it is.

    Args:
        batch: A tensor, or a dataclass.
        change: Called with each tensor.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    changed = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **changed)
