"""`ups VERB`: what is light, what mistakes say, how it ends, and the scripts that do the same."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import run_ups

from ups.cli import app as application
from ups.cli.common import note, parse_numbers
from ups.cli.train import ALL
from ups.config import load_config
from ups.errors import ConfigError, InterruptedTrainingError
from ups.train.stage import ALL as ALL_STAGES
from ups_store.building.config_file import shipped_configs
from ups_store.console import set_quiet
from ups_store.errors import (
    CorruptChunkError,
    DiskFullError,
    ReadTimeoutError,
    SourceError,
    StoreNotFoundError,
    TruncatedError,
)

REPO = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "h5py", "scipy", "matplotlib", "zarr")


def in_a_process(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """`ups` in a process of its own, which names the heavy packages that it imported on the last line."""
    code = (
        "import sys\n"
        "from ups.cli import main\n"
        "try: main()\n"
        f"finally: print(sorted({set(HEAVY)} & set(sys.modules)), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=options.get("cwd"))  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["train", "data.tsks=burgers1d"], 2),
        (["validate", "config", "nowhere.yaml"], 2),
        (["evaluate", "--phase", "data"], 2),
        (["run", "demo", "--dry-run"], 0),
        (["leaderboard", "."], 2),
        (["status", "."], 2),
        (["lineage", "none.json"], 2),
    ],
)
def test_help_lists_and_mistakes_do_not_wait_for_torch(words: list[str], code: int, tmp_path: Path) -> None:
    done = in_a_process(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


# --- mistakes and ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("--split", expected="train"), 2, "error: --split: expected train"),
        (SourceError("no such source", path="a.hdf5"), 3, "a.hdf5"),
        (StoreNotFoundError("no such file", path="a.zarr.zip"), 3, "a.zarr.zip"),
        (TruncatedError("ends early", path="a.zarr.zip"), 3, "ends early"),
        (CorruptChunkError("other bytes", path="a.zarr.zip"), 3, "other bytes"),
        (ReadTimeoutError("too slow", path="a.hdf5"), 4, "too slow"),
        (InterruptedTrainingError("stopped"), 5, "stopped"),
        (KeyboardInterrupt(), 5, "interrupted; run the same command again"),
        (DiskFullError("no space left on device"), 6, "no space left"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out"), 6, "out: no space left"),
        (ZeroDivisionError("odd"), 1, "in fail: ZeroDivisionError: odd; -vv shows the traceback"),
    ],
)
def test_errors_end_a_verb_with_one_sentence_and_their_code(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("ups.cli.evaluate.check_writable", fail)
    done = run_ups("evaluate", "--out", tmp_path)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (code, "", 1)
    assert says in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["train"],
        ["train", "--config", "nowhere.yaml"],
        ["train", "--config", "folder"],
        ["train", "--config", "demo", "--stage", "operator", "--epochs", "-1"],
        ["train", "--config", "demo", "--stage", "operatr"],
        ["train", "--config", "demo", "training.lr=fast"],
        ["train", "--config", "demo", "training.lrr=1"],
        ["train", "--config", "demo", "nonsense"],
        ["train", "--config", "demo", "data.task=x", "data.tasks=y"],
        ["train-baselines", "--config", "demo"],
        ["train-baselines", "--config", "demo", "--budget-seconds", "-1"],
        ["train-baselines", "--config", "demo", "--budget-seconds", "1", "--kind", "fnoo"],
        ["evaluate"],
        ["evaluate", "--config", "folder"],
        ["evaluate", "--config", "demo", "--phase", "x"],
        ["compare"],
        ["compare", "--config", "demo", "--kind", "resnet"],
        ["predict", "folder", "--checkpoint", "none", "--out", "out.zarr.zip", "--parameter", "nu"],
        ["make-data", "burger1d", "--out", "data"],
        ["make-data", "burgers1d", "--out", "data", "--samples", "0"],
        ["make-data", "burgers1d", "--out", "data", "--beta", "1"],
        ["configs", "show", "dmo"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_message_and_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    done = run_ups(*words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "warning:" not in line]
    assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["evaluate", "--config", "demo"], 1),  # its operator isn't there
        (["evaluate", "--checkpoint", "folder"], 1),
        (["evaluate", "--checkpoint", "text"], 1),
        (["predict", "none.zarr.zip", "--checkpoint", "none", "--out", "out.zarr.zip"], 1),
        (["train", "--config", "demo"], 3),  # its data aren't there
        (["train", "--config", "demo", "--stage", "operator", "training.cache_mode=store"], 1),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else str(words),
)
def test_missing_files_are_one_sentence(
    words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no checkpoint")
    done = run_ups(*words)
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert "unexpected" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_closed_pipe_ends_without_a_traceback() -> None:
    command = f"{sys.executable} -m ups configs | head -1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=REPO, check=True
    )
    assert done.stdout.startswith("demo ")
    assert done.stderr == ""


def test_ranks_but_the_first_name_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    note("warning: odd")
    note("begun")
    done = run_ups("train", "data.tsks=burgers1d")
    assert capsys.readouterr().err == "warning: rank 1: odd\nrank 1: begun\n"
    assert done.stderr.startswith("rank 1: error: ")
    assert done.exit_code == 2


def test_quiet_leaves_warnings_and_the_end_of_what_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    set_quiet(True)
    try:
        note("warning: odd")
        note("begun")
        note("interrupted", is_last=True)
    finally:
        run_ups("--version")  # a command that isn't quiet
    assert capsys.readouterr().err == "warning: odd\ninterrupted\n"


def test_numbers_by_name_are_parsed_or_refused_with_their_flag() -> None:
    assert parse_numbers("--phase", ["a=1.5", "b=c=2"]) == {"a": 1.5, "b=c": 2.0}
    for wrong in ("a", "a=", "=1", "a=b"):
        with pytest.raises(ConfigError, match="--phase: expected name=number"):
            parse_numbers("--phase", [wrong])


# --- train -------------------------------------------------------------------------------------------------


def resolved(*words: str) -> dict[str, object]:
    done = run_ups("train", "--config", "demo", "--print-config", *words)
    assert done.exit_code == 0, done.output
    return yaml.safe_load(done.stdout)["stages"]  # type: ignore[no-any-return]


def test_epochs_without_a_stage_are_those_of_every_stage_that_is_trained() -> None:
    def epochs(*words: str) -> dict[str, int]:
        return {name: stage["epochs"] for name, stage in resolved(*words).items()}  # type: ignore[index]

    assert epochs("--epochs", "3") == {"autoencoder": 3, "operator": 3}
    assert epochs("--epochs", "3", "--stage", "operator") == {"autoencoder": 4, "operator": 3}
    assert epochs("--epochs", "3", "stages.autoencoder.epochs=0") == {"autoencoder": 0, "operator": 3}
    joint = epochs("--epochs", "3", "stages.joint.epochs=1", "training.use_inverse_losses=true")
    assert joint == {"autoencoder": 4, "operator": 3, "joint": 3}


def test_all_stages_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("ups.cli.train._train", lambda stage, *args, **options: asked.append(stage) or {})
    monkeypatch.setattr("ups.train.log.show_report", lambda report, console: None)
    assert run_ups("train", "--config", "demo").exit_code == 0
    assert asked == [ALL] == [ALL_STAGES]


# --- configs -----------------------------------------------------------------------------------------------


def test_configs_are_listed_with_a_line_each_and_shown_as_they_are() -> None:
    listed = run_ups("configs").stdout.splitlines()
    others = [name for name in shipped_configs() if name != "demo"]
    assert [line.split()[0] for line in listed] == ["demo", *others]
    assert all(len(line.split()) > 3 for line in listed)
    assert json.loads(run_ups("configs", "--json").stdout)["demo"].startswith("The demo: Burgers' equation")
    shown = run_ups("configs", "show", "demo")
    assert shown.stdout == shipped_configs()["demo"].read_text()
    assert "did you mean demo?" in run_ups("configs", "show", "dmo").stderr


def test_every_shipped_run_is_found_and_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in shipped_configs():
        assert load_config(name).data.tasks


# --- scripts -----------------------------------------------------------------------------------------------

SCRIPTS = {
    path.stem: path
    for path in sorted((REPO / "scripts").glob("*.py"))
    if path.stem not in ("precompute_latent_cache", "vast_launch")
}


def test_scripts_are_all_verbs() -> None:
    verbs = {command.name for command in application.app.registered_commands}
    groups = {group.name: group.typer_instance for group in application.app.registered_groups}
    verbs |= {f"validate-{command.name}" for command in groups["validate"].registered_commands}
    renamed = {"run_fast_to_sota": "run"}
    assert {renamed.get(name, name.replace("_", "-")) for name in SCRIPTS} == verbs


@pytest.mark.parametrize(
    ("name", "verb"),
    [("train", "train"), ("validate_config", "validate config")],
)
def test_scripts_do_as_their_verbs(name: str, verb: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, SCRIPTS[name], "-h"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(f"Usage: ups {verb} ")
    assert (done.returncode, done.stderr) == (0, "")


def test_several_seeds_under_torchrun_are_one_command_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run_ups("train", "--config", "demo", "--seeds", "4,5")
    assert done.exit_code == 2
    assert "expected one seed, found 4, 5; one command for each: --seeds 4, then --seeds 5" in done.stderr
