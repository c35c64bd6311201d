"""`ups train`: all stages in one command, what is kept on the second run, reports, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import Done, run_ups
from noted import noted
from operator_runs import SETTINGS, build_here, configure, made_once, own_copy
from rich.console import Console
from run_nodes import build_stores

import ups_store
from ups.data.solvers import make_dataset
from ups.errors import ConfigError, InterruptedTrainingError, OutputError, UpsError
from ups.pipeline.training import run_all
from ups.train.checks import check_encoder
from ups.train.log import show_report
from ups.train.train_baselines import train_configured_baselines
from ups.train.trainer import Trainer
from ups.trained.checkpoint import hash_tensors, load_checkpoint
from ups.trained.corrected import load_corrected

REPO = Path(__file__).resolve().parents[3]
SCRIPT = REPO / "scripts" / "train.py"
SHORT = {"epochs": 1, "steps_per_epoch": 5}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and a configuration."""
    return made_once(tmp_path_factory, make_sources)


def make_sources(folder: Path) -> None:
    make_dataset("burgers1d", Path("data"), num_samples=20, points=32, frames=9, nu=0.1)
    data = {"task": "burgers1d", "root": "data", "split_fractions": [0.5, 0.4, 0.1]}
    settings = {**SETTINGS, "data": data}
    settings["stages"] = {"autoencoder": SHORT, "operator": SHORT}
    Path("run.yaml").write_text(yaml.safe_dump(settings))


@pytest.fixture
def run(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_copy(prepared, tmp_path, monkeypatch)


@pytest.fixture
def builds_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of stores are no processes of their own, which import torch each time."""
    monkeypatch.setattr("ups.pipeline.training.run_process", build_here)


@pytest.fixture(scope="module")
def trained_once(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with everything that `ups train` leaves."""

    def train(folder: Path) -> None:
        shutil.copytree(prepared, folder, dirs_exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ups.pipeline.training.run_process", build_here)
            all_of(folder)

    return made_once(tmp_path_factory, train)


@pytest.fixture
def trained(trained_once: Path, builds_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_copy(trained_once, tmp_path, monkeypatch)


def all_of(folder: Path, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    """The report, and what was noted."""
    config = configure(folder, *overrides)
    path = folder / "run.yaml"
    with noted() as notes:
        return run_all(config, config_path=path, overrides=overrides), notes


def trained_again(notes: list[str]) -> list[str]:
    return [note.split()[1] for note in notes if "is trained again" in note]


def inside(*arguments: str) -> Done:
    """The command in this process: torch is there already."""
    return run_ups("train", *arguments)


def test_all_stages_leave_an_operator_and_the_second_run_keeps_everything(run: Path) -> None:
    unused = "training.amp_dtype=float16"
    report, notes = all_of(run, unused)
    assert list(report["stages"]) == ["autoencoder", "operator"]
    assert notes.count("warning: training.amp_dtype has no effect: training.amp is off") == 1
    assert report["cache"]["startup/cache_reused"] == 0.0
    assert report["stages"]["operator"]["startup"]["startup/cache_sec"] > 0
    assert any("$ ups-store build --config" in note for note in notes)
    written = Path("checkpoints/operator.safetensors").stat().st_mtime_ns
    again, notes = all_of(run, unused)
    assert again["cache"]["startup/cache_reused"] == 1.0
    assert [stage["steps"] for stage in again["stages"].values()] == [5, 5]
    assert Path("checkpoints/operator.safetensors").stat().st_mtime_ns == written
    assert trained_again(notes) == []


def test_corrector_comes_after_the_operator_and_is_trained_again_for_another_one(trained: Path) -> None:
    wanted = ["stages.corrector.epochs=1", "stages.corrector.steps_per_epoch=2"]
    wanted += ["diffusion.hidden_dim=8", "diffusion.num_sampler_steps=2", "diffusion.export_anyway=true"]
    report, notes = all_of(trained, *wanted)
    assert trained_again(notes) == []
    assert list(report["stages"]) == ["autoencoder", "operator", "corrector"]
    path, operator = Path("checkpoints/corrector.safetensors"), Path("checkpoints/operator.safetensors")
    assert load_corrected(path).corrector_spec.operator_sha256 == hash_tensors(operator)
    _, notes = all_of(trained, *wanted, "operator.noise=0.02")
    assert trained_again(notes) == ["operator", "corrector"]
    assert load_corrected(path).corrector_spec.operator_sha256 == hash_tensors(operator)


@pytest.mark.usefixtures("builds_here")
def test_seeds_are_trained_beside_each_other_kept_and_evaluated_as_one_row(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for drawn in ("task_figures", "run_figures"):  # a quarter of the time
        monkeypatch.setattr(f"ups.eval.evaluate.{drawn}", lambda *found: [])
    wanted = ["--config", "run.yaml", "--seeds", "3,1", "data.split_fractions=[0.4,0.5,0.1]", "--json"]
    done = inside(*wanted, "evaluation.enabled=true", "evaluation.baseline_samples=32")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert list(report["seeds"]) == ["3", "1"]
    assert list(report["seeds"]["3"]["stages"]) == ["autoencoder", "operator"]
    rows = json.loads(Path("reports/run/report.json").read_text())["rows"]
    for name in ("operator", "fno_samples", "unet_samples", "autoencoder_floor"):
        assert rows[name]["seeds"] == [3, 1]
    each = rows["operator"]["by_seed"]["nrmse"]
    assert each[0] != each[1]
    assert rows["operator"]["nrmse"]["mean"] == pytest.approx(sum(each) / 2)
    assert rows["unet_samples"]["paired"]["nrmse"]["verdict"] == "can't be told"  # few trajectories
    written = {path: path.stat().st_mtime_ns for path in Path("checkpoints").rglob("*.safetensors")}
    assert {path.parts[1] for path in written} == {"seed-1", "seed-3"}
    assert Path("latents/seed-3/burgers1d_train.zarr.zip").exists()
    assert inside(*wanted).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written
    missing = run_ups("evaluate", "--config", "run.yaml", "--seeds", "1,2")
    assert missing.exit_code == 1
    assert "seed-2/operator.safetensors: no such checkpoint; train it with `ups train --seeds`" in (
        missing.stderr
    )
    both = inside("--config", "run.yaml", "--seeds", "1", "--seed", "2")
    assert (both.exit_code, "--seed and --seeds: expected one of them" in both.stderr) == (2, True)


@pytest.mark.usefixtures("builds_here")
def test_joint_takes_the_place_of_the_autoencoder_and_its_lost_encoder_is_exported_again(run: Path) -> None:
    joint = ["training.use_inverse_losses=true", "stages.joint.epochs=1", "stages.joint.steps_per_epoch=5"]
    report, notes = all_of(run, *joint)
    assert list(report["stages"]) == ["joint", "operator"]
    assert any("latent.encoder=none" in note for note in notes)
    assert Path("cache/burgers1d_train.zarr.zip").exists()
    path, operator = Path("checkpoints/autoencoder.safetensors"), Path("checkpoints/operator.safetensors")
    whole, written = hash_tensors(path), operator.stat().st_mtime_ns
    path.unlink()
    report, notes = all_of(run, *joint)
    assert hash_tensors(path) == whole
    assert operator.stat().st_mtime_ns == written
    assert report["stages"]["joint"]["resumed_at"] == 5
    assert "it is exported again" in "\n".join(notes)
    assert trained_again(notes) == []
    with pytest.raises(ConfigError, match=r"another training\.latent_cache_dir") as caught:
        check_encoder(configure(run, *joint, "training.latent_cache_dir=cache"))
    assert caught.value.kind == "same_folder"


def test_what_changed_decides_what_is_trained_again(trained: Path) -> None:
    _, notes = all_of(trained, "operator.width=32")
    assert trained_again(notes) == ["operator"]
    shutil.rmtree("data")
    make_dataset("burgers1d", Path("data"), num_samples=20, points=32, frames=9, nu=0.2)
    report, notes = all_of(trained, "operator.width=32")
    assert trained_again(notes) == ["autoencoder", "operator"]
    assert report["cache"]["startup/cache_reused"] == 0.0


def test_joint_epochs_that_no_operator_could_use_are_refused_before_anything_is_trained(run: Path) -> None:
    settings = ["training.use_inverse_losses=true", "stages.joint.epochs=1"]
    for override, kind in (
        ("operator.state=fields", "no_latents"),
        ("training.use_inverse_losses=false", "no_inverse_losses"),
        ("latent.checkpoint=given.safetensors", "given_encoder"),
    ):
        with pytest.raises(ConfigError) as caught:
            all_of(run, *settings, override)
        assert caught.value.kind == kind
    assert not Path("checkpoints").exists()


@pytest.mark.parametrize(
    ("override", "kind", "says"),
    [
        ("operator.num_heads=3", "num_heads", "operator.width = 16"),
        ("training.use_inverse_losses=true", "inverse_losses_frozen", "stages.joint.epochs"),
        ("encoder.patch_size=5", "patch_size", "32 points: expected a divisor of all of them: 1, 2, 4"),
        ("latent.tokens=7", "num_tokens", "latent.tokens = 7 of 8 patches: expected"),
    ],
)
def test_what_the_operator_would_refuse_is_refused_before_anything_is_trained(
    run: Path, override: str, kind: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        all_of(run, override)
    assert caught.value.kind == kind
    assert says in str(caught.value)
    assert not Path("checkpoints").exists()
    assert not Path("cache").exists()


def test_report_that_could_not_be_written_is_refused_before_anything_is_trained(run: Path) -> None:
    Path("reports").write_text("a file in the place of the folder")
    with pytest.raises(OutputError, match="reports/run"):
        all_of(run, "evaluation.enabled=true")
    assert not Path("checkpoints").exists()


def test_encoder_that_is_given_is_used_and_none_is_trained(trained: Path) -> None:
    Path("checkpoints/autoencoder.safetensors").rename("given.safetensors")
    shutil.rmtree("checkpoints")
    shutil.rmtree("latents")
    report, notes = all_of(trained, "latent.checkpoint=given.safetensors")
    assert list(report["stages"]) == ["operator"]
    assert "no autoencoder is trained: latent.checkpoint = given.safetensors" in notes
    startup = report["stages"]["operator"]["startup"]
    assert startup["startup/cache_sec"] >= report["cache"]["startup/cache_sec"]  # looking at them again
    assert not Path("checkpoints/autoencoder.safetensors").exists()
    own = "latent.checkpoint=checkpoints/autoencoder.safetensors"
    assert configure(trained, own).trained_stages[0] == "autoencoder"


def test_field_stores_are_timed_apart_from_the_imports(run: Path, notes: list[str]) -> None:
    began = time.time()
    config = configure(run, "operator.state=fields")
    overrides = ["operator.state=fields"]
    path = run / "run.yaml"
    report = run_all(config, config_path=path, overrides=overrides, began=began)
    assert list(report["stages"]) == ["operator"]  # it needs no encoder
    assert report["stages"]["operator"]["states"] == "fields"
    startup = report["stages"]["operator"]["startup"]
    assert startup["startup/field_cache_sec"] > 0.1
    assert 0 <= startup["startup/imports_sec"] < 0.5 * startup["startup/field_cache_sec"]
    assert startup["startup/total_startup_time_min"] * 60 > startup["startup/field_cache_sec"]


def test_manifest_of_one_of_several_machines_is_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(command: list[str], **said: str) -> None:
        told = Path(command[command.index("--manifest") + 1])
        assert told.name == "latents.manifest.json"
        own = told.with_name("latents.manifest-00000-of-00002.json")
        own.parent.mkdir(parents=True)
        own.write_text(json.dumps({"stores": [{"reused": True}]}))

    monkeypatch.setattr("ups.pipeline.training.run_process", build)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    metrics = build_stores("latent-stores", Path("run.yaml"))
    assert metrics["startup/cache_reused"] == 1.0


@pytest.mark.usefixtures("builds_here")
def test_insisting_on_field_stores_builds_them(run: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        all_of(run, "training.field_source=store", "training.latent_cache_dir=cache")
    assert caught.value.kind == "same_folder"
    assert not Path("cache").exists()
    report, _ = all_of(run, "training.field_source=store")
    assert list(report["stages"]) == ["autoencoder", "operator"]
    for folder, array in (("cache", "fields"), ("latents", "latent")):
        with ups_store.open(Path(folder, "burgers1d_train.zarr.zip")) as store:
            assert array in store


def test_evaluation_follows_with_the_baselines_of_a_budget(trained: Path) -> None:
    settings = ("evaluation.enabled=true", "evaluation.split=val", "evaluation.baseline_flops=1e8")
    report, _ = all_of(trained, *settings)
    assert report["evaluation"]["json"] == "reports/run/report.json"
    rows = json.loads(Path("reports/run/report.json").read_text())["rows"]
    assert {"operator", "persistence", "autoencoder_floor"} <= rows.keys()
    assert set(list(rows)[1:3]) == {"fno_flops", "unet_flops"}
    assert rows["fno_flops"]["label"] == "FNO (1e+08 FLOP)"
    written = {
        path: path.stat().st_mtime_ns for path in Path("checkpoints/baselines").glob("*/*.safetensors")
    }
    assert len(written) == 4  # each with its training state
    with noted() as notes:
        train_configured_baselines(configure(trained, *settings), restart=False)
    assert sum("is there already, trained alike" in note for note in notes) == 2
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_baselines_without_an_evaluation_have_no_effect_which_is_said(trained: Path) -> None:
    _, notes = all_of(trained, "evaluation.baseline_samples=16")
    says = "warning: evaluation.baseline_samples has no effect: evaluation.enabled is off"
    assert notes.count(says) == 1
    assert not Path("checkpoints/baselines").exists()


@pytest.mark.parametrize("is_quiet", [False, True])
def test_build_of_a_quiet_training_is_quiet(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_quiet: bool
) -> None:
    monkeypatch.setattr("ups_store.console.console", Console(quiet=is_quiet))
    build_stores("field-stores", Path("run.yaml"), "training.field_source=store")
    assert ("burgers1d_train.zarr.zip" in capfd.readouterr().err) is not is_quiet


def test_build_that_fails_ends_with_its_exit_code(run: Path) -> None:
    Path("autoencoder.safetensors").touch()
    with pytest.raises(UpsError, match="ended with exit code 1") as caught:
        build_stores("latent-stores", Path("run.yaml"), "latent.checkpoint=autoencoder.safetensors")
    assert (caught.value.kind, caught.value.exit_code) == ("build", 1)


# --- the command ---------------------------------------------------------------------------------------


def test_command_prints_json_alone_on_stdout_and_tables_without(trained: Path) -> None:
    done = inside("--config", "run.yaml", "--stage", "all", "--json", "--restart")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["stages"]["operator"]["steps"] == 5
    assert report["stages"]["autoencoder"]["startup"]["startup/imports_sec"] > 0
    startup = report["stages"]["operator"]["startup"]  # counted from the launch, with the autoencoder's time
    seconds = startup["startup/earlier_sec"] + startup["startup/cache_sec"]
    assert report["stages"]["autoencoder"]["seconds"] < startup["startup/earlier_sec"] < seconds
    assert startup["startup/total_startup_time_min"] * 60 > seconds
    assert startup["startup/cache_precompute_time_min"] * 60 == pytest.approx(startup["startup/cache_sec"])
    done = inside("--config", "run.yaml", "--stage", "operator")
    assert "nRMSE of rollouts" in done.stdout
    assert "checkpoints/operator.safetensors" in done.stdout
    assert "trained already" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stage", "operatr"], "own_baseline, all, found 'operatr'"),
        (["--stage", "student"], "train it with `ups train --stage corrector`"),
        (["--stage", "operator"], "train it with `--stage autoencoder`"),
        (["--stage", "joint"], "training.use_inverse_losses=true"),
        (["--stage", "operator", "--epochs", "0"], "stages.operator.epochs = 0 leaves the stage out"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, arguments: list[str], says: str) -> None:
    done = inside("--config", "run.yaml", *arguments)
    assert says in done.stderr
    assert done.exit_code in (1, 2)
    assert done.stdout == ""


def test_stop_before_the_first_step_is_reported_in_one_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ups.train.run.make_stage", stopped)
    done = inside("--config", "run.yaml")
    says = "stage autoencoder was stopped before its first step; there is nothing to save yet"
    assert done.stderr == f"{says}; the same command begins again\n"
    assert done.exit_code == 5


def test_stop_after_a_step_is_reported_in_one_sentence_and_no_error(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = Trainer.train_step

    def step(trainer: Trainer, **options: Any) -> None:
        train_step(trainer, **options)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "train_step", step)
    done = inside("--config", "run.yaml")
    where = Path("checkpoints/autoencoder.training.safetensors")
    says = f"stage autoencoder was stopped by SIGTERM after step 1 of 5, and is saved in {where}"
    assert done.stderr.splitlines()[-1] == f"{says}; the same command continues"
    assert "error" not in done.stderr
    assert where.exists()
    assert done.exit_code == 5


def test_evaluation_with_a_single_stage_warns(run: Path) -> None:
    done = inside("--config", "run.yaml", "--stage", "operator", "evaluation.enabled=true")
    assert "warning: evaluation.enabled has no effect: stage all evaluates" in done.stderr


def test_flag_allows_unknown_encoders(run: Path) -> None:
    done = inside("--config", "run.yaml", "--allow-unknown-encoder", "--print-config")
    assert yaml.safe_load(done.stdout)["training"]["allow_unknown_encoder"] is True


@pytest.mark.slow
@pytest.mark.multi_process
def test_script_trains_all_stages_under_torchrun(run: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # Adam divides the rounding errors of gradients that vanish by themselves; SGD leaves them small.
    sgd = [f"stages.{stage}.optimizer.name=sgd" for stage in ("autoencoder", "operator")]
    sgd.append("data.split_fractions=[0.8,0.1,0.1]")
    command = [*launch, str(SCRIPT), "--config", "run.yaml", "--stage", "all", "--json", *sgd]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout)["stages"]
    assert [(name, stage["ranks"], stage["steps"]) for name, stage in stages.items()] == [
        ("autoencoder", 2, 5),
        ("operator", 2, 5),
    ]
    Path("checkpoints").rename("together")
    all_of(run, *sgd)
    for name, tolerance in (("autoencoder", 1e-5), ("operator", 1e-3)):  # latents in between are float16
        alone, together = (
            load_checkpoint(Path(folder) / f"{name}.safetensors", kind=name)[0]
            for folder in ("checkpoints", "together")
        )
        torch.testing.assert_close(together, alone, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.usefixtures("builds_here")
def test_signal_during_the_build_reaches_it_and_the_command_continues(run: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--config", "run.yaml", "--stage", "all"]
    with (run / "stderr.txt").open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stderr=stderr, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 100
            while "$ ups-store build" not in (run / "stderr.txt").read_text():
                assert process.poll() is None, (run / "stderr.txt").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=60)
        finally:
            process.kill()
    assert code == 5, (run / "stderr.txt").read_text()
    report, _ = all_of(run)
    assert [stage["steps"] for stage in report["stages"].values()] == [5, 5]


def test_signal_while_the_build_starts_still_stops_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_late(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        signal.raise_signal(signal.SIGTERM)
        started.append(popen(["sleep", "100"], **options))
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start_late)
    with pytest.raises(InterruptedTrainingError, match="SIGTERM"):
        build_stores("field-stores", Path("run.yaml"), "training.field_source=store")
    assert started[0].returncode == -signal.SIGTERM


def test_table_of_all_stages_shows_errors_and_warns_of_latents_that_are_no_smaller() -> None:
    report = {
        "steps": 10,
        "seconds": 2.0,
        "data_wait_share": 0.25,
        "latent": {"tokens": 8, "dim": 2},
        "compression": {"burgers1d": 0.5},
        "floor_nrmse": {"burgers1d": 0.01234, "burgers1d/force": 0.5},
        "floor_nrmse_float16_latents": {"burgers1d": 0.02},
        "checkpoint": "a.safetensors",
    }
    console = Console(width=120, record=True, quiet=False, file=sys.stderr)
    show_report({"stages": {"autoencoder": report}, "evaluation": {"html": "report.html"}}, console)
    text = console.export_text()
    for shown in ("1.234%", "50.000%", "float16 latents", "0.5x", "25.0% of training", "report.html"):
        assert shown in text
    assert "latents of burgers1d are no smaller than the fields (0.5x)" in text
