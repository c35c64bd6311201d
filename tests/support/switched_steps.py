"""A step of a small operator with some switches on, by one process or by several ranks of gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from numbered_batches import numbered_loader
from rank_processes import rank_variables, start, wait
from rank_training import CPU, Points, Waves
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ups.config import RunConfig, load_config
from ups.data.augment import Draws
from ups.distributed.ranks import ALONE, Ranks
from ups.distributed.sharding import whole
from ups.models.latent_operator import LatentOperator
from ups.models.operator_size import OperatorSize, TokenAxis
from ups.nn.layers import Condition
from ups.train.distributed import joined_ranks
from ups.train.stage import Losses
from ups.train.switches import SWITCHES, check_switches
from ups.train.trainer import Trainer
from ups_store.torch import ranks_of_torch

NUM_ROWS = 4
# Its steps are linear in the gradient, nearly: one that AdamW divides by its own size is mostly sign.
LINEAR = ["optimizer.eps=1", "optimizer.lr=0.1", "optimizer.weight_decay=0.1"]
# Five iterations of Newton and Schulz make of a rounding error another direction.
SMOOTH = ["optimizer.muon_ns_steps=1"]
NUM_RANKS = {"ddp": 2, "fsdp2": 2, "hsdp": 4}  # 2 x 2


class Model(nn.Module):
    """An operator whose blocks have attention and Fourier modes, on one grid with walls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = OperatorSize(width=32, depths=(2,), mixers=("hybrid",), num_heads=2, mlp_ratio=4.0, window=4)
        axes = (TokenAxis(16, True),)
        self.operator = LatentOperator(4, num_tasks=1, ranges=[(0.1, 1.0)], size=size, axes=axes)
        self.geometry = self.operator.geometry((16,), ("dirichlet",), steady=False)
        with torch.no_grad():
            for weight in self.operator.parameters():
                weight.add_(0.05 * torch.randn_like(weight))

    def forward(self, state_BLD: Tensor) -> Tensor:
        dt_B, parameters = state_BLD.new_ones(len(state_BLD)), state_BLD.new_full((len(state_BLD), 1), 0.5)
        conditions = self.operator.conditions(Condition(0, parameters), dt_B, self.geometry)
        return self.operator.advance(state_BLD, conditions, self.geometry)


class Tiny(Waves):
    """It learns to shift tokens; each rank has its rows of a batch."""

    name = "operator"
    gradients = "the same"

    def __init__(self, device: torch.device) -> None:
        self.model = Model().to(device)
        self.device = device
        self.loader = numbered_loader(self.batch, 4)

    def batch(self, number: int) -> Points:
        rank, world_size = ranks_of_torch()
        first, end = (NUM_ROWS * each // world_size for each in (rank, rank + 1))
        rows = torch.randn(NUM_ROWS, 16, 4, generator=torch.Generator().manual_seed(number))[first:end]
        draws = Draws.of_batch(NUM_ROWS, seed=number)
        return Points("states", rows, draws=draws, share=(end - first) / NUM_ROWS)

    def losses(self, forward: Callable[..., Tensor], batch: Points) -> Losses:
        state = batch.x.to(self.device).requires_grad_()
        return {"error": (forward(state).float() - state.detach().roll(1, 1)).square().mean()}


def config_of(folder: Path, *names: str) -> RunConfig:
    """The configuration that has these switches on, and no other."""
    said = [setting for name in names for setting in SWITCHES[name].settings]
    if "grad_clip" not in names:
        said.append("training.grad_clip=null")
    if "hsdp" in names:
        said.append("training.shard_size=2")
    said += LINEAR + (SMOOTH if "muon_hybrid" in names else [])
    below = [f"stages.operator.{text}" if text.startswith("optimizer.") else text for text in said]
    common = ["data.tasks=[burgers1d]", f"checkpoint.dir={folder}", "training.prefetch_factor=0"]
    return load_config(overrides=[*common, *below])


def step_of(
    folder: Path, names: Iterable[str], *, device: torch.device = CPU, ranks: Ranks = ALONE
) -> Tensor:
    """What a step changes the weights by, and the averages where there are any."""
    config = config_of(folder, *names)
    check_switches(config, "operator", device=device, num_ranks=ranks.world_size)
    torch.set_float32_matmul_precision(config.training.matmul_precision)
    trainer = Trainer(Tiny(device), config, device=device, ranks=ranks)
    weights = dict(trainer.stage.model.named_parameters())
    before = _as_vector(weights)
    trainer.scaler = torch.amp.GradScaler(device.type, init_scale=64.0, enabled=trainer.scaler.is_enabled())
    trainer.train_step()
    parts = [_as_vector(weights) - before]
    if trainer.averaged is not None:
        averages = trainer.averaged.averages
        parts.append(_as_vector({name: averages[name] for name in weights}) - before)
    return torch.cat(parts)


def _as_vector(tensors: dict[str, Any]) -> Tensor:
    return nn.utils.parameters_to_vector(whole(tensors).values()).detach().clone()


@contextmanager
def traced() -> Iterator[None]:
    """Inside, compiling traces and makes no code: what Inductor makes is compared elsewhere."""
    plain, before = torch.compile, torch.get_float32_matmul_precision()
    torch._dynamo.reset()
    with patch("torch.compile", lambda function, **options: plain(function, backend="aot_eager")):
        yield
    torch.set_float32_matmul_precision(before)  # type: ignore[no-untyped-call]


def steps_on_ranks(folder: Path, cases: Iterable[tuple[str, ...]], *, world_size: int) -> dict[str, Tensor]:
    """`step_of` of each case, by as many ranks, whose processes are started once."""
    names = [",".join(case) for case in cases]
    processes = [start(_main, folder, names, **variables) for variables in rank_variables(world_size)]
    assert wait(processes, timeout_s=500) == [0] * world_size
    return load_file(folder / "steps.safetensors")


def _main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    found = dict[str, Tensor]()
    with joined_ranks("cpu", timeout_s=200) as (ranks, _):
        for case in cases:
            with traced():
                found[case] = step_of(folder / case, case.split(","), ranks=ranks)
    if os.environ["RANK"] == "0":
        save_file(found, folder / "steps.safetensors")
