"""On-demand mode in processes of its own: several ranks, and a process that is killed in the first pass."""

from __future__ import annotations

import itertools
import json
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import on_demand_process
import pytest
from numbered_batches import batch_of
from on_demand_helpers import NUM_TRAIN, build, make_folder, open_windows
from on_demand_process import digest
from rank_processes import rank_variables, start, wait

import ups_store
from ups_store.read.recovery import building_path

pytestmark = pytest.mark.multi_process

NEVER = -1
TWO_TASKS = "data.tasks=[burgers1d,advection1d]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def begin(folder: Path, said: str, num: int, *overrides: str, **variables: str) -> BaseProcess:
    return start(on_demand_process.main, folder, folder / said, num, overrides, **variables)


def begin_ranks(folder: Path, num: int, *overrides: str) -> list[BaseProcess]:
    return [
        begin(folder, f"rank{rank}.json", num, *overrides, **variables)
        for rank, variables in enumerate(rank_variables(2))
    ]


def what_was_said(folder: Path, *processes: BaseProcess, said: str) -> list[dict[str, Any]]:
    assert wait(processes) == [0] * len(processes)
    return [json.loads(path.read_text()) for path in sorted(folder.glob(said))]


def digests_of(folder: Path, *overrides: str, notes: list[str] | None = None) -> list[list[str]]:
    """What a process that nothing happens to draws: this one, which has torch already."""
    windows = open_windows(folder, *overrides, notes=notes)
    return [digest(batch_of(windows, number)) for number in range(windows.order.num_steps + 1)]


def together(ranks: list[dict[str, Any]]) -> list[list[str]]:
    """The batches whose rows the ranks have."""
    assert all(rank["digests"] != ranks[0]["digests"] for rank in ranks[1:])
    return [list(itertools.chain(*parts)) for parts in zip(*(rank["digests"] for rank in ranks), strict=True)]


def store_bytes(folder: Path, task: str = "burgers1d") -> bytes:
    return (folder / "latents" / f"{task}_train.zarr.zip").read_bytes()


def bytes_of_a_build(folder: Path, *tasks: str) -> list[bytes]:
    build(folder, f"training.latent_cache_dir={folder / 'built'}", f"data.tasks=[{','.join(tasks)}]")
    return [(folder / "built" / f"{task}_train.zarr.zip").read_bytes() for task in tasks]


def test_ranks_fill_one_store_and_draw_the_batches_of_one_process(folder: Path) -> None:
    ranks = what_was_said(folder, *begin_ranks(folder, NEVER, TWO_TASKS), said="rank*.json")
    tasks = ["burgers1d", "advection1d"]
    assert [store_bytes(folder, task) for task in tasks] == bytes_of_a_build(folder, *tasks)
    notes: list[str] = []
    assert digests_of(folder, TWO_TASKS, notes=notes) == together(ranks)
    assert sum("latents reused" in note for note in notes) == 2


def test_ranks_share_one_store_in_memory(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    ranks = what_was_said(
        folder, *begin_ranks(folder, NEVER, TWO_TASKS, "training.cache_mode=memory"), said="rank*.json"
    )
    left = [path for path in sorted(folder.rglob("*")) if path.name not in ("rank0.json", "rank1.json")]
    assert left == before
    assert together(ranks) == digests_of(folder, TWO_TASKS)


def test_two_runs_of_one_configuration_fill_one_store(folder: Path) -> None:
    """They don't know of each other; the second finds that the first builds, and helps."""
    runs = [begin(folder, f"run{number}.json", NEVER) for number in range(2)]
    one, other = what_was_said(folder, *runs, said="run*.json")
    assert one["digests"] == other["digests"]
    assert [store_bytes(folder)] == bytes_of_a_build(folder, "burgers1d")


def test_killed_run_goes_on_where_it_was(folder: Path) -> None:
    assert wait([begin(folder, "killed.json", 2)]) == [-signal.SIGKILL]
    assert not (folder / "killed.json").exists()
    path = folder / "latents" / "burgers1d_train.zarr.zip"
    if not path.exists():  # the build may have been done
        with ups_store.open(building_path(path), partial=True) as store:
            assert 0 < store.committed.sum() <= NUM_TRAIN
    continued = digests_of(folder)
    assert [store_bytes(folder)] == bytes_of_a_build(folder, "burgers1d")
    (folder / "latents").rename(folder / "first")
    assert continued == digests_of(folder)


def test_killed_ranks_leave_what_the_next_run_takes_up(folder: Path) -> None:
    assert -signal.SIGKILL in wait(begin_ranks(folder, 1))
    ranks = what_was_said(folder, *begin_ranks(folder, NEVER), said="rank*.json")
    assert together(ranks) == digests_of(folder)
    assert [store_bytes(folder)] == bytes_of_a_build(folder, "burgers1d")
