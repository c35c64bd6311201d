"""Ranks that build latents together before they join, and a build that is killed."""

from __future__ import annotations

import itertools
import json
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import cache_ranks
import pytest
from cache_ranks import digest
from cache_runs import NUM_TRAIN, build, make_folder, open_windows
from numbered_batches import batch_of
from rank_processes import rank_variables, start, wait

import ups_store
from ups_store.read.recovery import building_path

pytestmark = pytest.mark.multi_process

NEVER = -1
TWO_TASKS = "data.tasks=[burgers1d,advection1d]"
TASKS = ("burgers1d", "advection1d")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def begin_ranks(folder: Path, *nums: int, overrides: tuple[str, ...] = (TWO_TASKS,)) -> list[BaseProcess]:
    return [
        start(cache_ranks.main, folder, folder / f"rank{rank}.json", num, overrides, **variables)
        for rank, (num, variables) in enumerate(zip(nums, rank_variables(len(nums)), strict=True))
    ]


def drawn_together(folder: Path) -> list[list[str]]:
    """The batches whose rows the ranks have."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    assert all(rank != ranks[0] for rank in ranks[1:])
    return [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


def drawn_alone(folder: Path, *overrides: str) -> list[list[str]]:
    windows = open_windows(folder, *overrides)
    return [digest(batch_of(windows, number)) for number in range(windows.order.num_steps + 1)]


def expect_those_of_a_build(folder: Path) -> None:
    build(folder, f"training.latent_cache_dir={folder / 'built'}", TWO_TASKS)
    for task in TASKS:
        name = f"{task}_train.zarr.zip"
        assert (folder / "latents" / name).read_bytes() == (folder / "built" / name).read_bytes()


def test_ranks_fill_one_store_and_draw_the_batches_of_one_process(folder: Path) -> None:
    assert wait(begin_ranks(folder, NEVER, NEVER)) == [0, 0]
    expect_those_of_a_build(folder)
    assert drawn_together(folder) == drawn_alone(folder, TWO_TASKS)


def test_ranks_share_one_store_in_memory(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    overrides = (TWO_TASKS, "training.cache_mode=memory")
    assert wait(begin_ranks(folder, NEVER, NEVER, overrides=overrides)) == [0, 0]
    assert [path for path in sorted(folder.rglob("*")) if not path.name.startswith("rank")] == before
    assert drawn_together(folder) == drawn_alone(folder, TWO_TASKS)


def test_killed_rank_ends_the_others_and_the_next_run_goes_on(folder: Path) -> None:
    codes = wait(begin_ranks(folder, 4, 2))
    assert -signal.SIGKILL in codes
    assert 0 not in codes
    path = folder / "latents" / "burgers1d_train.zarr.zip"
    if not path.exists():
        with ups_store.open(building_path(path), partial=True) as store:
            assert store.committed.sum() <= NUM_TRAIN
    assert wait(begin_ranks(folder, NEVER, NEVER)) == [0, 0]
    assert drawn_together(folder) == drawn_alone(folder, TWO_TASKS)
    expect_those_of_a_build(folder)
