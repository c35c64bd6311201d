"""`ups dry-run`: what would be built, trained and kept, what steps take; nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run_ups
from small_runs import files_below, make_small_run

from ups.config import load_config
from ups.eval.equal_budgets import parse_budgets
from ups.pipeline.dry_run import dry_run, plan_baselines
from ups.pipeline.planned import PlannedRanks
from ups.pipeline.scratch import Scratch, scratch_folder
from ups.train.run import run_stage
from ups.train.train_baselines import obtain_baseline
from ups_store.build import Watcher, build_all


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_small_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return Path("run.yaml")


def test_a_dry_run_measures_every_stage_and_writes_nothing(run: Path) -> None:
    before = files_below(Path())
    plan = dry_run(run, price_per_hour=3600.0, num_steps=2)
    assert files_below(Path()) == before
    assert plan.exit_code == 0, plan.problems
    assert [(stage.name, stage.action, stage.steps) for stage in plan.stages] == [
        ("autoencoder", "train", 2),
        ("operator", "train", 2),
    ]
    assert [store.action for store in plan.stores] == ["build"] * 3
    assert all(stage.measured is not None and stage.measured.step_s > 0 for stage in plan.stages)
    assert plan.cost == pytest.approx(plan.training_seconds)
    assert 0 < plan.disk_bytes < plan.memory_bytes


WITH_GENERATIVE = [
    *("stages.corrector.epochs=2", "stages.student.epochs=1"),
    *("stages.student.method=consistency", "data.split_fractions=[0.5,0.4,0.1]"),
    *("operator.state=fields", "diffusion.export_anyway=true", "diffusion.residual_dir=residuals"),
]


def test_stages_on_models_that_arent_there_yet_are_measured_too(run: Path) -> None:
    before = files_below(Path())
    plan = dry_run(run, WITH_GENERATIVE, num_steps=1)
    assert files_below(Path()) == before
    assert (plan.exit_code, [check.text for check in plan.checks if check.mark == "warning"]) == (0, [])
    assert [(stage.name, stage.steps) for stage in plan.stages] == [
        ("operator", 2),
        ("corrector", 8),  # 2 trajectories of validation, from 4 steps each, 2 lead times: 16 residuals
        ("student", 4),
    ]
    assert all(stage.measured is not None and stage.measured.step_s > 0 for stage in plan.stages)


@pytest.mark.slow
def test_corrector_and_operator_that_are_kept_are_what_the_student_is_measured_on(run: Path) -> None:
    config = load_config(run, overrides=WITH_GENERATIVE)
    build_all(config.build, watcher=Watcher())
    for name, steps in (("operator", 2), ("corrector", 8)):
        assert run_stage(name, config)["steps"] == steps
    plan = dry_run(run, WITH_GENERATIVE, num_steps=1)
    assert [stage.action for stage in plan.stages] == ["keep", "keep", "train"]
    assert plan.stages[2].measured is not None
    more = dry_run(run, [*WITH_GENERATIVE, "operator.noise=0.1"], num_steps=0)
    assert [stage.action for stage in more.stages] == ["train again", "train again", "train"]


def test_what_cant_be_measured_is_said_of_the_runs_own_files(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ups.pipeline.scratch._needed_models", set)  # as if no stage left its model
    plan = dry_run(run, WITH_GENERATIVE, num_steps=1)
    said = [check.text for check in plan.checks if "isn't measured" in check.text]
    assert "stage corrector isn't measured: checkpoints/operator.safetensors: no such" in said[0]
    assert not any("ups-dry-run" in text for text in said)


def test_what_is_trained_is_kept_and_what_depends_on_a_change_is_not(run: Path) -> None:
    run_stage("autoencoder", load_config(run))
    before = files_below(Path())
    plan = dry_run(run, num_steps=2)
    assert [(stage.name, stage.action) for stage in plan.stages] == [
        ("autoencoder", "keep"),
        ("operator", "train"),
    ]
    assert plan.stages[1].measured is not None
    assert {store.reason for store in plan.stores} == {"there is none yet"}
    more = dry_run(run, ["stages.autoencoder.steps_per_epoch=3"], num_steps=0)
    assert [stage.action for stage in more.stages] == ["train again", "train"]
    assert "steps_per_epoch" in more.stages[0].reason
    assert files_below(Path()) == before


def test_problems_end_a_dry_run_before_anything_is_measured(run: Path) -> None:
    done = run_ups("dry-run", run, "latent.tokens=5", "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["exit_code"], document["stages"]) == (2, 2, [])


def test_baselines_of_the_evaluation_are_planned_measured_and_kept_once_trained(run: Path) -> None:
    budget = ["evaluation.baseline_samples=4"]
    before = files_below(Path())
    plan = dry_run(run, budget, num_steps=2)
    assert files_below(Path()) == before
    assert plan.exit_code == 0, plan.problems
    baselines = plan.stages[2:]
    assert [stage.name for stage in baselines] == [
        "fno (burgers1d, budget of 4 samples)",
        "unet (burgers1d, budget of 4 samples)",
    ]
    assert all(stage.steps is not None and stage.steps >= 1 for stage in baselines)
    assert all(stage.measured is not None and stage.measured.step_s > 0 for stage in baselines)
    assert plan.training_seconds == pytest.approx(sum(stage.seconds or 0 for stage in plan.stages))
    config = load_config(run, overrides=budget)
    (wanted,) = parse_budgets(samples=4)
    obtain_baseline(config, "fno", "burgers1d", budget=wanted)
    found = plan_baselines(config)
    assert [one.plan.action for one in found.values()] == ["keep", "train"]
    assert found["fno (burgers1d, budget of 4 samples)"].plan.seconds == 0
    again = plan_baselines(config.model_copy(update={"seed": 7}))
    assert again["fno (burgers1d, budget of 4 samples)"].plan.action == "train again"


def test_shards_of_several_ranks_take_less_memory_and_batches_are_larger(run: Path) -> None:
    ranks = ["training.parallel=fsdp2", "training.num_gpus=2"]
    done = run_ups("dry-run", run, *ranks, "--measured-steps", "1")
    shown = " ".join(done.output.split())
    assert "total on 2 x the CPU (fsdp2, 2 shards)" in shown
    assert "what ranks exchange" in shown
    assert "the run has 2 ranks, and this machine 0 GPUs" in shown
    plan = dry_run(run, ranks, num_steps=0)
    assert [stage.steps for stage in plan.stages] == [2, 2]  # as the configuration says
    document = json.loads(json.dumps(plan.to_json()))
    assert document["ranks"] == {"num": 2, "parallel": "fsdp2", "num_shards": 2}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (1, 1)),
        (("training.num_gpus=4",), (4, 1)),
        (("training.num_gpus=4", "training.use_fsdp2=true"), (4, 4)),
        (("training.num_gpus=4", "training.parallel=hsdp", "training.shard_size=2"), (4, 2)),
        (("training.num_gpus=4", "pipeline.num_processes=2", "training.parallel=fsdp2"), (2, 2)),
    ],
)
def test_ranks_are_those_that_the_run_would_start(
    run: Path, overrides: tuple[str, ...], expected: tuple[int, int]
) -> None:
    config = load_config(run, overrides=overrides)
    ranks = PlannedRanks.of(config)
    assert (ranks.num, ranks.num_shards) == expected
    assert config.stage("operator").rows_over(ranks.num) == expected[0] * (
        config.stage("operator").batch_size or 0
    )
    assert ranks.memory_of_rank(1000, states=400) == 600 + 400 // expected[1]
    assert ranks.steps_of(10) == 10 // expected[0]


def test_rows_over_all_ranks_are_divided_among_them(run: Path) -> None:
    ranks = ["training.num_gpus=2", "training.batch_size=null", "training.global_batch_size=8"]
    config = load_config(run, overrides=ranks)
    assert config.stage("operator").rows_over(PlannedRanks.of(config).num) == 8
    with scratch_folder() as folder:
        given = {"config_path": run, "overrides": ranks, "tasks": {}, "trained": ()}
        scratch = Scratch(config, folder=folder, ranks=PlannedRanks.of(config), **given)
        assert scratch.config.stage("operator").global_batch_size == 4
