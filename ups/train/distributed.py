"""Data-parallel training: losses of this rank's part of a batch, stopping together, joining the ranks.

`torchrun` starts them and gives each its place; their messages go through the CPU (gloo), so no GPU waits for
one. Every rank gathers its own rows of a batch. Which rows a batch has, and every random choice that is made
with it, doesn't depend on the number of ranks; DDP averages the gradients.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ups.distributed.ranks import ALONE, Ranks
from ups.errors import ConfigError, DivergedError, InterruptedTrainingError, UpsError
from ups.output import Note
from ups.train.interrupt import SAME_COMMAND
from ups.train.stage import Losses, Stage
from ups_store.launch import check_shared

# Kinds of errors that all ranks raise at the same point.
_RAISED_TOGETHER = (InterruptedTrainingError.kind, DivergedError.kind)


class ParallelLosses:
    """Losses of this rank's rows of a batch, and gradients averaged over the ranks.

    DDP wraps the losses, not the model: so it sees one forward pass for every backward pass, however often
    and by whichever methods the losses call the model. Where batches differ in the parameters that they need
    (another task's), it finds those in every step, so that no rank waits for their gradients. Gradients are
    views of the buffers that ranks exchange.

    Args:
        stage: What is trained.
        forward: The model, or its compiled form.
        ranks: Who takes part.
        accum_steps: Batches of an optimiser step.
    """

    def __init__(
        self, stage: Stage, forward: Callable[..., Any], *, ranks: Ranks, accum_steps: int = 1
    ) -> None:
        self._ranks = ranks
        self._losses: nn.Module = _StageLosses(stage, forward)
        if ranks.world_size > 1:
            # A static graph learns from the first backward pass, which may not be one without an exchange.
            is_static = stage.gradients == "the same" and accum_steps == 1
            self._losses = DistributedDataParallel(
                self._losses,
                gradient_as_bucket_view=True,
                find_unused_parameters=stage.gradients != "all" and not is_static,
                static_graph=is_static,
            )

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
        return self._losses(batch), batch.share


class _StageLosses(nn.Module):
    """Losses of a stage as a module that has what is trained, and no buffers that DDP would send around."""

    def __init__(self, stage: Stage, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(p for p in stage.model.parameters() if p.requires_grad)
        self._stage = stage
        self._model = (forward,)  # in a tuple, or its frozen parameters and buffers would count as ours

    def forward(self, batch: Any) -> Losses:
        return self._stage.losses(self._model[0], batch)


class Agreement:
    """A number that every rank brings along at every step; all learn the largest, one call later.

    The answer is that of the call before, which has arrived meanwhile, so that no rank waits for another.
    Alone the answer is the number itself.

    Args:
        ranks: Who takes part.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: tuple[Tensor, dist.Work] | None = None

    def __call__(self, number: int) -> int:
        """Bring a number, and return the largest of the call before; a collective."""
        if self._ranks.world_size == 1:
            return number
        before, mine = self._pending, torch.tensor(number)
        work = dist.all_reduce(mine, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._pending = (mine, work)
        if before is None:
            return 0
        largest, earlier = before
        earlier.wait()
        return int(largest)

    def end(self) -> None:
        """Wait for the last call's answer, which isn't needed."""
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None


@contextmanager
def joined_ranks(
    device_name: str,
    *,
    timeout_s: float,
    note: Note,
    variables: Mapping[str, str] = os.environ,
) -> Iterator[tuple[Ranks, torch.device]]:
    """Inside, this process belongs to the ranks that `torchrun` started; alone without it. May be nested.

    Args:
        device_name: As `training.device`.
        timeout_s: Seconds that a rank waits for the others, also while the first one validates.
        note: Told if a GPU was asked for and there is none.
        variables: The environment.

    Yields:
        This process's place and its device.

    Raises:
        ConfigError: If the variables contradict each other, or a rank has no GPU; kind "one_of_several" if a
            scheduler started several processes without them, which would all train the same.
        UpsError: Kind "rank_lost", when another rank ended or kept this one waiting for too long.
    """
    ranks = _from_environment(variables)
    device = ranks.device(device_name, note=note)
    if ranks.world_size == 1 or dist.is_initialized():  # alone, or inside of another `joined_ranks`
        yield ranks, device
        return
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    # A gradient of one column has two equal layouts, of which DDP expects one; nothing is lost.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        yield ranks, device
        _leave(ranks)
    except UpsError as error:
        if error.kind in _RAISED_TOGETHER:
            _leave(ranks)
        raise
    except RuntimeError as error:
        if not _is_about_ranks(error):
            raise
        raise UpsError(
            f"rank {ranks.rank} lost another rank",
            kind="rank_lost",
            hint="its own message says why",
            continued_by=SAME_COMMAND,
        ) from error
    # After other errors the group stays: a rank that waits for this one learns of it when this process ends.


def _leave(ranks: Ranks) -> None:
    """Leave once all ranks are here: none takes away a connection that another one still uses."""
    ranks.sum(torch.zeros(1))
    dist.destroy_process_group()


def _from_environment(variables: Mapping[str, str]) -> Ranks:
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        check_shared(variables)
        return ALONE
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = {name: variables.get(name, "0") for name in names}
    try:
        ranks = Ranks(*(int(found[name]) for name in names))
        is_sound = 0 <= ranks.rank < ranks.world_size and ranks.local_rank >= 0
    except ValueError:
        is_sound = False
    if not is_sound:
        shown = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ConfigError(
            "ranks",
            expected="numbers with RANK < WORLD_SIZE",
            found=shown,
            hint="start it with torchrun, or unset them",
        )
    return ranks


def _is_about_ranks(error: RuntimeError) -> bool:
    """Gloo raises plain RuntimeErrors; their text begins with the place in its own sources."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
