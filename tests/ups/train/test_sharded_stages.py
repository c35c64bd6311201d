"""Stages on two ranks against one process: validation, reports, sharded parameters, forms of a state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_runs import build, make_folder
from rank_processes import rank_variables, start, wait
from rank_sharding import BETWEEN, STEPS, Run, add_operator, main, stage_of, validate_copies

from ups.distributed.ranks import ALONE
from ups.distributed.sharding import load_shards
from ups.errors import ConfigError
from ups.stages import FNO_NEURALOPERATOR
from ups.train.baseline import BaselineStage
from ups.trained.checkpoint import load_checkpoint

torch.set_num_threads(1)
TASKS = "data.tasks=[burgers1d,advection1d]"
SLOW = pytest.mark.slow
LATENT = ("operator", "autoencoder", "joint")
GENERATIVE = ("corrector", "student")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("prepared"))
    build(folder, TASKS)
    build(folder, TASKS, "latent.encoder=none", f"cache.dir={folder / 'fields'}")
    add_operator(folder)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "run"))


def run_ranks(case: str, name: str, folder: Path, *, world_size: int = 2) -> list[dict[str, Any]]:
    """What each rank said."""
    processes = [start(main, case, name, folder, **variables) for variables in rank_variables(world_size)]
    assert wait(processes) == [0] * world_size
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def numbers_of(values: Any, name: str = "") -> dict[str, float]:
    """Numbers of a report by dotted name; paths of files aside, and times."""
    if isinstance(values, dict):
        parts = [numbers_of(value, f"{name}.{key}") for key, value in values.items()]
    elif isinstance(values, list | tuple):
        parts = [numbers_of(value, f"{name}.{key}") for key, value in enumerate(values)]
    else:
        return {} if isinstance(values, str) or name.endswith("ms_per_step") else {name: values}
    return {key: value for part in parts for key, value in part.items()}


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(path, kind="training")[0]


# --- validation ----------------------------------------------------------------------------------------


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("operator", "copies"),
        *(pytest.param(name, "copies", marks=SLOW) for name in ("autoencoder", "joint", *GENERATIVE)),
        *(pytest.param(name, "sharded", marks=SLOW) for name in (*LATENT, *GENERATIVE)),
    ],
)
def test_ranks_measure_together_what_one_process_measures(
    folder: Path, tmp_path: Path, name: str, case: str
) -> None:
    alone = Path(shutil.copytree(folder, tmp_path / "alone"))
    found = numbers_of(validate_copies(name, alone, ALONE))
    both = [numbers_of(said) for said in run_ranks(case, name, folder)]
    assert both[0] == both[1]
    assert both[0] == pytest.approx(found, rel=1e-4)
    assert len(found) > 3


def test_stage_that_can_not_be_sharded_says_so() -> None:
    stage = object.__new__(BaselineStage)  # without the package of its network
    stage.facts = FNO_NEURALOPERATOR
    with pytest.raises(ConfigError, match="stage fno_neuraloperator can't be sharded") as caught:
        stage.shard(None)  # type: ignore[arg-type]
    assert caught.value.kind == "not_shardable"


# --- state ---------------------------------------------------------------------------------------------


def continued_alone(name: str, folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    run = Run(stage_of(name, folder, ALONE), ALONE)
    run.fill(tensors)
    run.train(BETWEEN, STEPS)
    return run.tensors.now()


@pytest.mark.multi_process
@pytest.mark.parametrize(
    "name",
    [
        "waves",
        *(pytest.param(name, marks=SLOW) for name in (*LATENT, *GENERATIVE, "fno", "unet")),
    ],
)
def test_sharded_state_and_whole_state_continue_as_one_process_does(
    folder: Path, tmp_path: Path, name: str
) -> None:
    alone = Run(stage_of(name, Path(shutil.copytree(folder, tmp_path / "alone")), ALONE), ALONE)
    alone.train(0, STEPS)
    through = alone.tensors.now()
    said = run_ranks("parts", name, folder)
    (total,) = {one["total"] for one in said}
    assert sum(one["local"] for one in said) == total  # a rank has its own shards alone
    assert min(one["local"] for one in said) > 0.3 * total
    # Sums in another order; AdamW makes a step of 1e-3 of however small a gradient, so where gradients cancel
    # a weight may be off by some of that.
    close = {"rtol": 1e-4, "atol": 2e-5}
    for form in ("shards", "half"):
        torch.testing.assert_close(state_of(folder / f"from_{form}.safetensors"), through, **close)
    whole = load_shards(folder / "shards")
    torch.testing.assert_close(whole, state_of(folder / "half.safetensors"), rtol=0, atol=0)
    torch.testing.assert_close(continued_alone(name, folder, whole), through, **close)
