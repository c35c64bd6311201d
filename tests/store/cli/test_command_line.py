"""What every verb has: -h, -q, -v, "did you mean", earlier flags, completion; and `ups-store build`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from build_helpers import write_burgers
from command_line import run_ups, run_ups_store

from ups.cli.app import app as ups_app
from ups_store.building.command import BuildVerb
from ups_store.cli.app import app as store_app
from ups_store.command_line import Verb, make_single
from ups_store.console import is_quiet
from ups_store.old_names import FLAGS

COMMANDS = {"ups": run_ups, "ups-store": run_ups_store}
VERBS = [
    (name, verb)
    for name, app in (("ups", ups_app), ("ups-store", store_app))
    for verb in typer.main.get_command(app).commands  # type: ignore[attr-defined]
]


@pytest.mark.parametrize(("command", "verb"), VERBS)
def test_every_verb_explains_itself_and_has_the_common_options(command: str, verb: str) -> None:
    done = COMMANDS[command](verb, "-h")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: {command} {verb} ")
    assert all(flag in done.stdout for flag in ("-q, --quiet", "-v, --verbose", "-h, --help"))


@pytest.mark.parametrize("command", COMMANDS)
def test_misspelled_verbs_and_options_name_the_nearest(command: str) -> None:
    verb, near = {"ups": ("trian", "train"), "ups-store": ("verfy", "verify")}[command]
    done = COMMANDS[command](verb)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"Did you mean '{near}'?" in done.stderr
    verb, flag, near = {"ups": ("train", "--epoch", "--epochs"), "ups-store": ("build", "--tsks", "--tasks")}[
        command
    ]
    done = COMMANDS[command](verb, flag, "1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"No such option: {flag}" in done.stderr
    assert near in done.stderr.partition(flag)[2]


def test_value_that_is_no_choice_is_said_without_the_library_that_found_it() -> None:
    done = run_ups_store("pack", "a.zarr.zip", "out", "--codec", "bloc")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Invalid value for '--codec': 'bloc' is not one of 'blosc'" in done.stderr


def test_quiet_leaves_warnings_and_errors_before_and_behind_the_verb(tmp_path: Path) -> None:
    write_burgers(tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5")
    words = ("--tasks", "burgers1d", "--root", tmp_path, "--cache-dir", tmp_path / "c", "--dry-run")
    words = (*words, "--manifest", "m.json")  # which warns
    loud = run_ups_store("build", *words)
    assert "building burgers1d" in loud.stderr
    for quiet in (run_ups_store("build", *words, "-q"), run_ups_store("--quiet", "build", *words)):
        assert quiet.exit_code == 0
        assert quiet.stdout == loud.stdout
        assert quiet.stderr.splitlines() == ["warning: --manifest has no effect: --dry-run writes nothing"]
    failed = run_ups_store("-q", "build", "--tasks", "burgers1d", "--root", tmp_path / "none")
    assert failed.stderr.startswith("error: ")
    assert run_ups_store("info", tmp_path / "none").exit_code
    assert not is_quiet()  # of the next command in this process


def test_earlier_flags_mean_what_they_meant() -> None:
    given: dict[str, object] = {}

    def verb(
        tasks: Annotated[list[str], typer.Option()],
        split: str = "",
        latent_tokens: int = 0,
        horizon: int = 0,
    ) -> None:
        given.update(tasks=tasks, split=split, latent_tokens=latent_tokens, horizon=horizon)

    app = make_single(verb, cls=BuildVerb)
    app(["--task", "a", "b", "--splits=train", "--latent-len", "4", "--steps", "3"], standalone_mode=False)
    assert given == {"tasks": ["a", "b"], "split": "train", "latent_tokens": 4, "horizon": 3}
    assert len(FLAGS) == 4


def test_verb_that_has_a_flag_of_an_earlier_name_keeps_it() -> None:
    given: list[str] = []

    def verb(task: str = "", tasks: str = "") -> None:
        given.extend([task, tasks])

    make_single(verb, cls=Verb)(["--task", "a"], standalone_mode=False)
    assert given == ["a", ""]


def test_build_is_the_same_as_a_first_word_and_behind_an_option(tmp_path: Path) -> None:
    """The first begins its readers before typer is imported."""
    write_burgers(tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5")
    words = ["--tasks", "burgers1d", "--root", str(tmp_path), "--split", "test", "--json"]
    call = [sys.executable, "-m", "ups_store", "build", *words, "--cache-dir", str(tmp_path / "first")]
    subprocess.run(call, capture_output=True, timeout=100, check=True)
    behind = run_ups_store("-v", "build", *words, "--num-workers", "0", "--cache-dir", tmp_path / "behind")
    assert behind.exit_code == 0
    stores = {path.read_bytes() for path in tmp_path.glob("*/burgers1d_test.zarr.zip")}
    assert (len(stores), len(list(tmp_path.glob("*/*.zip")))) == (1, 2)


@pytest.mark.parametrize(
    ("command", "typed", "offered"),
    [
        ("ups", "ups train --config de", {"demo"}),
        ("ups-store", "ups-store build --config de", {"demo"}),
        ("ups-store", "ups-store bu", {"build"}),
    ],
)
def test_completion_offers_verbs_options_and_values(command: str, typed: str, offered: set[str]) -> None:
    module = command.replace("-", "_")
    variables = {
        f"_{module.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    code = (
        f"import atexit, sys; sys.argv = [{command!r}]\n"
        "atexit.register(lambda: print(*{'torch'} & set(sys.modules)))\n"  # a shell doesn't wait for it
        f"from {module}.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert {line.split(",")[-1] for line in done.stdout.split()} == offered, done.stderr
