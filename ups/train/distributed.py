"""Data-parallel training: losses of this rank's part of a batch, stopping together, joining the ranks.

`torchrun` starts them and gives each its place; their messages go through the CPU (gloo), so no GPU waits for
one. Every rank gathers its own rows of a batch. Which rows a batch has, and every random choice that is made
with it, doesn't depend on the number of ranks; DDP, or FSDP2 where parameters are sharded, averages the
gradients.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ups.config import TrainingConfig
from ups.distributed.layout import make_mesh, set_exchange, sharding_options
from ups.distributed.ranks import ALONE, Ranks
from ups.distributed.sharding import compile_blocks, is_sharded
from ups.errors import (
    ConfigError,
    DivergedError,
    GateMissedError,
    InterruptedTrainingError,
    UpsError,
)
from ups.log import logger, quiet
from ups.train.flops import ShapesOf
from ups.train.interrupt import SAME_COMMAND
from ups.train.stage import Losses, Stage
from ups_store.launch import check_shared

# Kinds of errors that all ranks raise at the same point.
_RAISED_TOGETHER = (InterruptedTrainingError.kind, DivergedError.kind, GateMissedError.kind)


# More sockets where there is no InfiniBand, and at least so many channels; the rest is NCCL's own default.
NCCL_VARIABLES = {
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_MIN_NCHANNELS": "4",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_IB_DISABLE": "0",
}


class ParallelLosses:
    """Losses of this rank's rows of a batch, and gradients averaged over the ranks.

    Sharded parameters exchange their gradients themselves. Else DDP wraps the losses, not the model: so it
    sees one forward pass for every backward pass, however often and by whichever methods the losses call the
    model. Where batches differ in the parameters that they need (another task's), it finds those in every
    step, so that no rank waits for their gradients. Gradients are views of the buffers that ranks exchange.

    Args:
        stage: What is trained.
        forward: The model, or its compiled form.
        accum_steps: Batches of an optimiser step.
    """

    def __init__(
        self, stage: Stage, forward: Callable[..., Any], *, ranks: Ranks, accum_steps: int = 1
    ) -> None:
        self._ranks = ranks
        self._losses: nn.Module = _StageLosses(stage, forward)
        self._sharded = [part.module for part in stage.sharded_parts()] if is_sharded(stage.model) else []
        # The last batch of a step may leave out what another one gave gradients to.
        self._has_one_exchange = stage.gradients != "some"
        if ranks.world_size > 1 and not self._sharded:
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
        set_exchange(self._sharded, is_last or not self._has_one_exchange)
        if is_last or not isinstance(self._losses, DistributedDataParallel):
            return nullcontext()
        return self._losses.no_sync()

    def __call__(self, batch: Any) -> tuple[Losses, float]:
        """Losses of this rank's rows, and their share of the batch.

        The sum over ranks of losses times shares is the batch's; gradients are divided by the number of
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


def share_out(
    stage: Stage,
    training: TrainingConfig,
    *,
    ranks: Ranks,
    device: torch.device,
    amp_dtype: torch.dtype | None,
    compile_mode: str | None,
) -> ShapesOf | None:
    """Share out a stage's parameters as `training.parallel` says; a collective.

    Order of wrapping: activation checkpointing is inside of what is compiled, by blocks, and that inside of
    what is sharded, the same blocks.

    Args:
        stage: With whole parameters, on its device; before there is an optimiser.
        amp_dtype: Of autocast; None where there is none.
        compile_mode: Of `torch.compile`; None if nothing is compiled.

    Returns:
        Shapes of the whole model; None if it stays whole.
    """
    mesh = make_mesh(training.parallel, ranks, device_type=device.type, shard_size=training.shard_size)
    if mesh is None:
        return None
    shapes = ShapesOf(stage.model)
    if compile_mode is not None:
        mode = without_graphs(compile_mode)
        for part in stage.sharded_parts():
            compile_blocks(part, mode=mode)
    stage.shard(mesh, **sharding_options(amp_dtype))
    trained = [parameter for parameter in stage.model.parameters() if parameter.requires_grad]
    assert all(isinstance(parameter, DTensor) for parameter in trained)  # nothing else averages gradients
    return shapes


def without_graphs(mode: str) -> str:
    """A mode of `torch.compile` without CUDA graphs, which need weights that stay where they are."""
    other = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(mode, mode)
    if other != mode:
        logger.info(
            f"training.compile_mode = {mode}: sharded weights move, so it is {other} without CUDA graphs"
        )
    return other


def check_num_ranks(training: TrainingConfig, ranks: Ranks) -> None:
    """Refuse to train with another number of ranks than `training.num_gpus`: batches would be others."""
    if ranks.world_size == 1 and training.parallel != "ddp":
        logger.warning(
            f"training.parallel = {training.parallel} has no effect: one process has all parameters"
        )
    wanted = training.num_gpus
    if wanted in (None, ranks.world_size, ranks.local_world_size):
        return
    raise ConfigError(
        f"training.num_gpus = {wanted}",
        kind="num_gpus",
        expected=f"as many ranks: `torchrun --nproc-per-node {wanted} -m ups train ...` starts them",
        found=f"{ranks.world_size} of them" if ranks.world_size > 1 else "one process without torchrun",
        hint=f"training.num_gpus={ranks.world_size} trains with what there is",
    )


class Agreement:
    """A number that every rank brings along at every step; all learn the largest, one call later.

    The answer is that of the call before, which has arrived meanwhile, so that no rank waits for another.
    Alone the answer is the number itself.
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
    device_name: str, *, timeout_s: float, variables: MutableMapping[str, str] = os.environ
) -> Iterator[tuple[Ranks, torch.device]]:
    """Inside, this process belongs to the ranks that `torchrun` started; alone without it. May be nested.

    Args:
        device_name: As `training.device`.
        timeout_s: Seconds that a rank waits for the others, also while the first one validates.
        variables: The environment, to which settings of NCCL are added.

    Yields:
        This process's place and its device.
    """
    ranks = launched_ranks(variables)
    device = ranks.device(device_name)
    if ranks.world_size == 1 or dist.is_initialized():  # alone, or inside of another `joined_ranks`
        yield ranks, device
        return
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
        with nullcontext() if ranks.is_first else quiet():
            set_nccl_variables(variables)
    # A gradient of one column has two equal layouts, of which DDP expects one; nothing is lost.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    # What a block returns is changed in place by none.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
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


def set_nccl_variables(variables: MutableMapping[str, str]) -> None:
    """Give NCCL's settings the values of `NCCL_VARIABLES`, but for those that are set."""
    own = {name: value for name, value in variables.items() if name.startswith("NCCL_")}
    if kept := sorted(own.items() - NCCL_VARIABLES.items()):
        logger.info(f"settings of NCCL as in the environment: {', '.join(map('='.join, kept))}")
    variables.update(NCCL_VARIABLES | own)


def _leave(ranks: Ranks) -> None:
    """Leave once all ranks are here: none takes away a connection that another one still uses."""
    ranks.sum(torch.zeros(1))
    dist.destroy_process_group()


def launched_ranks(variables: Mapping[str, str] = os.environ) -> Ranks:
    """Read which rank this process is, as `torchrun` says it; alone without it."""
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        check_shared(variables)
        return ALONE
    names = {"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": variables["WORLD_SIZE"]}
    found = {name: variables.get(name, absent) for name, absent in names.items()}
    try:
        rank, world_size, local_rank, local_world_size = map(int, found.values())
        ranks = Ranks(rank, world_size, local_rank, local_world_size)
        is_sound = 0 <= ranks.rank < ranks.world_size and 0 <= ranks.local_rank < ranks.local_world_size
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
