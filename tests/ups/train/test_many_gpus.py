"""Shared-out parameters (FSDP2, HSDP) against one process: steps, states, ranks that die. Ranks of gloo."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_runs import build, make_folder
from operator_runs import own_copy, prepare_fields, shared_run
from rank_training import CPU, Waves, make_config, operator_trainer, patched
from test_distributed import run_ranks, steps_of
from torch import Tensor

from ups.config import RunConfig, load_config
from ups.distributed.layout import make_mesh
from ups.distributed.ranks import Ranks
from ups.errors import ConfigError, InterruptedTrainingError
from ups.train.distributed import NCCL_VARIABLES, check_num_ranks, set_nccl_variables, without_graphs
from ups.train.run import run_stage
from ups.train.state import read_tensors
from ups.train.switches import check_switches
from ups.train.trainer import Trainer
from ups.trained.checkpoint import load_checkpoint

SLOW = pytest.mark.slow
# How ranks train, and how many of them.
ALONE = ((), 1)
DDP = (("training.parallel=ddp",), 2)
FSDP2 = (("training.parallel=fsdp2",), 2)
HSDP = (("training.parallel=hsdp", "training.shard_size=2"), 4)
LATER = "training.async_checkpoint=true"
Ways = tuple[tuple[str, ...], int]


def tensors_in(folder: Path, stage: str = "autoencoder") -> dict[str, Tensor]:
    """Of a state of any form, whole."""
    found, _ = read_tensors(folder / f"{stage}.training.safetensors", form_of=lambda name: None)
    return {name: tensor for name, tensor in found.items() if not name.startswith("rng.")}


def operator_in(run: Path) -> dict[str, Tensor]:
    """Its training state but for the optimiser's, and the file that others use."""
    state = tensors_in(run / "checkpoints", "operator")
    exported, _ = load_checkpoint(run / "checkpoints" / "operator.safetensors", kind="operator")
    kept = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer.")}
    return {**kept, **{f"exported.{name}": tensor for name, tensor in exported.items()}}


def flops_in(folder: Path) -> float:
    """Operations that the log counts for all steps."""
    lines = map(json.loads, (folder / "autoencoder.jsonl").read_text().splitlines())
    return [line["training/flops"] for line in lines if line["event"] == "epoch"][-1]


def train_waves(folder: Path, ways: Ways, *overrides: str, case: str = "through") -> list[dict[str, Any]]:
    """What each rank says."""
    settings, world_size = ways
    if world_size > 1:
        return run_ranks(case, folder, *settings, *overrides, world_size=world_size)
    trainer = Trainer(Waves(), make_config(folder, "training.device=cpu", *overrides), device=CPU)
    return [trainer.fit() | {"step": trainer.step}]


# --- steps ---------------------------------------------------------------------------------------------


@pytest.mark.multi_process
@pytest.mark.parametrize("ways", [FSDP2, pytest.param(HSDP, marks=SLOW)], ids=["fsdp2", "hsdp"])
def test_sharded_ranks_equal_one_process(tmp_path: Path, ways: Ways) -> None:
    # Two tasks with parameters of their own, accumulation, clipping, averages.
    clip = "training.grad_clip=0.1"
    train_waves(tmp_path / "alone", ALONE, clip)
    said = train_waves(tmp_path / "ranks", ways, clip)
    assert [one["step"] for one in said] == [6] * ways[1]
    alone = tensors_in(tmp_path / "alone")
    # Sums of rows in another order: a few roundings of float32 a step.
    torch.testing.assert_close(tensors_in(tmp_path / "ranks"), alone, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(steps_of(tmp_path / "alone"), steps_of(tmp_path / "ranks"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert flops_in(tmp_path / "ranks") == flops_in(tmp_path / "alone") > 0


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.parametrize(("case", "exchanges"), [("all the same", 2), ("some", 4)])
def test_gradients_are_exchanged_at_the_end_of_a_step_unless_batches_differ(
    tmp_path: Path, case: str, exchanges: int
) -> None:
    # Of four batches: those of the first three, and those of the last, which calls the model twice.
    said = train_waves(tmp_path, FSDP2, case=case)
    assert [one["exchanges"] for one in said] == [exchanges] * 2


# Weights of an operator may be off by so much after six steps; they move by 0.01.
EXACT = 1e-6  # sums in another order, as of DDP
OPTIONS: dict[str, tuple[list[str], float]] = {
    "two tasks": (["data.tasks=[burgers1d,advection1d]"], EXACT),
    "checkpointing": (["training.activation_checkpointing=full"], EXACT),
    "selective": (["training.activation_checkpointing=selective"], EXACT),
    "compiled": (["training.compile=true", "+aot_eager", "training.activation_checkpointing=full"], EXACT),
    # Newton-Schulz iterations make more of differences of rounding.
    "muon": (["stages.operator.optimizer.name=muon_hybrid", "training.lr=0.01", "+float32_muon"], 5e-6),
    # 2e-2 of the way. With float16 ranks leave out another step than one process: their losses weigh more.
    "bfloat16": (["training.amp=true"], 2e-4),
}
OF_OPERATOR = [
    *("data.tasks=[burgers1d]", "training.accum_steps=2", "training.ema_decay=0.9", "training.grad_clip=0.1"),
    "training.global_batch_size=8",  # a multiple of 4 ranks
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("prepared"))
    build(folder, "data.tasks=[burgers1d,advection1d]")
    return folder


@pytest.fixture(scope="module")
def trained_alone(
    prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Tensor]]:
    """What one process makes of an operator with some option."""
    found: dict[str, dict[str, Tensor]] = {}

    def train(option: str) -> dict[str, Tensor]:
        if option not in found:
            folder = Path(shutil.copytree(prepared, tmp_path_factory.mktemp("alone") / "run"))
            with patched([*OF_OPERATOR, *OPTIONS[option][0]]) as given:
                operator_trainer(folder, overrides=given).fit()
            found[option] = operator_in(folder)
        return found[option]

    return train


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("ways", [DDP, FSDP2, HSDP], ids=["ddp", "fsdp2", "hsdp"])
def test_ranks_train_an_operator_as_one_process_does(
    prepared: Path,
    trained_alone: Callable[[str], dict[str, Tensor]],
    tmp_path: Path,
    ways: Ways,
    option: str,
) -> None:
    folder = Path(shutil.copytree(prepared, tmp_path / "run"))
    settings, tolerance = OPTIONS[option]
    (parallel, world_size), given = ways, [*OF_OPERATOR, *settings]
    said = run_ranks("operator", folder, *given, *parallel, world_size=world_size, timeout_s=500)
    assert [one["step"] for one in said] == [6] * world_size
    found, alone = operator_in(folder), trained_alone(option)
    assert found.keys() == alone.keys()
    for name in alone:
        torch.testing.assert_close(found[name], alone[name], rtol=0, atol=tolerance, msg=name)


# --- states --------------------------------------------------------------------------------------------


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(FSDP2, ALONE, id="fsdp2-alone"),
        pytest.param(ALONE, HSDP, id="alone-hsdp", marks=SLOW),
        pytest.param(HSDP, DDP, id="hsdp-ddp", marks=SLOW),
        pytest.param(DDP, (FSDP2[0], 3), id="ddp-three of fsdp2", marks=SLOW),
        pytest.param((FSDP2[0], 3), HSDP, id="three of fsdp2-hsdp", marks=SLOW),
    ],
)
def test_state_of_one_way_continues_in_another(tmp_path: Path, before: Ways, after: Ways) -> None:
    train_waves(tmp_path / "through", ALONE)
    parts = tmp_path / "parts"
    if before == ALONE:
        stopped = Trainer(
            Waves(on_batch=_stop_at_third), make_config(parts, "training.device=cpu"), device=CPU
        )
        with pytest.raises(InterruptedTrainingError):
            stopped.fit()
    else:
        said = train_waves(parts, before, LATER, case="signal")
        assert {one["kind"] for one in said} == {"interrupted"}
    said = train_waves(parts, after, LATER)
    assert [one["step"] for one in said] == [6] * after[1]
    through = tensors_in(tmp_path / "through")
    torch.testing.assert_close(tensors_in(parts), through, rtol=1e-4, atol=1e-6)


def _stop_at_third(number: int) -> None:
    if number == 3:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ways", [FSDP2, HSDP], ids=["fsdp2", "hsdp"])
def test_ranks_that_are_killed_at_random_steps_continue(tmp_path: Path, ways: Ways) -> None:
    often = ("checkpoint.interval=1", LATER)
    train_waves(tmp_path / "through", ways)
    for number in sorted(random.Random(ways[1]).sample(range(2, 12), 3)):
        said = train_waves(tmp_path / "parts", ways, *often, case=f"kill at {number}")
        assert {one.get("kind") for one in said} <= {None, "rank_lost"}
        assert all(one["seconds"] < 50 for one in said if one)  # their patience is 60 s
    said = train_waves(tmp_path / "parts", ways, *often)
    assert [one["step"] for one in said] == [6] * ways[1]
    torch.testing.assert_close(
        tensors_in(tmp_path / "parts"), tensors_in(tmp_path / "through"), rtol=0, atol=0
    )
    assert len(list((tmp_path / "parts").glob("*shards-*"))) == 1


# --- settings ------------------------------------------------------------------------------------------


def of_training(*settings: str) -> RunConfig:
    return load_config(overrides=["data.tasks=burgers1d", *(f"training.{setting}" for setting in settings)])


def test_number_of_ranks_is_that_of_the_configuration(notes: list[str]) -> None:
    training = of_training("num_gpus=4", "parallel=fsdp2").training
    for ranks in (Ranks(world_size=4), Ranks(world_size=8, local_world_size=4)):
        check_num_ranks(training, ranks)
    assert notes == []
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 4 -m ups train") as caught:
        check_num_ranks(training, Ranks())
    assert caught.value.kind == "num_gpus"
    assert notes == ["warning: training.parallel = fsdp2 has no effect: one process has all parameters"]


def test_earlier_key_means_fsdp2() -> None:
    assert of_training("use_fsdp2=true").training.parallel == "fsdp2"
    assert of_training("use_fsdp2=true", "parallel=hsdp").training.parallel == "hsdp"
    assert of_training("use_fsdp2=null").training.parallel == "ddp"
    with pytest.raises(ConfigError, match=r"use_fsdp2 means .* not ddp"):
        of_training("use_fsdp2=true", "parallel=ddp")


def test_ranks_that_make_no_whole_groups_are_refused() -> None:
    ranks = Ranks(world_size=6, local_world_size=4)
    with pytest.raises(ConfigError, match="expected a divisor of 6") as caught:
        make_mesh("hsdp", ranks, device_type="cpu")
    assert caught.value.kind == "shard_size"


def test_settings_of_nccl_that_are_there_stay_and_are_said(notes: list[str]) -> None:
    variables = {"NCCL_MIN_NCHANNELS": "16", "NCCL_DEBUG": "WARN", "PATH": "/"}
    set_nccl_variables(variables)
    assert variables == NCCL_VARIABLES | {"NCCL_MIN_NCHANNELS": "16", "NCCL_DEBUG": "WARN", "PATH": "/"}
    set_nccl_variables(variables)
    assert set(notes) == {"settings of NCCL as in the environment: NCCL_DEBUG=WARN, NCCL_MIN_NCHANNELS=16"}


def test_sharded_weights_are_compiled_without_graphs(notes: list[str]) -> None:
    assert without_graphs("reduce-overhead") == "default"
    assert "training.compile_mode = reduce-overhead" in notes[0]
    assert without_graphs("default") == "default"
    assert len(notes) == 1


# --- configurations of the earlier system --------------------------------------------------------------

EARLIER = {  # GPUs, rows on each, batches of a step
    "ddp": (2, 30, 2),
    "ddp_original": (2, 8, 3),
    "ddp_4gpu": (4, 24, 2),
    "ddp_4gpu_original": (4, 8, 3),
}
TINY = [
    *("data.root=data", "data.reduce_space=1", "cache.dir=cache", "training.latent_cache_dir=latents"),
    *("checkpoint.dir=checkpoints", "latent.dim=2", "latent.tokens=8", "encoder.patch_size=4"),
    *("encoder.width=16", "encoder.depth=1", "decoder.width=16", "decoder.depth=1"),
    *("operator.width=16", "operator.depths=[1]", "operator.val_trajectories=2"),
    *("reading.num_workers=0", "training.num_workers=0", "training.device=cpu", "training.compile=false"),
    *("training.compile_mode=default", "stages.operator.steps=1", "stages.operator.epochs=1"),
    "stages.operator.steps_per_epoch=null",
]


@pytest.mark.parametrize(
    "name", [*list(EARLIER)[:1], *(pytest.param(n, marks=SLOW) for n in list(EARLIER)[1:])]
)
def test_earlier_configuration_makes_a_step_of_its_batches(
    name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_copy(shared_run(tmp_path_factory), tmp_path, monkeypatch)
    file, (num_gpus, rows, batches) = f"train_pdebench_2task_baseline_{name}", EARLIER[name]
    config = load_config(file, overrides=TINY)
    assert (config.training.num_gpus, config.training.accum_steps) == (num_gpus, batches)
    assert config.stage("operator").batch_size == config.stage("joint").batch_size == rows
    with pytest.raises(ConfigError, match=f"nproc-per-node {num_gpus}"):
        run_stage("operator", config)
    here = load_config(file, overrides=[*TINY, "training.num_gpus=1"])
    assert run_stage("operator", here)["steps"] == 1
    start = json.loads((folder / "checkpoints" / "operator.jsonl").read_text().splitlines()[0])
    assert start["effective_batch_size"] == rows * batches


def test_summary_of_the_earlier_system_trains_or_says_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its keys in one file, of which some don't go together here."""
    monkeypatch.chdir(tmp_path)
    prepare_fields(tmp_path)
    summary = Path(__file__).parents[1] / "configs" / "old_summary.yaml"
    with pytest.raises(ConfigError, match="AdamW alone is moved to the CPU; leave one of them out"):
        check_switches(load_config(summary), "operator", device="cuda", num_ranks=1)
    said = ["training.cpu_offload_optimizer=false"]
    with pytest.raises(ConfigError, match=r"say stages\.joint\.epochs in place of stages\.autoencoder"):
        run_stage("operator", load_config(summary, overrides=said))
    here = [text for text in TINY if not text.startswith(("operator.", "stages."))]
    small = ["stages.joint.steps=1", "stages.operator.steps=1", "operator.val_trajectories=2"]
    config = load_config(summary, overrides=[*said, *here, *small, "stages.joint.epochs=1"])
    assert (config.training.parallel, config.operator.attention) == ("fsdp2", "flex")
    assert [run_stage(stage, config)["steps"] for stage in ("joint", "operator")] == [1, 1]


@pytest.mark.parametrize("gpus", ["", "_4gpu"])
def test_shipped_pairs_are_before_and_after_optimisation(gpus: str) -> None:
    before, after = (
        load_config(f"train_pdebench_2task_baseline_ddp{gpus}{end}", overrides=["data.root=data"])
        for end in ("_original", "")
    )
    assert (before.training.amp, before.training.amp_dtype) == (True, "float16")
    assert (after.training.amp, after.training.amp_dtype) == (True, "bfloat16")
    stages = ("joint", "operator") if gpus else ("operator",)
    assert {before.stage(stage).optimizer.name for stage in stages} == {"adamw"}
    assert {after.stage(stage).optimizer.name for stage in stages} == {"muon_hybrid"}
    assert (before.training.physics_priors.weights, [*after.training.physics_priors.weights]) == (
        {},
        ["conservation"],
    )
    for stage in stages:
        check_switches(after, stage, device="cuda", num_ranks=after.training.num_gpus or 1)
