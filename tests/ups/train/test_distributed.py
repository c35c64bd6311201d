"""Data-parallel training: ranks of gloo against one process, stopping, and ranks that fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rank_training
import torch
from cache_runs import build, make_folder
from rank_processes import rank_variables, start, wait
from rank_training import TRAINERS, Waves, baseline_trainer, make_config

from ups.data.batches import TaskBatch
from ups.distributed.ranks import Ranks
from ups.errors import CheckpointError, ConfigError
from ups.train.distributed import joined_ranks
from ups.train.saved_state import check_batch
from ups.train.trainer import Trainer
from ups.trained.checkpoint import load_checkpoint
from ups_store.errors import ConfigError as StoreConfigError
from ups_store.torch import DataOrder

REPO = Path(__file__).resolve().parents[3]
SCRIPT = Path(rank_training.__file__)
CPU = torch.device("cpu")


def run_ranks(
    case: str, folder: Path, *overrides: str, world_size: int = 2, timeout_s: float = 100
) -> list[dict[str, Any]]:
    """What each rank said; nothing of one that died."""
    folder.mkdir(exist_ok=True)
    said = [folder / f"rank{rank}.json" for rank in range(world_size)]
    for path in said:
        path.unlink(missing_ok=True)
    ranks = rank_variables(world_size)
    processes = [start(rank_training.main, case, folder, *overrides, **variables) for variables in ranks]
    codes = wait(processes, timeout_s=timeout_s)
    assert None not in codes
    return [json.loads(path.read_text()) if path.exists() else {} for path in said]


def run_torchrun(case: str, folder: Path) -> list[dict[str, Any]]:
    """The same with two ranks that torchrun starts."""
    folder.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(SCRIPT), case, str(folder)]
    path = os.pathsep.join([str(REPO), str(SCRIPT.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def run_alone(folder: Path) -> Trainer:
    stage = Waves()
    trainer = Trainer(stage, make_config(folder, "training.device=cpu"), device=CPU)
    trainer.fit()
    return trainer


def state_of(folder: Path, stage: str = "autoencoder") -> dict[str, torch.Tensor]:
    tensors, _ = load_checkpoint(folder / f"{stage}.training.safetensors", kind="training")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rng.")}


def steps_of(folder: Path, stage: str = "autoencoder") -> list[dict[str, float]]:
    lines = map(json.loads, (folder / f"{stage}.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if name == "step" or name.startswith("loss/")}
        for line in lines
        if line["event"] == "step"
    ]


@pytest.mark.multi_process
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_equal_one_process_at_the_same_batch(tmp_path: Path, world_size: int) -> None:
    alone = run_alone(tmp_path / "alone")
    said = run_ranks("through", tmp_path / "ranks", world_size=world_size)
    assert [one["step"] for one in said] == [alone.step] * world_size
    # Sums of rows in another order: a few roundings of float32 a step.
    torch.testing.assert_close(
        state_of(tmp_path / "ranks"), state_of(tmp_path / "alone"), rtol=1e-4, atol=1e-6
    )
    assert {one["validations"] for one in said} == {3}  # the first rank's, told to all
    for mine, theirs in zip(steps_of(tmp_path / "alone"), steps_of(tmp_path / "ranks"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.multi_process
@pytest.mark.parametrize(("case", "gradients"), [("operator", "some"), ("one_task", "the same")])
def test_ranks_train_the_operator_as_one_process_does(tmp_path: Path, case: str, gradients: str) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    make_folder(alone)
    build(alone, "data.tasks=[burgers1d,advection1d]")
    shutil.copytree(alone, tmp_path / "ranks")
    trainer = TRAINERS[case](alone)
    untrained = {f"model.{name}": tensor.clone() for name, tensor in trainer.stage.model.state_dict().items()}
    trainer.fit()
    said = run_ranks(case, tmp_path / "ranks")
    assert [(one["step"], one["gradients"]) for one in said] == [(6, gradients)] * 2
    mine, theirs = (state_of(tmp_path / name / "checkpoints", "operator") for name in ("alone", "ranks"))
    largest = max(float((mine[name] - tensor).abs().max()) for name, tensor in untrained.items())
    # Two ranks add 3 rows each where one adds 6: the same sums in another order. Gradients differ by a few
    # last bits, each 6e-8 of numbers around 1, and SGD's momentum adds up to ten of them.
    assert largest > 1e-3
    torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-6)
    folders = (tmp_path / name / "checkpoints" for name in ("alone", "ranks"))
    for one, two in zip(*(steps_of(folder, "operator") for folder in folders), strict=True):
        assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.multi_process
def test_ranks_train_a_baseline_as_one_process_does(tmp_path: Path) -> None:
    for name in ("alone", "ranks"):
        (tmp_path / name).mkdir()
        make_folder(tmp_path / name)
    trainer = baseline_trainer(tmp_path / "alone")
    untrained = {f"model.{name}": tensor.clone() for name, tensor in trainer.stage.model.state_dict().items()}
    trainer.fit()
    said = run_ranks("fno", tmp_path / "ranks")
    assert [(one["step"], one["gradients"]) for one in said] == [(6, "all")] * 2
    mine, theirs = (state_of(tmp_path / name / "checkpoints", "fno") for name in ("alone", "ranks"))
    largest = max(float((mine[name] - tensor).abs().max()) for name, tensor in untrained.items())
    assert largest > 1e-3
    torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-6)  # as of the operator above
    assert said[0]["effort"]["flops"] == trainer.work.read()["training/flops"] > 0


@pytest.mark.multi_process
def test_signal_to_one_rank_stops_all_and_they_continue_as_those_of_torchrun(tmp_path: Path) -> None:
    said = run_ranks("signal", tmp_path / "parts")
    assert [one["kind"] for one in said] == ["interrupted"] * 2
    assert len({one["message"] for one in said}) == 1
    assert "stopped by SIGTERM after step 3 of 6" in said[0]["message"]
    again = run_ranks("through", tmp_path / "parts")
    through = run_torchrun("through", tmp_path / "through")
    assert [one.get("step", one) for one in (*again, *through)] == [6] * 4
    torch.testing.assert_close(state_of(tmp_path / "parts"), state_of(tmp_path / "through"), rtol=0, atol=0)
    assert [one["rng"] for one in again] == [one["rng"] for one in through]
    assert through[0]["rng"] != through[1]["rng"]


@pytest.mark.multi_process
@pytest.mark.parametrize("case", ["fail", "die"])
def test_rank_that_fails_does_not_hang_the_others(tmp_path: Path, case: str) -> None:
    first, second = run_ranks(case, tmp_path)
    assert first["kind"] == "rank_lost"
    assert "rank 0 lost another rank" in first["message"]
    assert first["seconds"] < 50  # its patience is 60 s
    assert second.get("message") == ("no data on this rank" if case == "fail" else None)


# --- parts ---------------------------------------------------------------------------------------------


def parts_of(num_rows: int, world_size: int) -> list[Row]:
    """The last batch of each rank, of an epoch that ends with so many rows."""
    parts = []
    for rank in range(world_size):
        order = DataOrder(
            [8 + num_rows], global_batch_size=8, pad_last=world_size > 1, rank=rank, world_size=world_size
        )
        *_, step = order.steps()
        parts.append(Row("sine", torch.from_numpy(step.items)).of_step(step, seed=3))
    return parts


@dataclass(frozen=True)
class Row(TaskBatch):
    """Items of an order."""

    items: torch.Tensor


@pytest.mark.parametrize(("num_rows", "world_size"), [(8, 1), (8, 2), (5, 2), (7, 4), (2, 4), (1, 4)])
def test_rows_of_all_ranks_are_the_batch_and_shares_add_up(num_rows: int, world_size: int) -> None:
    parts = parts_of(num_rows, world_size)
    taken = [item for part in parts if part.share for item in part.items.tolist()]
    assert taken == list(range(8, 8 + num_rows))
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    assert all(len(part.items) == 1 for part in parts if not part.share)  # takes part without weight


def test_random_numbers_of_the_rows_are_those_of_the_batch() -> None:
    (alone,), ranks = parts_of(6, 1), parts_of(6, 4)
    shared = torch.cat([part.draws.normal(torch.Size([2])) for part in ranks if part.share])
    assert torch.equal(shared, alone.draws.normal(torch.Size([2])))
    assert {part.num_rows for part in ranks if part.share} == {6}


def test_state_of_another_batch_over_all_ranks_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "state"
    check_batch(path, {"global_batch_size": 16}, rows=16, num_ranks=1)
    with pytest.raises(CheckpointError, match="had 16 rows and has 8 on 2 ranks") as caught:
        check_batch(path, {"global_batch_size": 16}, rows=8, num_ranks=2)
    assert caught.value.kind == "other_config"
    assert "training.global_batch_size=16" in str(caught.value.hint)


@dataclass
class Shared:
    """Ranks of which this one sees another training state than the others."""

    world_size: int = 2
    rank: int = 1
    is_first: bool = False

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, values + 4])


def test_folder_that_ranks_do_not_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.train.trainer.ParallelLosses", lambda *args, **kwargs: None)
    with pytest.raises(CheckpointError, match="not all ranks see it") as caught:
        Trainer(Waves(), make_config(tmp_path), device=CPU, ranks=Shared())  # type: ignore[arg-type]
    assert caught.value.kind == "not_shared"


@pytest.mark.parametrize("variables", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_ranks_that_contradict_each_other_are_refused(variables: dict[str, str]) -> None:
    with (
        pytest.raises(ConfigError, match=f"RANK={variables['RANK']}"),
        joined_ranks("cpu", timeout_s=1, variables=variables),
    ):
        pass


def test_processes_of_a_scheduler_that_would_all_train_the_same_are_refused() -> None:
    variables = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    with (
        pytest.raises(StoreConfigError, match=r"process 1 of 2 that Slurm started.*torchrun") as caught,
        joined_ranks("cpu", timeout_s=1, variables=variables),
    ):
        pass
    assert caught.value.kind == "one_of_several"


def test_process_without_torchrun_is_alone() -> None:
    with joined_ranks("cpu", timeout_s=1, variables={"WORLD_SIZE": "4"}) as (ranks, device):
        assert (ranks, device) == (Ranks(), CPU)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert Ranks(0, 2, 0).device("auto") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="--nproc-per-node 1, found local rank 1") as caught:
        Ranks(1, 2, 1).device("cuda")
    assert caught.value.kind == "too_many_ranks"
