"""What each rank runs in the tests of data-parallel training: a regression of two parts, or an operator."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cache_runs
import torch
from numbered_batches import numbered_loader
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from ups.config import RunConfig, load_config
from ups.data.augment import Draws
from ups.data.batches import TaskBatch
from ups.distributed.ranks import ALONE, Ranks
from ups.errors import UpsError
from ups.train.distributed import joined_ranks
from ups.train.operator import make_operator_stage
from ups.train.stage import Losses, Stage, make_stage
from ups.train.trainer import Trainer
from ups_store.torch import ranks_of_torch

CPU = torch.device("cpu")
OPERATOR = [
    "data.tasks=[burgers1d,advection1d]",
    "operator.width=16",
    "operator.depths=[1,1]",
    "operator.noise=0.05",
    "operator.val_trajectories=1",
    "training.cache_mode=store",
    "training.global_batch_size=6",
    "training.horizon=2",
    "training.accum_steps=2",
    "training.lambda_relative=1",
    "training.lr=0.05",
    "training.log_every=1",
    "stages.operator.epochs=1",
    "stages.operator.steps_per_epoch=6",
    "stages.operator.optimizer.name=sgd",
]


@dataclass(frozen=True)
class Points(TaskBatch):
    """A batch of one of two tasks."""

    x: Tensor


class TwoParts(nn.Module):
    """One network a task and a trunk for both; the batch decides which parameters have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.ModuleDict({task: nn.Linear(1, 8) for task in ("sine", "cosine")})
        self.trunk = nn.Sequential(nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, *, task: str) -> Tensor:
        return self.trunk(self.part[task](x))


class Waves(Stage):
    """A stage of two tasks, with batches of 5 rows: no number of ranks divides them."""

    name = "autoencoder"

    def __init__(self, on_batch: Callable[[int], None] | None = None) -> None:
        torch.manual_seed(0)
        self.model = TwoParts()
        self.on_batch = on_batch
        self.num_validations = 0
        self.loader = numbered_loader(self.batch, 6)

    def batch(self, number: int) -> Points:
        if self.on_batch is not None:
            self.on_batch(number)
        rank, world_size = ranks_of_torch()
        first, end = (5 * each // world_size for each in (rank, rank + 1))
        draws = Draws(torch.Generator().manual_seed(number), 5, first, end - first)
        task = ("sine", "cosine")[number % 3 == 2]
        return Points(task, draws.uniform()[:, None], draws=draws, share=(end - first) / 5)

    def losses(self, forward: Callable[..., Tensor], batch: Points) -> Losses:
        shift = torch.rand(1, generator=batch.draws.generator)
        truth = (batch.x + shift).sin() if batch.task == "sine" else (batch.x + shift).cos()
        once = forward(batch.x, task=batch.task)
        twice = forward(once, task=batch.task)
        return {"once": (once - truth).square().mean(), "twice": (twice - truth).square().mean()}

    def validate(self) -> dict[str, float]:
        self.num_validations += 1
        x = torch.linspace(0, 1, 9)[:, None]
        with torch.no_grad():
            return {"score": (self.model(x, task="sine") - x.sin()).square().mean().item()}

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        return Path("exported")

    def finish(self) -> dict[str, Any]:
        return {"validations": self.num_validations}


def make_config(folder: Path, *overrides: str) -> RunConfig:
    common = ["data.tasks=burgers1d", f"checkpoint.dir={folder}", "stages.autoencoder.epochs=2"]
    settings = [
        "training.lr=0.02",
        "training.accum_steps=2",
        "training.ema_decay=0.9",
        "training.log_every=2",
        "training.prefetch_factor=0",  # what happens to a rank happens at its step, not ahead of it
        "training.rank_timeout_s=60",
    ]
    return load_config(overrides=[*common, *settings, *overrides])


def _newton_schulz_in_float32() -> AbstractContextManager[Any]:
    """Inside, Muon rounds nothing: in bfloat16 sums in another order already give other matrices."""
    plain = torch.optim._muon._zeropower_via_newtonschulz

    def exact(*args: Any) -> Tensor:
        with patch.object(Tensor, "bfloat16", Tensor.float):
            return plain(*args)

    return patch("torch.optim._muon._zeropower_via_newtonschulz", exact)


def _compiled_by_aot_eager() -> AbstractContextManager[Any]:
    """Inside, the compiler goes without code of its own, which would take minutes to make."""
    plain = torch.compile
    return patch("torch.compile", lambda function, **options: plain(function, backend="aot_eager"))


PATCHES = {"+float32_muon": _newton_schulz_in_float32, "+aot_eager": _compiled_by_aot_eager}


@contextmanager
def patched(settings: Sequence[str]) -> Iterator[list[str]]:
    """Overrides of a configuration without those that are patches, which hold inside."""
    with ExitStack() as stack:
        for name in PATCHES.keys() & set(settings):
            stack.enter_context(PATCHES[name]())
        yield [setting for setting in settings if setting not in PATCHES]


ONE_TASK = ["data.tasks=[burgers1d]", "training.accum_steps=1"]  # of 4 tokens, too few to be halved


def operator_trainer(folder: Path, ranks: Ranks = ALONE, *, overrides: Sequence[str] = ()) -> Trainer:
    """Stage operator on the finished latents of `cache_runs`: two tasks, batches of 6 windows."""
    config = cache_runs.configure(folder, *OPERATOR, *overrides)
    return Trainer(make_operator_stage(config, device=CPU), config, device=CPU, ranks=ranks)


def baseline_trainer(folder: Path, ranks: Ranks = ALONE) -> Trainer:
    """Stage fno on the sources of `cache_runs`: batches of 6 windows, with all that is random."""
    overrides = ["data.tasks=[burgers1d]", "baselines.fno.width=8", "baselines.fno.modes=4"]
    overrides += ["baselines.noise=0.05", "baselines.curriculum=0.5", "stages.fno.steps=6"]
    overrides += ["stages.fno.epochs=1", "stages.fno.optimizer.name=sgd", "stages.fno.optimizer.lr=0.05"]
    config = cache_runs.configure(folder, *OPERATOR, *overrides)
    return Trainer(make_stage("fno", config, device=CPU), config, device=CPU, ranks=ranks)


TRAINERS: dict[str, Callable[..., Trainer]] = {
    "operator": operator_trainer,
    "one_task": partial(operator_trainer, overrides=ONE_TASK),
    "fno": baseline_trainer,
}


def train(case: str, folder: Path, ranks: Ranks, device: torch.device, *given: str) -> dict[str, Any]:
    if case in TRAINERS:
        trainer = TRAINERS[case](folder, ranks, overrides=given) if given else TRAINERS[case](folder, ranks)
        return trainer.fit() | {"step": trainer.step, "gradients": trainer.stage.gradients}
    if case in ("all the same", "some"):
        return _count_exchanges(case, folder, ranks, *given)
    stage = Waves(on_batch=lambda number: _happen(case, number, ranks.rank))
    overrides = ["training.device=cpu", *given]
    trainer = Trainer(stage, make_config(folder, *overrides), device=device, ranks=ranks)
    return trainer.fit() | {"step": trainer.step}


def _count_exchanges(case: str, folder: Path, ranks: Ranks, *given: str) -> dict[str, Any]:
    """How often gradients are exchanged in an optimiser step of four batches."""
    stage = Waves()
    if case == "all the same":
        stage.gradients = "the same"
        stage.loader = numbered_loader(lambda number: stage.batch(0), 6)
    config = make_config(folder, "training.device=cpu", "training.accum_steps=4", *given)
    trainer = Trainer(stage, config, device=CPU, ranks=ranks)
    trainer.train_step()
    with patch.object(_fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce) as sent:
        trainer.train_step()
    return {"exchanges": sent.call_count}


def _happen(case: str, number: int, rank: int) -> None:
    if case == "signal" and number == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if case == "fail" and number == 3 and rank == 1:
        raise UpsError("no data on this rank")
    if case == "die" and number == 3 and rank == 1:
        os._exit(9)
    if case == f"kill at {number}" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def main(case: str, folder: Path, *overrides: str) -> int:
    """Train; what a rank has to say goes to `rank<number>.json`, and its kind of error to the exit code."""
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        with (
            patched(overrides) as given,
            joined_ranks("cpu", timeout_s=60) as (ranks, device),
        ):
            said = train(case, folder, ranks, device, *given)
    except UpsError as error:
        said = {"kind": error.kind, "message": str(error)}
    said |= {"seconds": time.monotonic() - began, "rng": int(torch.get_rng_state().sum())}
    (folder / f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(said))
    return 1 if "kind" in said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
