"""Ctrl-C while a command still imports ends it with exit code 5 and one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from build_helpers import BURGERS

import ups_store
from ups_store.console import run
from ups_store.system.interrupt import importing

# Presses Ctrl-C when a module begins to be imported, then runs the command as `python -m` would.
PRESS = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), getattr(signal, signal_name))

signal.signal(signal.SIGINT, signal.default_int_handler)
wanted, module, signal_name = sys.argv[1:4]
sys.meta_path.insert(0, Finder())
sys.argv = [module, *sys.argv[4:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
LINE = "error: interrupted; run the same command again\n"


def press(module: str, *command: str, signal_name: str = "SIGINT") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRESS, module, command[0], signal_name, *command[1:]],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.multi_process
def test_ctrl_c_while_the_build_is_imported_is_one_line_and_5() -> None:
    done = press("ups_store.building.config", "ups_store.build", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (5, "", LINE)


@pytest.mark.multi_process
def test_sigterm_while_the_build_imports_what_it_takes_is_one_line_and_5(tmp_path: Path) -> None:
    (tmp_path / BURGERS).touch()
    command = ("ups_store.build", "--tasks", "burgers1d", "--root", str(tmp_path))
    done = press("ups_store.building.stores", *command, signal_name="SIGTERM")
    begun, _, message = done.stderr.partition("\n")
    assert begun.startswith("building burgers1d")
    assert (done.returncode, done.stdout) == (5, "")
    assert message in (LINE, LINE.replace("again", "again to continue"))


@pytest.mark.multi_process
@pytest.mark.parametrize("module", ["typer", "ups_store.cli.check"])
def test_ctrl_c_while_the_verbs_are_imported_is_one_line_and_5(module: str) -> None:
    done = press(module, "ups_store", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (5, "", LINE)


def test_little_is_imported_before_the_handler_is_there() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import ups_store.cli, ups_store.building.__main__\n"
    code += "print(sorted({'typing', 'typer', 'numpy', 'pathlib', 'logging'} & set(sys.modules)))"
    root = Path(ups_store.__file__).parents[1]
    command = [sys.executable, "-I", "-S", "-c", code, str(root)]
    assert subprocess.check_output(command, text=True) == "[]\n"


def test_sigterm_while_a_program_runs_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert (ended.value.code, capsys.readouterr().err) == (5, LINE)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ignored_sigterm_stays_ignored_while_a_program_runs() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 0


def test_missing_extra_is_one_line_and_2_and_other_errors_of_imports_pass(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended, importing():
        raise ups_store.MissingExtraError("no obstore")
    assert ended.value.code == 2
    assert capfd.readouterr().err == "error: no obstore\n"
    with pytest.raises(ImportError, match="no such name"), importing():
        raise ImportError("no such name")


def test_signal_that_other_code_handles_stays_its(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with importing():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
