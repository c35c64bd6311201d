"""Which modules are sharded by themselves, and shards in files, of one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ups.distributed.sharding import blocks_of, load_shards, save_shards, whole

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


def test_tensors_of_one_process_come_back_from_their_files(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(3, 2),
        "a.turned": torch.randn(3, 2).T,
        "step": torch.tensor(4.0),
        "n": torch.tensor([2, 3]),
    }
    save_shards(tmp_path / "shards", tensors)
    torch.testing.assert_close(load_shards(tmp_path / "shards"), tensors, rtol=0, atol=0)


def test_plain_tensors_are_whole_where_they_are_wanted() -> None:
    tensors = {"weight": nn.Parameter(torch.ones(2))}
    assert whole(tensors, is_kept=False) == {}
    assert whole(tensors)["weight"].data_ptr() == tensors["weight"].data_ptr()
