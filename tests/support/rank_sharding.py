"""What ranks run in tests of sharded parameters: validation, and steps from a state of either form."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cache_runs
import torch
import torch.optim._muon as muon
from rank_training import OPERATOR, Waves
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ups.config import OptimizerConfig
from ups.data.batches import endless
from ups.distributed.ranks import ALONE, Ranks
from ups.distributed.sharding import (
    ShardedPart,
    load_shards,
    own_shards,
    shard_part,
    shared_out,
    whole,
)
from ups.models.latent_operator import LatentOperator
from ups.models.operator_size import OperatorSize, TokenAxis
from ups.optim import AveragedWeights, make_optimizer, muon_matrices, parameter_groups
from ups.stages import BASELINES
from ups.train.best import export
from ups.train.distributed import joined_ranks
from ups.train.stage import Stage, make_stage
from ups.train.state import StateTensors
from ups.trained.checkpoint import load_checkpoint, save_checkpoint

CPU = torch.device("cpu")
SETTINGS = (
    *OPERATOR,
    "operator.val_trajectories=3",  # of two ranks one has two of them
    "training.max_val_frames=5",
    "training.use_inverse_losses=true",
    "stages.joint.epochs=1",
    "stages.autoencoder.epochs=1",
    "stages.corrector.epochs=1",
    "diffusion.num_sampler_steps=2",
    "diffusion.export_anyway=true",
    "stages.student.epochs=1",
    "stages.student.method=consistency",
    "diffusion.num_pairs=40",
    "training.augment=false",
    "baselines.fno.width=8",
    "baselines.fno.modes=4",
    "baselines.unet.width=8",
)
BETWEEN, STEPS = 2, 4  # optimiser steps before the state is saved, and in all


def stage_of(name: str, folder: Path, ranks: Ranks) -> Stage:
    """A stage on the sources of `cache_runs`, all weights changed so that no output is zero."""
    if name == "waves":
        return Waves()
    tasks = ["data.tasks=[burgers1d]"] if name in BASELINES else []
    config = cache_runs.configure(folder, *SETTINGS, *tasks, f"cache.dir={folder / 'fields'}")
    stage = make_stage(name, config, device=CPU)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in stage.model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    stage.ranks = ranks
    return stage


def add_operator(folder: Path) -> None:
    """An operator that a corrector can be trained for, and a corrector that can be distilled."""
    for name in ("operator", "corrector"):
        stage = stage_of(name, folder, ALONE)
        path = stage.export({}, stage.model.state_dict())
        path.rename(path.with_name(path.name.replace(".candidate", "")))
        stage.close()


class Run:
    """A training of some steps without the trainer, with AdamW, clipping and averages.

    Args:
        stage: With whole parameters.
        ranks: Who trains together; several shard the parameters.
    """

    def __init__(self, stage: Stage, ranks: Ranks) -> None:
        self.stage, self.ranks = stage, ranks
        if ranks.world_size > 1:
            stage.shard(init_device_mesh("cpu", (ranks.world_size,)))
        self.optimizer = stage.configure_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.1))
        self.averaged = AveragedWeights(stage.model, decay=0.9)
        self.tensors = StateTensors(
            model=stage.model, optimizer=self.optimizer, averaged=self.averaged, stage={}
        )

    def train(self, begin: int, end: int) -> None:
        batches = endless(self.stage.loader, begin)
        self.stage.model.train()
        for _ in range(begin, end):
            batch = next(batches)
            losses = self.stage.losses(self.stage.model, batch)
            total = torch.stack(list(losses.values())).sum() * (batch.share * self.ranks.world_size)
            total.backward()
            nn.utils.clip_grad_norm_(self.stage.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.averaged.update()

    def fill(self, tensors: dict[str, Tensor]) -> None:
        self.tensors.fill(tensors, ema_updates=BETWEEN, path=Path("state"))


def measure(stage: Stage) -> dict[str, Any]:
    """What the stage says of its weights, and of what it exports of them."""
    stage.model.eval()
    metrics = stage.validate()
    export(stage, metrics, ranks=stage.ranks, earlier=None)
    stage.ranks.tell()  # it is written
    return {"metrics": metrics, "report": stage.finish()}


def train_in_parts(name: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Some steps; the state in both forms; the rest of the steps from either of them."""
    first = Run(stage_of(name, folder, ranks), ranks)
    first.train(0, BETWEEN)
    tensors = first.tensors.now()
    own = own_shards(tensors, ranks)
    save_checkpoint(
        folder / "shards" / f"{ranks.rank}.safetensors",
        {name: shard.values for name, shard in own.items()},
        kind="shards",
        document={},
        offsets={name: shard.offsets for name, shard in own.items()},
    )
    if kept := whole(tensors, is_kept=ranks.is_first):
        save_checkpoint(folder / "half.safetensors", kept, kind="training", document={})
    ranks.tell()  # it is written
    for form in ("shards", "half"):
        run = Run(stage_of(name, folder, ranks), ranks)
        if form == "shards":
            run.fill(load_shards(folder / form, run.tensors.form_of))
        else:
            run.fill(load_checkpoint(folder / "half.safetensors", kind="training")[0])
        run.train(BETWEEN, STEPS)
        if kept := whole(run.tensors.now(), is_kept=ranks.is_first):
            save_checkpoint(folder / f"from_{form}.safetensors", kept, kind="training", document={})
    sharded = [t for t in tensors.values() if isinstance(t, DTensor)]
    local = sum(tensor.to_local().numel() for tensor in sharded)
    return {"local": local, "total": sum(tensor.numel() for tensor in sharded)}


def validate_sharded(name: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    return measure(Run(stage_of(name, folder, ranks), ranks).stage)


def validate_copies(name: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    return measure(stage_of(name, folder, ranks))


def step_by_muon(name: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """How far steps of a sharded operator end from those of a whole one with the same gradients.

    And how many matrices this rank makes orthogonal in a step of each.
    """
    config = OptimizerConfig(name="muon_hybrid", lr=0.01, weight_decay=0.1)
    ends, nums, steps = [], list[int](), 3
    plain = muon._zeropower_via_newtonschulz
    for is_sharded in (False, True):
        torch.manual_seed(0)
        size = OperatorSize(width=8, depths=(1, 1), mixers=("hybrid",), num_heads=2)
        axes = (TokenAxis(16, False),)
        model = LatentOperator(4, num_tasks=1, ranges=[(0.01, 0.1)], size=size, axes=axes)
        if is_sharded:
            shard_part(ShardedPart(model), init_device_mesh("cpu", (ranks.world_size,)))
        groups = parameter_groups(model, weight_decay=config.weight_decay)
        optimizer = make_optimizer(groups, config, hidden=muon_matrices(model))
        generator = torch.Generator().manual_seed(1)
        with patch.object(muon, "_zeropower_via_newtonschulz", side_effect=plain) as orthogonal:
            for _ in range(steps):
                for parameter in model.parameters():
                    parameter.grad = shared_out(torch.randn(parameter.shape, generator=generator), parameter)
                optimizer.step()
        nums.append(orthogonal.call_count // steps)
        tensors = StateTensors(model=model, optimizer=optimizer, averaged=None, stage={})
        ends.append(whole(tensors.now()))
    first, second = ends
    assert first.keys() == second.keys()
    difference = max((first[key] - second[key]).abs().max().item() for key in first)
    return {"difference": difference, "whole": nums[0], "sharded": nums[1]}


CASES: dict[str, Callable[[str, Path, Ranks], dict[str, Any]]] = {
    "parts": train_in_parts,
    "sharded": validate_sharded,
    "copies": validate_copies,
    "muon": step_by_muon,
}


def main(case: str, name: str, folder: Path) -> None:
    """Do it; what a rank has to say goes to `rank<number>.json`."""
    torch.set_num_threads(1)
    with joined_ranks("cpu", timeout_s=60) as (ranks, _):
        said = CASES[case](name, folder, ranks)
    (folder / f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(said))
