from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from build_helpers import BURGERS, Recorder, build, interrupt_after, plan, settings, start, write_burgers
from forked import Forked
from pdebench_files import write_advection

import ups_store
from ups_store.building import command, read, stores
from ups_store.building.command import app
from ups_store.check.statistics import Statistics
from ups_store.console import run
from ups_store.errors import ConfigError
from ups_store.sources import digest as digests
from ups_store.system import files

NAME = "burgers1d_train.zarr.zip"


@dataclass(frozen=True)
class Outcome:
    """What a run of the command left behind; `err` without the line that says what is begun."""

    code: int
    out: str
    err: str


Invoke = Callable[..., Outcome]


def without_first_line(err: str) -> str:
    """What follows the line that says what is begun, if that was reached."""
    return err.partition("\n")[2] if err.startswith("building ") else err


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """The command with its words, in this process; sources and stores lie in the test's folder."""
    monkeypatch.delenv("PDEBENCH_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(words: str = "", *more: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["build", *words.split(), *more])
        with pytest.raises(SystemExit) as ended:
            run(command.main)
        shown = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), shown.out, without_first_line(shown.err))

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_burgers(tmp_path / "source" / BURGERS)


# --- what it prints -----------------------------------------------------------------------------------


def test_build_prints_a_line_a_store_to_stdout_and_nothing_else(invoke: Invoke, source: Path) -> None:
    outcome = invoke("--tasks burgers1d --root source")
    lines = outcome.out.splitlines()
    assert (outcome.code, outcome.err, len(lines)) == (0, "", 3)
    assert lines[0].startswith("burgers1d train: 16 samples, ")
    assert lines[2].endswith(", cache/burgers1d_test.zarr.zip")
    again = invoke("--tasks burgers1d --root source").out.splitlines()
    assert all("valid, written just now" in line for line in again)


def test_json_is_one_document_on_stdout_and_notes_go_to_stderr(invoke: Invoke, tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=5)
    outcome = invoke("--tasks burgers1d --root source --json --manifest new/manifest.json")
    document = json.loads(outcome.out)
    assert outcome.code == 0
    assert [store["path"] for store in document["stores"]] == [f"cache/{NAME}"]
    assert outcome.err.count("skipped burgers1d ") == 2
    assert json.loads((tmp_path / "new/manifest.json").read_text()) == document


def test_dry_run_says_what_would_become_of_every_store_and_writes_nothing(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    outcome = invoke("--tasks burgers1d --root source --dry-run --json")
    assert (outcome.code, outcome.err) == (0, "")
    planned = json.loads(outcome.out)
    assert [(store["num_samples"], store["action"]) for store in planned] == [
        (16, "build"),
        (2, "build"),
        (2, "build"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    invoke("--tasks burgers1d --root source --splits train")
    lines = invoke("--tasks burgers1d --root source --dry-run").out.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["reuse", "build", "build"]


def test_dry_run_ends_with_1_where_the_build_would_refuse(invoke: Invoke, source: Path) -> None:
    Path(f"cache/{NAME}").mkdir(parents=True)
    outcome = invoke("--tasks burgers1d --root source --splits train --dry-run")
    assert outcome.code == 1
    assert ": refuse: there is a folder in the store's place; check cache.dir, " in outcome.out
    assert outcome.err == ""


def test_rank_that_only_helps_leaves_results_to_the_builder(
    invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--tasks burgers1d --root source --splits train"
    built = invoke(words)
    assert built.out.count("\n") == 1
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for flags in ("", "--json", "--dry-run", "--dry-run --json"):
        assert (invoke(f"{words} {flags}").out, flags) == ("", flags)
    told = invoke(f"{words} --json -v")
    assert told.out == ""
    assert told.err.endswith(f"cache/{NAME}: rank 1 committed 0 samples\n")


def test_overwrite_and_rehash_reach_the_dry_run(
    invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("--tasks burgers1d --root source --splits train")
    words = "--tasks burgers1d --root source --splits train --dry-run --num-workers 0"
    assert ": rebuild: --overwrite, " in invoke(f"{words} --overwrite").out
    digested = []
    full = digests.full_digest
    monkeypatch.setattr(digests, "full_digest", lambda *args: digested.append(args) or full(*args))
    invoke(words)
    assert digested == []
    invoke(f"{words} --rehash")
    assert len(digested) == 1


def test_manifest_of_a_dry_run_is_warned_about(invoke: Invoke, source: Path) -> None:
    outcome = invoke("--tasks burgers1d --root source --dry-run --manifest m.json")
    assert outcome.code == 0
    assert outcome.err == "warning: --manifest has no effect: --dry-run writes nothing\n"
    assert not Path("m.json").exists()


def test_help_names_every_flag(invoke: Invoke) -> None:
    outcome = invoke("--help")
    assert (outcome.code, outcome.err) == (0, "")
    flags = (
        "config tasks split root cache-dir cache-dtype split-fractions limit on-nan source-digest rehash "
        "num-workers parallel batch-size pin-memory device timeout open-timeout retries on-error "
        "stall-warning log-json "
    )
    for flag in f"{flags} overwrite manifest json dry-run verbose quiet".split():
        assert f"--{flag}" in re.split(r"[\s,]+", outcome.out)


def test_module_that_is_only_imported_builds_nothing() -> None:
    assert importlib.import_module("ups_store.building.__main__").main is not command.main


# --- flags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tasks a", (["a"], [], [])),
        ("--tasks=a b", (["a", "b"], [], [])),
        ("--tasks a b --root r --split x y k=v", (["a", "b"], ["x", "y"], ["k=v"])),
        ("k=v --tasks a", (["a"], [], ["k=v"])),
        ("--root r word", ([], [], ["word"])),
    ],
)
def test_words_after_a_list_flag_belong_to_it(words: str, expected: tuple[list[str], ...]) -> None:
    given = typer.main.get_command(app).make_context("build", words.split()).params
    assert tuple(list(given[name] or []) for name in ("tasks", "split", "overrides")) == expected


@pytest.mark.parametrize("words", ["--tasks", "--tasks --root r", "--root r --split", "--split k=v"])
def test_list_flag_without_a_name_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="expected at least one name"):
        typer.main.get_command(app).make_context("build", words.split())


@pytest.mark.parametrize(
    "tasks",
    [
        "burgers1d advection1d",
        "burgers1d,advection1d",
        "burgers1d --tasks advection1d",
        "burgers1d,advection1d burgers1d",
    ],
)
def test_several_tasks_are_built_however_they_are_given(
    tasks: str, invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    write_advection(tmp_path / "source" / "1D_Advection_Sols_beta0.4.hdf5")
    outcome = invoke(f"--root source --splits train --tasks {tasks} --json")
    assert [store["task"] for store in json.loads(outcome.out)["stores"]] == ["burgers1d", "advection1d"]


def test_flags_file_and_overrides_reach_the_build(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    (tmp_path / "build.yaml").write_text("data: {task: burgers1d, root: nowhere, reduce_space: 5}\n")
    outcome = invoke(
        "--config build.yaml --root source --cache-dir c --cache-dtype float16 --splits train valid "
        "--limit 3 --split-fractions 0.5,0.25,0.25 --on-nan keep --source-digest sampled "
        "data.reduce_time=3 --json"
    )
    document = json.loads(outcome.out)
    assert [store["num_samples"] for store in document["stores"]] == [3, 3]
    with ups_store.open(tmp_path / "c/burgers1d_val.zarr.zip") as store:
        assert (store["fields"].shape, store["fields"].dtype.name) == ((3, 3, 2, 1), "float16")
        assert store.identity["source_digest"] == "sampled"
        assert store.identity["split_fractions"] == [0.5, 0.25, 0.25]


def test_overwrite_and_rehash_reach_the_build(
    invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    build_all = stores.build_all

    def spy(*args, overwrite: bool, rehash: bool, **rest):
        seen.append((overwrite, rehash))
        return build_all(*args, overwrite=overwrite, rehash=rehash, **rest)

    monkeypatch.setattr(stores, "build_all", spy)
    for words in ("", "--overwrite", "--rehash"):
        assert invoke(f"--tasks burgers1d --root source --splits test {words}").code == 0
    assert seen == [(False, False), (True, False), (False, True)]


# --- exit codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "error: missing key: expected data.tasks"),
        ("--tasks", "error: --tasks: expected at least one name"),
        ("--tasks burger", "did you mean 'burgers1d'?"),
        ("--tasks burgers1d --splits dev", "error: unknown split"),
        ("--tasks burgers1d --limit 0", "error: data.limit: expected greater than or equal to 1, found 0"),
        ("--tasks burgers1d --limit few", "Invalid value for '--limit'"),
        ("--tasks burgers1d --on-nan ignore", "Invalid value for '--on-nan'"),
        ("--tasks burgers1d --split-fractions a,b,c", "error: --split-fractions: expected three numbers"),
        (
            "--tasks burgers1d --split-fractions 0.5,0.5",
            "error: data.split_fractions.2: expected one more value",
        ),
        ("--tasks burgers1d data.reduce_spce=2", "did you mean data.reduce_space?"),
        ("--tasks burgers1d train", "error: unknown task"),
        ("--root source train", "error: override: expected key=value, found 'train'"),
        ("--nonsense", "No such option: --nonsense"),
        ("--config gone.yaml", "error: gone.yaml: can't be read (No such file or directory)"),
        (
            "--tasks burgers1d --root source --cache-dir source/file",
            "error: source/file: can't make the folder",
        ),
        ("--tasks burgers1d --root source --manifest source", "error: source: it isn't a manifest"),
        (
            "--tasks burgers1d --root source --manifest source/own.json",
            "error: source/own.json: it isn't a manifest",
        ),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why_on_stderr(
    words: str, message: str, invoke: Invoke, source: Path
) -> None:
    source.with_name("file").touch()
    source.with_name("own.json").write_text('{"precious": 1}')
    outcome = invoke(words)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_ctrl_c_before_the_first_sample_exits_with_5(
    invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(digests, "full_digest", press)
    outcome = invoke("--tasks burgers1d --root source --num-workers 0")
    assert (outcome.code, outcome.out) == (5, "")
    assert outcome.err == "error: interrupted; run the same command again to continue\n"


def test_unreadable_source_exits_with_3(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("--tasks burgers1d --root nowhere")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == "error: nowhere: no such folder; check data.root or PDEBENCH_ROOT\n"
    assert invoke("--tasks burgers1d").code == 3


def test_full_disk_exits_with_6(invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "allocate", refuse)
    outcome = invoke("--tasks burgers1d --root source")
    assert (outcome.code, outcome.out) == (6, "")
    assert "no space left on device" in outcome.err


def test_unfinished_store_of_something_else_exits_with_7(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ups_store.BuildInterruptedError):
        build(settings(tmp_path, split="train"), interrupt_after(16))
    outcome = invoke("--tasks burgers1d --root source --splits train data.reduce_time=2")
    assert (outcome.code, outcome.out) == (7, "")
    assert "content.reduce_time: 1 -> 2" in outcome.err
    assert "--overwrite" in outcome.err
    assert invoke("--tasks burgers1d --root source --splits train data.reduce_time=2 --overwrite").code == 0


def test_locked_store_exits_with_8_and_names_the_process(
    invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    planned = plan(settings(tmp_path, split="train"))
    planned.path.parent.mkdir()
    with ups_store.create(
        planned.path, planned.arrays, constants=planned.constants, dims=planned.dims, identity={}
    ):
        outcome = invoke("--tasks burgers1d --root source --splits train")
    assert (outcome.code, outcome.out) == (8, "")
    assert f"pid {os.getpid()}" in outcome.err


def test_file_that_is_no_store_exits_with_1(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / NAME).write_bytes(b"notes")
    outcome = invoke("--tasks burgers1d --root source --splits train")
    assert (outcome.code, outcome.out) == (1, "")
    assert "--overwrite" in outcome.err


def test_traceback_is_shown_only_when_asked_for(invoke: Invoke) -> None:
    assert "Traceback" not in invoke("--tasks burgers1d --root nowhere -v").err
    assert "Traceback" in invoke("--tasks burgers1d --root nowhere -vv").err


# --- other processes ----------------------------------------------------------------------------------

BUILD = [sys.executable, "-m", "ups_store.build"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=lambda signum: signum.name)
def test_build_that_is_stopped_continues_to_the_same_bytes(
    signum: signal.Signals, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample a commit; after the fifth the command says so and waits to be disturbed."""
    words = ["--tasks", "burgers1d", "--splits", "train", "--root", str(source.parent)]
    add, num = Statistics.add, itertools.count(1)

    def add_and_wait(statistics: Statistics, arrays: Any, **options: Any) -> None:
        add(statistics, arrays, **options)
        if next(num) == 5:
            print("five", flush=True)
            time.sleep(60)

    with monkeypatch.context() as patched:
        patched.setattr(read, "BATCH_BYTES", 1)
        patched.setattr(Statistics, "add", add_and_wait)
        process = Forked(lambda: run(lambda: command.main(words)), tmp_path, {})
    while not process.written(1):
        time.sleep(0.01)
    os.kill(process.pid, signum)
    out, err = process.communicate(timeout=60)
    unfinished = f"cache/{NAME}.building"
    assert not (tmp_path / "cache" / NAME).exists()
    interrupted = f"error: {unfinished}: interrupted: 5 of 16 samples are committed; "
    interrupted += "run the same command again to continue\n"
    code, message = (5, interrupted) if signum == signal.SIGINT else (-signal.SIGKILL, "")
    assert (process.returncode, out, without_first_line(err)) == (code, "five\n", message)
    watcher = Recorder()
    (result,) = build(settings(tmp_path, split="train"), watcher).stores
    assert result.num_committed == 11
    assert watcher.notes == [f"{result.path}: 5 of 16 samples are there, continuing"]
    (other,) = build(settings(tmp_path, split="train", cache_dir=str(tmp_path / "undisturbed"))).stores
    assert result.path.read_bytes() == other.path.read_bytes()


@pytest.mark.multi_process
def test_help_imports_no_hdf5_and_build_and_reuse_no_torch_and_nothing_else_that_is_slow(
    source: Path, tmp_path: Path
) -> None:
    code = """
import contextlib, sys
from ups_store.building.command import main
assert "h5py" not in sys.modules
for _ in range(2):
    with contextlib.suppress(SystemExit):
        main()
print(sorted({"torch", "ups", "zarr", "scipy", "matplotlib"} & set(sys.modules)))
"""
    flags = ["--tasks", "burgers1d", "--root", source.parent, "--cache-dir", tmp_path / "cache"]
    with start(code, *flags) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (out.count("built in"), out.count("valid, written"), out.splitlines()[-1]) == (3, 3, "[]")


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("redirection", "code"),
    [
        ("<&- >&- 2>&-", 0),
        ("--root nowhere >/dev/full 2>/dev/full", 3),
        pytest.param(">/dev/full", 6, marks=pytest.mark.slow),  # and in tests of the console
        pytest.param("| true; exit ${PIPESTATUS[0]}", 1, marks=pytest.mark.slow),
    ],
)
def test_closed_or_full_streams_end_quietly(
    redirection: str, code: int, source: Path, tmp_path: Path
) -> None:
    command_line = f'"$@" {redirection}'
    flags = ["--tasks", "burgers1d", "--root", source.parent, "--cache-dir", tmp_path / "cache"]
    ended = subprocess.run(
        ["bash", "-c", command_line, "bash", *BUILD, *flags], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
    if code != 3:
        assert (tmp_path / "cache" / NAME).exists()


@pytest.mark.multi_process
def test_path_that_the_terminal_can_not_show_is_escaped(source: Path, tmp_path: Path) -> None:
    cache = os.fsencode(tmp_path) + b"/c\xc3\xbc\xff"
    flags = ["--tasks", "burgers1d", "--splits", "train", "--root", source.parent, "--cache-dir", cache]
    ended = subprocess.run(
        [*BUILD, *flags], capture_output=True, timeout=60, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (ended.returncode, without_first_line(ended.stderr.decode("ascii"))) == (0, "")
    assert rb"c\xfc\udcff/burgers1d_train.zarr.zip" in ended.stdout
