from __future__ import annotations

import errno
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import typer
from rich.console import Console

from ups_store import console
from ups_store.console import (
    exit_code_of,
    format_age,
    format_nbytes,
    interruptible,
    log,
    message_of,
    print_json,
    run,
)
from ups_store.errors import (
    BuildInterruptedError,
    IdentityMismatchError,
    ReadTimeoutError,
    SourceError,
)

Capture = pytest.CaptureFixture[str]


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def main() -> NoReturn:
        raise error

    return main


def code_of(main: Callable[[], int | None], *, verbosity: int = 0) -> int:
    with pytest.raises(SystemExit) as ended:
        run(main, verbosity=verbosity)
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_verbosity", 0)


# --- ends of a program --------------------------------------------------------------------------------

ENDS = [
    (SourceError("no such file", path="a [b].h5"), 3, "a [b].h5: no such file"),
    (ReadTimeoutError("too slow"), 4, "too slow"),
    (IdentityMismatchError("other"), 7, "other"),
    (KeyboardInterrupt(), 5, "interrupted; run the same command again"),
    (typer.Abort(), 5, "interrupted; run the same command again"),
    (OSError(errno.ENOSPC, "No space left on device"), 6, "no space left on device"),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "/a/b"), 6, "/a/b: disk quota exceeded"),
    (PermissionError(errno.EACCES, "Permission denied", "/a/b"), 1, "/a/b: permission denied"),
    (OSError("odd"), 1, "odd"),
    (
        OSError(errno.EMFILE, "Too many open files", "/a"),
        1,
        "/a: too many open files; raise the limit with `ulimit -n`",
    ),
    (MemoryError(), 1, "out of memory"),
    (typer.BadParameter("bad"), 2, "Invalid value: bad"),
]


def test_unexpected_errors_are_to_be_reported_and_those_of_others_code_name_its_line(capsys: Capture) -> None:
    assert message_of(KeyError("u")) == "unexpected KeyError: 'u'; run it with -vv and report what it prints"
    assert code_of(raising(KeyError("u"))) == 1
    said = r"test_console\.py:\d+, in main: KeyError: 'u'; -vv shows the traceback"
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(("error", "code", "message"), ENDS, ids=lambda value: type(value).__name__)
def test_every_error_has_its_exit_code_and_is_one_sentence_on_stderr(
    error: BaseException, code: int, message: str, capsys: Capture
) -> None:
    assert exit_code_of(error) == code
    assert code_of(raising(error)) == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err.lower()) == ("", f"error: {message}\n".lower())


@pytest.mark.parametrize(("value", "code"), [(None, 0), (0, 0), (1, 1), (130, 5)])
@pytest.mark.parametrize("leave", [False, True], ids=["returns", "exits"])
def test_exit_code_is_what_the_program_says(value: int | None, code: int, leave: bool) -> None:
    assert code_of(raising(SystemExit(value)) if leave else lambda: value) == code


def test_verbosity_of_two_shows_the_traceback(capsys: Capture) -> None:
    assert code_of(raising(ValueError("odd")), verbosity=2) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_closed_pipe_ends_quietly_with_1(capsys: Capture) -> None:
    assert code_of(raising(BrokenPipeError())) == 1
    assert capsys.readouterr().err == ""


def test_stderr_that_takes_nothing_does_not_change_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    monkeypatch.setattr(console, "console", Console(stderr=True))  # keeps what it can't write
    assert code_of(raising(SourceError("unreadable"))) == 3


def test_closed_streams_are_opened_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    try:
        assert code_of(lambda: print("lost")) == 0
        assert sys.stdin.read() == ""
        assert sys.stderr.write("lost") == 4
    finally:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()


def test_text_that_stdout_can_not_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert code_of(lambda: print("c\u00fc\udcff")) == 0
    assert raw.getvalue() == b"c\\xfc\\udcff\n"


# --- being stopped ------------------------------------------------------------------------------------


def test_sigterm_is_treated_like_ctrl_c_and_only_inside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(BuildInterruptedError, match="interrupted; come back") as caught,
        interruptible("come back"),
    ):
        signal.raise_signal(signal.SIGTERM)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_in_a_finaliser_still_interrupts(capsys: Capture) -> None:
    class Interrupted:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def program() -> int:
        Interrupted()
        for _ in range(200):  # the interrupt comes between two steps of Python, not amid a system call
            time.sleep(0.1)
        return 0

    assert code_of(program) == 5
    assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_in_a_finaliser_interrupts_nobody_after_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    class LateTimer(threading.Timer):
        """Lets the program end first, however busy the machine is."""

        def __init__(self, interval: float, function: Callable[[], None]) -> None:
            super().__init__(0.5, function)

    monkeypatch.setattr(threading, "Timer", LateTimer)
    try:
        with console._interruptible_anywhere():
            Interrupted()
        time.sleep(1)
    except KeyboardInterrupt:
        pytest.fail("the program was over, and who called it was interrupted")


def test_signal_while_python_ends_changes_nothing() -> None:
    program = """
import atexit, time
from ups_store.console import run
atexit.register(time.sleep, 0.2)
atexit.register(print, "ending", flush=True)
run(lambda: 0)
"""
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_ctrl_c_that_left_an_exec_and_was_caught_does_not_end_python(tmp_path: Path) -> None:
    """As in an import that makes a dataclass."""
    program = """
from ups_store.console import run
def main():
    exec("raise KeyboardInterrupt")
run(main)
"""
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "program"]
    ended = subprocess.run(command, capture_output=True, timeout=60, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (5, "error: interrupted; run the same command again\n")


# --- what is printed ----------------------------------------------------------------------------------


def test_json_is_one_line_with_numpy_scalars_and_paths(capsys: Capture) -> None:
    print_json({"n": np.int64(3), "path": Path("a/b"), "u": np.float32(0.5)})
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    assert json.loads(shown) == {"n": 3, "path": "a/b", "u": 0.5}


def test_log_takes_nothing_for_markup_and_does_not_wrap(capsys: Capture) -> None:
    log("[red]" + "x " * 200, label="warning", style="yellow")
    log("plain :smile:")
    assert capsys.readouterr().err == "warning: [red]" + "x " * 200 + "\nplain :smile:\n"


def test_results_do_not_wrap_in_a_pipe(capsys: Capture) -> None:
    console.results().print("x " * 500 + "[b]")
    assert capsys.readouterr().out == "x " * 500 + "[b]\n"


@pytest.mark.parametrize(("quiet", "is_terminal"), [(True, True), (False, False), (False, True)])
def test_progress_bar_is_shown_on_a_terminal_only(
    quiet: bool, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=out, force_terminal=is_terminal, width=100))
    with console.progress_bar("verify [x]", total=2_000_000, quiet=quiet) as advance:
        advance(1_000_000)
    assert ("verify [x]" in out.getvalue()) == (is_terminal and not quiet)
    assert ("1.0/2.0 MB" in out.getvalue()) == (is_terminal and not quiet)


def test_bytes_are_shown_in_decimal_units_and_ages_in_their_largest() -> None:
    sizes = {
        0: "0 B",
        999: "999 B",
        999_949: "999.9 kB",
        999_950: "1.0 MB",
        5 * 10**15: "5000.0 TB",
    }
    assert {nbytes: format_nbytes(nbytes) for nbytes in sizes} == sizes
    ages = {9.9: "just now", 59.9: "59 seconds ago", 60: "1 minute ago", 7200: "2 hours ago"}
    ages[86_400 * 400] = "400 days ago"
    assert {seconds: format_age(seconds) for seconds in ages} == ages


def test_warning_of_python_is_a_line_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    def warn() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("a disk [failed]", RuntimeWarning, stacklevel=1)

    shown = warnings.showwarning
    with pytest.raises(SystemExit):
        run(warn)
    assert capsys.readouterr().err == "warning: a disk [failed]\n"
    assert warnings.showwarning is shown


def test_full_disk_of_stdout_ends_with_its_exit_code() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ups_store", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (6, "error: no space left on device\n")
