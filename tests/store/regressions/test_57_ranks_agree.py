"""Points 57, 28 and 58: ranks are read at the first batch and have one order; wrappers that ask ahead."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import rank_variables
from torch.utils.data import DataLoader

import ups_store
from ups_store.read.ranks import Ranks
from ups_store.torch import StoreDataset, make_batch_sampler, make_loader

N = 40

OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "a.zarr.zip"
    ups_store.save(path, a=np.arange(N, dtype="f4")[:, None] * np.ones(3, "f4"))
    return path


def of_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def items(batches: Any) -> list[int]:
    return [i for batch in batches for i in (batch if isinstance(batch, list) else batch["index"].tolist())]


@pytest.mark.parametrize("make", [make_loader, make_batch_sampler])
@pytest.mark.parametrize("is_early", [False, True])
def test_variables_of_torchrun_share_the_samples_also_of_what_was_made_before(
    path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, is_early: bool
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    seen = []
    for rank in range(2):
        made = make(StoreDataset(path), **OPTIONS) if is_early else None
        if made is not None:
            assert len(made) == N // 4
        of_rank(monkeypatch, rank, 2)
        made = make(StoreDataset(path), **OPTIONS) if made is None else made
        assert len(made) == N // 8
        seen += items(made)
        monkeypatch.delenv("RANK")
    assert sorted(seen) == list(range(N))


@pytest.mark.parametrize("make", [make_loader, make_batch_sampler])
def test_ranks_that_change_after_the_first_batch_are_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    made = make(StoreDataset(path), **OPTIONS)
    list(made)
    of_rank(monkeypatch, 1, 2)
    with pytest.raises(ups_store.ConfigError, match="rank 1 of 2") as caught:
        list(made)
    assert caught.value.kind == "world_size"
    assert made.state_dict()["epoch"] == 1  # what there was can be saved
    explicit = make(StoreDataset(path), rank=0, world_size=1, **OPTIONS)
    assert sorted(items(explicit)) == list(range(N))


def test_comparison_of_ranks_that_was_interrupted_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(ranks: Ranks, mine: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    of_rank(monkeypatch, 0, 2)
    made = ups_store.make_loader(path, **OPTIONS)
    monkeypatch.setattr(Ranks, "compare", interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(iter(made))


def test_state_of_other_ranks_is_not_carried_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make_loader(StoreDataset(path), **OPTIONS)
    loader.load_state_dict({**loader.state_dict(), "consumed": 8})
    of_rank(monkeypatch, 0, 2)
    with pytest.raises(ups_store.ConfigError) as caught:
        len(loader)
    assert caught.value.kind == "world_size"


def test_variable_that_is_no_number_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ups_store.ConfigError, match="RANK"):
        make_loader(StoreDataset(path), **OPTIONS)


@pytest.mark.multi_process
# torch's own: the workers of an iteration that is dropped at once may end in their own way
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sampler_of_which_only_workers_were_given_batches_stays_in_its_epoch(path: Path) -> None:
    dataset = StoreDataset(path)
    expected = make_batch_sampler(dataset, **OPTIONS)
    epochs = [list(expected) for _ in range(3)]
    sampler = make_batch_sampler(dataset, **OPTIONS)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
    iter(loader)  # as for its state; the worker is given two batches
    assert sampler.order.consumed > 0
    batches = iter(loader)
    assert next(batches)["index"].tolist() == epochs[0][0]
    del batches  # that one was abandoned
    assert [batch["index"].tolist() for batch in loader] == epochs[1]
    for batch in sampler:
        assert batch == epochs[2][0]
        break
    assert sampler.order.epoch == 2


def test_sampler_that_lightning_makes_anew_says_what_to_do(path: Path) -> None:
    sampler = make_batch_sampler(StoreDataset(path), **OPTIONS)
    inner = torch.utils.data.SequentialSampler(range(N))
    with pytest.raises(ups_store.ConfigError, match="use_distributed_sampler=False") as caught:
        type(sampler)(inner, batch_size=4, drop_last=False)  # type: ignore[arg-type]
    assert caught.value.kind == "sampler"


def on_two_ranks(script: str, path: Path, folder: Path) -> list[Any]:
    """What each of two ranks reports that run a script, with the variables of torchrun."""
    file = folder / "script.py"
    file.write_text(_BEGIN + script)
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    torchrun |= {"GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(file), str(path), str(folder)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **torchrun, **variables},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in rank_variables(2)
    ]
    try:
        said = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-2000:] for text in said)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


_BEGIN = """
import json, logging, os, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader
from ups_store import ConfigError
from ups_store.torch import StoreDataset, make_batch_sampler, make_loader
torch.set_num_threads(1)
data, rank = StoreDataset(sys.argv[1]), int(os.environ["RANK"])
options = {"batch_size": 4, "shuffle": True, "seed": 1}

def items(batches):
    return [i for batch in batches for i in batch["index"].tolist()]

def kind_of(function):
    try:
        return function()
    except ConfigError as error:
        return error.kind

def report(value):
    with open(f"{sys.argv[2]}/{rank}.json", "w") as file:
        json.dump(value, file)
"""

_TORCH = """
import torch.distributed as dist
early = make_loader(data, **options)
dist.init_process_group("gloo")
found = [items(early)]
dist.barrier()
if rank == 1:
    dist.barrier()
other = make_loader(data, batch_size=4, shuffle=True, seed=1234 + rank)
found.append(kind_of(lambda: items(other)))
alone = make_loader(data, rank=0, world_size=1, seed=rank, batch_size=4)
found.append(items(alone) if rank == 0 else [])
if rank == 0:
    dist.barrier()
report(found)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.multi_process
def test_ranks_of_a_group_share_samples_and_notice_seeds_of_their_own(path: Path, tmp_path: Path) -> None:
    (early, other, alone), (early_too, other_too, _) = on_two_ranks(_TORCH, path, tmp_path)
    assert sorted(early + early_too) == list(range(N))
    assert len(other) == N // 2  # the first rank doesn't wait for others
    assert other_too == "ranks_differ"
    assert sorted(alone) == list(range(N))


_ACCELERATE = """
from accelerate import Accelerator, DataLoaderConfiguration
from torchdata.stateful_dataloader import StatefulDataLoader
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
loader = accelerator.prepare(make_loader(data, **options))
found = [items(loader)]
shared = accelerator.prepare(DataLoader(data, batch_sampler=make_batch_sampler(data, **options)))
found.append(kind_of(lambda: items(shared)))

def plain():
    sampler = make_batch_sampler(data, rank=0, world_size=1, **options)
    return accelerator.prepare(DataLoader(data, batch_sampler=sampler, num_workers=1))

first, taken = plain(), []
for number, batch in enumerate(first):
    taken += batch["index"].tolist()
    if number == 1:
        state = first.state_dict()
        break
resumed = plain()
resumed.load_state_dict(state)
report([*found, taken + items(resumed), items(resumed)])
accelerator.wait_for_everyone()  # rank 0 has the store that the other compares its order in
accelerator.end_training()
"""


@pytest.mark.multi_process
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")
def test_accelerate_on_two_ranks_gives_each_sample_once_or_says_how(path: Path, tmp_path: Path) -> None:
    one, other = on_two_ranks(_ACCELERATE, path, tmp_path)
    assert sorted(one[0] + other[0]) == list(range(N))
    assert one[1] == other[1] == "world_size"
    for epoch in (2, 3):  # the first of which was resumed
        assert sorted(one[epoch] + other[epoch]) == list(range(N))


_LIGHTNING = """
import lightning.pytorch as pl
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(3, 1), []

    def training_step(self, batch, number):
        self.seen += batch["index"].tolist()
        return self.layer(batch["a"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

def fit(loader, **settings):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(off, False)
    model = Line()
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **quiet, **settings)
    trainer.fit(model, loader)
    return model.seen

def sampled():
    return DataLoader(data, batch_sampler=make_batch_sampler(data, **options))

found = [fit(make_loader(data, **options)), fit(sampled(), use_distributed_sampler=False)]
report([*found, kind_of(lambda: fit(sampled()))])
torch.distributed.destroy_process_group()
"""


@pytest.mark.multi_process
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_on_two_ranks_gives_each_sample_once_or_says_how(path: Path, tmp_path: Path) -> None:
    one, other = on_two_ranks(_LIGHTNING, path, tmp_path)
    for way in (0, 1):
        assert sorted(one[way] + other[way]) == list(range(N))
    assert one[2] == other[2] == "sampler"
