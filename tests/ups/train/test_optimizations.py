"""`ups validate optimizations`: what is a switch, that contenders don't meet, gates, exit codes, stopping."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import run_ups
from operator_runs import SETTINGS, made_once, prepare_fields

from ups.config import load_config
from ups.errors import ConfigError, DivergedError
from ups.train.budget import with_steps
from ups.train.contenders import Contender, Measured, Variant, differences, make_variants, peak_nbytes
from ups.train.optimizations import Gates, Row, _row, validate_optimizations, winner_of
from ups.train.stage import make_stage
from ups.train.trainer import Trainer

CPU = torch.device("cpu")
SMALL = [
    *("operator.state=fields", "operator.mixer=spectral", "data.tasks=[burgers1d]"),
    *("operator.width=8", "operator.drop_path=0.3", "training.prefetch_factor=0"),
    *("stages.operator.ema_decay=0.9", "operator.val_trajectories=1"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, prepare_fields)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration whose data aren't there."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SETTINGS))
    return path


def variants_of(file: Path, *switches: str) -> list[Variant]:
    options = {"overrides": SMALL, "only_optimized": switches, "stage": "operator"}
    return make_variants(file, file, **options)  # type: ignore[arg-type]


# --- what is compared ----------------------------------------------------------------------------------


def test_switches_are_applied_one_by_one_and_together(file: Path) -> None:
    said = ('training.preload="off"', "training.amp=true", "training.amp_dtype=float16")
    variants = variants_of(file, *said)
    off, amp = {"training.preload": "off"}, {"training.amp": True, "training.amp_dtype": "float16"}
    assert [dict(some.switches) for some in variants] == [{}, amp, off, amp | off]
    assert [some.config.training.preload for some in variants] == ["auto", "auto", "off", "off"]
    assert variants[1].name == "training.amp=true training.amp_dtype=float16"
    assert variants[-1].name == "together"


def test_one_switch_is_compared_once(file: Path) -> None:
    assert [some.name for some in variants_of(file, "training.compile=true")] == [
        "baseline",
        "training.compile=true",
    ]


def test_whatever_else_differs_is_in_the_last_variant(file: Path) -> None:
    said = ("operator.width=16", "training.batch_size=4", "stages.operator.optimizer.lr=0.1")
    variants = variants_of(file, *said, "training.amp=true", "seed=7", "checkpoint.dir=elsewhere")
    assert [some.name for some in variants] == ["baseline", "training.amp=true", "optimized"]
    last = variants[-1]
    assert last.switches.keys() >= {"operator.width", "training.batch_size", "training.amp"}
    assert last.config.stage("operator").batch_size == 4
    assert (last.config.seed, last.config.checkpoint.dir) == (0, variants[0].config.checkpoint.dir)
    assert last.has_same_loss
    assert not variants_of(file, "training.losses={mse: 1}")[-1].has_same_loss


@pytest.mark.parametrize("override", ["data.limit=3", "training.stride=2", "operator.val_trajectories=2"])
def test_other_data_and_validation_are_refused_by_name(file: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        variants_of(file, override, "training.amp=true")
    assert caught.value.kind == "not_comparable"
    assert override.partition("=")[0] in str(caught.value)
    assert "training.amp" not in str(caught.value)


@pytest.mark.parametrize("gpus", ["", "_4gpu"])
def test_shipped_pairs_are_compared(gpus: str) -> None:
    """Batches, accumulation, FSDP2 and inverse losses differ."""
    pair = [f"train_pdebench_2task_baseline_ddp{gpus}{end}" for end in ("_original", "")]
    options: dict[str, Any] = {"overrides": (), "only_optimized": (), "stage": "operator"}
    *_, last = make_variants(Path(pair[0]), Path(pair[1]), **options)
    assert last.name == "optimized"
    assert {"training.batch_size", "training.accum_steps"} & last.switches.keys()


def test_equal_configurations_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        variants_of(file, "checkpoint.dir=elsewhere", "logging.wandb.enabled=true")
    assert caught.value.kind == "no_difference"


def test_switches_that_do_not_combine_are_refused_before_any_trains(file: Path) -> None:
    given: dict[str, Any] = {"stage": "operator", "warm_up": 2, "gates": Gates()}
    offload = ["training.cpu_offload_optimizer=true"]
    with pytest.raises(ConfigError, match=r"training\.grad_clip=null") as caught:
        validate_optimizations(file, file, overrides=[], only_optimized=offload, **given)
    assert caught.value.kind == "switches"


def test_a_stages_own_optimiser_is_looked_at_as_it_is_in_effect() -> None:
    one = load_config({"data": {"tasks": "burgers1d"}})
    other = load_config({"data": {"tasks": "burgers1d"}}, overrides=["training.lr=0.5"])
    same = load_config(
        {"data": {"tasks": "burgers1d"}}, overrides=["stages.operator.optimizer.implementation=foreach"]
    )
    assert differences(one, other, stage="operator")[1]["stages.operator.optimizer.lr"] == 0.5
    units, others = differences(one, same, stage="operator")
    assert units == {"optimizer.implementation": {"stages.operator.optimizer.implementation": "foreach"}}
    assert others == {}


# --- training beside each other ------------------------------------------------------------------------


def test_a_contender_computes_what_it_computes_alone(run: Path) -> None:
    """Random numbers, averages and precision of the others change nothing, to the bit."""
    steps = 8
    baseline, other = variants_of(run / "run.yaml", "training.amp=true")
    with (
        Contender(baseline, stage="operator", steps=steps, device=CPU) as ours,
        Contender(other, stage="operator", steps=steps, device=CPU) as theirs,
    ):
        for each in (ours, theirs):
            each.warm_up(2)
        for _ in range(3):
            for each in (ours, theirs):
                each.round(2)
        ours.validate()
    config = with_steps(baseline.config, "operator", steps)
    alone = Trainer(make_stage("operator", config, device=CPU), config, device=CPU, restart=True)
    losses = []
    for _ in range(4):
        alone.train_step(), alone.train_step()
        losses.append(sum(alone.meter.read().values()))
    assert ours.measured.losses == losses[1:]
    assert ours.measured.nrmse == alone.measure()["score"]
    assert theirs.measured.losses != losses[1:]
    assert ours.measured.peak_nbytes is not None
    assert ours.measured.peak_nbytes > alone.state_nbytes()


def test_a_contender_whose_compiler_fails_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    """Else eager steps are compared as compiled ones."""
    from torch._dynamo.exc import TorchDynamoException

    def fail(*args: Any, **options: Any) -> Any:
        raise TorchDynamoException("no compiler")

    monkeypatch.setattr("torch.compile", lambda function, **options: fail)
    _, compiled = variants_of(run / "run.yaml", "training.compile=true")
    with Contender(compiled, stage="operator", steps=4, device=CPU) as contender:
        contender.warm_up(2)
    assert any("torch.compile failed, going on without" in note for note in notes)


def test_what_ends_a_contender_ends_no_other(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline, other = variants_of(run / "run.yaml", "training.amp=true")
    with (
        Contender(baseline, stage="operator", steps=4, device=CPU) as ours,
        Contender(other, stage="operator", steps=4, device=CPU) as theirs,
    ):
        ours.warm_up(2), theirs.warm_up(2)

        def explode(trainer: Trainer) -> None:
            raise DivergedError("step 3: loss 'one_step' is not finite")

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", explode)
            theirs.round(2)
        ours.round(2)
    assert (ours.is_running, theirs.is_running) == (True, False)
    row = _row(theirs, ours, Gates())
    assert [verdict.gate for verdict in row.gates if verdict.gate == "failures" and not verdict.is_passed]
    assert "not finite" in str(row.failure)


def test_memory_is_that_of_the_fullest_moment() -> None:
    def work() -> None:
        one = torch.empty(1000)
        two = torch.empty(500)
        del one
        torch.empty(100), two.add(1)

    assert peak_nbytes(work, CPU) == 4 * 1500


# --- what it decides -----------------------------------------------------------------------------------


def row_of(**measured: object) -> Row:
    """A variant beside a baseline of 3 s a step, loss 0.5 and nRMSE 0.1."""
    config = load_config({"data": {"tasks": "burgers1d"}})
    ours, other = (Contender(Variant(n, {}, config), stage="operator", steps=1, device=CPU) for n in "ab")
    own = {"step_s": [1.0] * 4, "losses": [0.5] * 4, "nrmse": 0.1, "peak_nbytes": 10**9}
    other.measured = Measured(step_s=[3.0] * 4, losses=[0.5] * 4, nrmse=0.1, peak_nbytes=10**9)
    ours.measured = Measured(**{**own, **measured})  # type: ignore[arg-type]
    return _row(ours, other, Gates())


@pytest.mark.parametrize(
    ("measured", "missed"),
    [
        ({}, []),
        ({"step_s": [1.1] * 4}, ["speedup"]),
        ({"losses": [0.5] * 3 + [0.502]}, ["loss_difference"]),
        ({"losses": [0.5] * 3 + [0.498]}, ["loss_difference"]),
        ({"nrmse": 0.104}, ["nrmse_change"]),
        ({"nrmse": 0.05}, []),  # better is no fault
        ({"nrmse": None}, ["nrmse_change"]),
        ({"peak_nbytes": 51 * 10**9}, ["peak_gb"]),
        ({"failure": "out of memory"}, ["failures"]),
    ],
)
def test_each_gate_is_missed_by_what_it_is_about(measured: dict[str, object], missed: list[str]) -> None:
    row = row_of(**measured)
    assert [verdict.gate for verdict in row.gates if not verdict.is_passed] == missed
    assert row.is_sound == (missed in ([], ["speedup"]))


def test_time_to_equal_loss_ends_where_the_baselines_last_loss_is_reached() -> None:
    assert row_of(losses=[0.6, 0.5, 0.4, 0.3]).loss_speedup == 12 / 2
    assert row_of(losses=[0.9] * 4).loss_speedup is None


def test_winner_is_the_fastest_that_does_no_harm() -> None:
    rows = {
        "slow": row_of(step_s=[4.0] * 4),
        "unsteady": row_of(step_s=[0.1, 9.0, 9.0, 0.1]),
        "harmful": row_of(step_s=[0.1] * 4, nrmse=0.2),
        "fast": row_of(step_s=[2.0] * 4),
        "fastest": row_of(step_s=[1.0] * 4),
    }
    rows = {name: Row(**{**vars(row), "name": name}) for name, row in rows.items()}
    assert winner_of([row_of(), *rows.values()]) == "fastest"
    assert winner_of([row_of(), rows["slow"], rows["unsteady"], rows["harmful"]]) == "baseline"


def compare(*words: str) -> int:
    command = ["validate", "optimizations", "--baseline", "run.yaml", "--steps", "12", "--warm-up", "2"]
    return int(run_ups(*command, *SMALL, *words).exit_code)


def test_exit_codes_and_the_suggested_configuration(run: Path) -> None:
    always = ["--set", "training.prefetch_factor=1", "--max-nrmse-increase", "1"]
    assert compare(*always, "--min-speedup", "1000", "--suggest") == 10
    document = json.loads((run / "reports/optimizations/report.json").read_text())
    assert (document["is_passed"], document["is_complete"]) == (False, True)
    assert [row["name"] for row in document["variants"]] == ["baseline", "training.prefetch_factor=1"]
    assert document["variants"][1]["loss_difference"] == 0.0
    suggested = load_config(run / "reports/optimizations/suggested.yaml")
    won = document["winner"] != "baseline"
    assert suggested.training.prefetch_factor == (1 if won else 0)
    assert suggested.stage("operator").steps is None
    assert compare(*always, "--min-speedup", "0") == 0
    assert compare("--set", "data.limit=3") == 2


def test_other_batches_take_turns_of_as_many_samples(run: Path) -> None:
    always = ["--set", "training.batch_size=4", "--set", "training.amp=true"]
    limits = ["--min-speedup", "0", "--max-loss-difference", "9", "--max-nrmse-increase", "9", "--suggest"]
    assert compare(*always, *limits) == 0
    rows = json.loads((run / "reports/optimizations/report.json").read_text())["variants"]
    assert [(row["name"], row["rows"]) for row in rows] == [
        ("baseline", 8),
        ("training.amp=true", 8),
        ("optimized", 4),
    ]
    lengths = [len(record["switches"]) > 0 for record in rows]
    assert lengths == [False, True, True]
    assert rows[-1]["speedup"] > 0
    load_config(run / "reports/optimizations/suggested.yaml")


def test_stopped_it_shows_what_was_measured(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Contender.round

    def interrupted(contender: Contender, num_steps: int) -> None:
        plain(contender, num_steps)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Contender, "round", interrupted)
    assert compare("--set", "training.amp=true", "--min-speedup", "0") == 5
    document = json.loads((run / "reports/optimizations/report.json").read_text())
    rounds = [row["loss"] is not None for row in document["variants"]]
    assert (document["is_complete"], document["is_passed"], rounds) == (False, False, [True, False])
