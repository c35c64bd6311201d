"""`ups validate config`: all problems of a run at once, as far as configuration and machine show them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ups.config import load_config as load_run_config
from ups.config.loading import load_leniently
from ups.errors import MissingExtraError
from ups.pipeline.config_checks import GROUPS, check_config
from ups.pipeline.report import Report
from ups.pipeline.training import run_all
from ups_store.build import Watcher, build_all, load_config

STATES_OF_FIELDS = ["operator.state=fields", "stages.autoencoder.epochs=0"]


def texts(report: Report) -> str:
    return "\n".join(check.text for check in report.problems)


def test_a_sound_run_has_a_line_in_every_group_and_no_problem(run: Path) -> None:
    report = check_config(run)
    assert (report.exit_code, texts(report)) == (0, "")
    assert {check.group for check in report.checks} == {*GROUPS} - {"field stores"}  # it reads latents
    assert [check.group for check in report.checks] == sorted(
        (check.group for check in report.checks), key=GROUPS.index
    )


def test_all_problems_of_a_run_come_at_once(run: Path) -> None:
    report = check_config(
        run,
        [
            "training.bach_size=3",  # unknown
            "training.lr=fast",  # of another type
            "stages.oprator.epochs=2",  # no stage
            "encoder.width=15",  # no multiple of its heads
            "operator.pdet.input_dim=7",  # not latent.dim
            "operator.depths=[1,1]",
            "operator.mixer=[spectral,spectral,spectral]",  # of three levels
            "latent.tokens=5",  # of 8 patches
            "training.use_inverse_losses=true",  # in no stage
            "data.root=nowhere",
        ],
    )
    found = texts(report)
    for part in (
        *("training.bach_size", "training.lr", "oprator", "encoder.width = 15"),
        *("pdet.input_dim = 7", "operator.mixer", "inverse losses train", "nowhere"),
    ):
        assert part in found, part
    assert report.exit_code == 2
    assert report.to_json()["problems"] == len(report.problems) >= 8


def test_corrector_is_a_stage_and_needs_held_out_trajectories(run: Path) -> None:
    stage = "stages.corrector.epochs=2"
    report = check_config(run, [stage])
    assert [check.kind for check in report.problems] == ["too_few_trajectories"]  # one of 20 samples
    report = check_config(run, [stage, "data.split_fractions=[0.5,0.4,0.1]"])
    assert report.exit_code == 0, texts(report)
    assert any("corrector (2 epochs)" in check.text for check in report.checks)
    report = check_config(run, [stage, "data.split_fractions=[0.5,0.4,0.1]", "diffusion.latent_dim=9"])
    assert "diffusion.latent_dim = 9" in texts(report)


def test_rollouts_longer_than_trajectories_and_a_missing_operator_are_problems_of_a_corrector(
    run: Path,
) -> None:
    wanted = ["stages.corrector.epochs=2", "data.split_fractions=[0.5,0.4,0.1]"]
    report = check_config(run, [*wanted, "diffusion.lead_times=50", "diffusion.operator=nowhere.safetensors"])
    assert {check.kind for check in report.problems} == {"lead_times", "missing"}
    assert "diffusion.lead_times = 50: expected at most 5, the steps" in texts(report)
    assert "nowhere.safetensors: no such checkpoint; train it with `ups train --stage operator`" in texts(
        report
    )
    assert check_config(run, [*wanted, "diffusion.lead_times=5"]).exit_code == 0
    report = check_config(run, ["stages.student.epochs=1"])
    assert "corrector.safetensors: no such checkpoint; train it with" in texts(report)


def test_sizes_are_compared_with_the_grids_of_the_sources(run: Path) -> None:
    report = check_config(run, ["latent.tokens=5", "training.horizon=6"])
    assert {(check.kind, check.exit_code) for check in report.problems} == {("num_tokens", 2), ("horizon", 2)}


def test_missing_data_have_the_exit_code_of_data(run: Path) -> None:
    report = check_config(run, ["data.root=nowhere"])
    assert (report.exit_code, {check.group for check in report.problems}) == (3, {"data"})


def test_a_full_disk_has_the_exit_code_of_disks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ups.pipeline.machine_checks.shutil.disk_usage", lambda path: SimpleNamespace(free=100)
    )
    report = check_config(run)
    assert [(check.kind, check.exit_code) for check in report.problems] == [("disk_full", 6)]


@pytest.mark.parametrize(
    ("key", "group"),
    [
        ("training.latent_cache_dir", "latent cache"),
        ("pipeline.dir", "checkpoints"),
        ("pipeline.report_dir", "checkpoints"),
        ("pipeline.best_dir", "checkpoints"),
    ],
)
def test_folders_that_are_written_after_hours_are_tried_first(run: Path, key: str, group: str) -> None:
    Path("file").write_text("no folder")
    report = check_config(run, [f"{key}=file/within"])
    assert [(check.group, check.kind) for check in report.problems] == [(group, "not_written")]
    assert "file/within: can't be written" in texts(report)


@pytest.mark.parametrize(("package", "extra"), [("scipy", "train"), ("matplotlib", "plot")])
def test_packages_that_are_needed_after_hours_are_asked_for_first(
    run: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # also where it is installed
    report = check_config(run)
    said = f"{package} isn't installed; pip install 'ups-store[{extra}]'"
    assert [(check.group, check.text) for check in report.problems] == [("configuration", said)]
    with pytest.raises(MissingExtraError) as refused:
        run_all(load_run_config(run), config_path=run, overrides=())
    assert refused.value.module == package
    assert not Path("checkpoints").exists()


def test_a_model_that_does_not_fit_misses_a_gate(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.pipeline.machine_checks.ups_store.available_memory_bytes", lambda: 10_000)
    report = check_config(
        run, ["training.preload=off", "training.field_source=auto", "training.cache_mode=none"]
    )
    gates = [check for check in report.problems if check.group == "hardware"]
    assert [check.exit_code for check in gates] == [10]


def test_stores_are_found_matching_or_not(run: Path) -> None:
    build_all(load_config(run, overrides=["latent.encoder=none"]), watcher=Watcher())
    lines = [check for check in check_config(run, STATES_OF_FIELDS).checks if check.group == "field stores"]
    assert [check.mark for check in lines] == ["ok"] * 3
    assert all("matches" in check.text and check.facts["hash"][:12] in check.text for check in lines)
    changed = check_config(run, [*STATES_OF_FIELDS, "data.split_fractions=[0.7,0.2,0.1]"])
    lines = [check for check in changed.checks if check.group == "field stores"]
    assert all("doesn't match, rebuild" in check.text for check in lines if check.mark == "warning")
    assert "warning" in {check.mark for check in lines}


def test_data_are_checked_without_torch(run: Path) -> None:
    code = (
        "import sys\nfrom ups.cli import main\n"
        "try: main('validate', 'data')\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, str(run), "operator.state=fields", "reading.num_workers=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "False"), done.stdout + done.stderr


def test_what_is_wrong_is_left_out_and_the_rest_is_read(run: Path) -> None:
    loaded = load_leniently(
        run, overrides=["data.tasks=burgers", "latent.dim=-1", "operator.pdet.input_dim=7"]
    )
    assert loaded.config is not None
    assert set(loaded.left_out) == {"data.tasks", "latent.dim"}
    assert len(loaded.problems) == 2  # input_dim is compared with a latent.dim that stands for a wrong one
