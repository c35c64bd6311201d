"""Which modules are sharded by themselves, and shards in files, of one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ups.distributed.ranks import Ranks
from ups.distributed.sharding import blocks_of, load_shards, own_shards, whole
from ups.trained.checkpoint import save_checkpoint

torch.set_num_threads(1)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_blocks_are_the_members_of_the_outermost_lists_that_have_several_layers() -> None:
    inner = nn.ModuleDict({"inside": nn.ModuleList([two_layers()]), "out": nn.Linear(2, 2)})
    outer = nn.Module()
    outer.inner = inner
    model = nn.Module()
    model.levels = nn.ModuleList([nn.ModuleList([first := two_layers(), second := two_layers()])])
    model.single = nn.ModuleList([nn.Linear(2, 2), nn.GELU()])
    model.last = nn.ModuleList([outer])
    model.into = nn.Linear(2, 2)
    assert blocks_of(model) == [first, second, outer]


def test_plain_tensors_are_each_written_by_one_rank_and_come_back(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(3, 2),
        "a.turned": torch.randn(3, 2).T,
        "step": torch.tensor(4.0),
        "n": torch.tensor([2, 3]),
    }
    for rank in range(3):
        own = own_shards(tensors, Ranks(rank, 3))
        values, offsets = ({n: getattr(s, k) for n, s in own.items()} for k in ("values", "offsets"))
        save_checkpoint(
            tmp_path / "shards" / f"{rank}.safetensors", values, kind="test", document={}, offsets=offsets
        )
        assert len(own) == (2 if rank == 0 else 1)
    torch.testing.assert_close(load_shards(tmp_path / "shards"), tensors, rtol=0, atol=0)


def test_plain_tensors_are_whole_where_they_are_wanted() -> None:
    tensors = {"weight": nn.Parameter(torch.ones(2))}
    assert whole(tensors, is_kept=False) == {}
    assert whole(tensors)["weight"].data_ptr() == tensors["weight"].data_ptr()
