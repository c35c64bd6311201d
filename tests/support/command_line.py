"""`ups-store` and `ups` in the process of the test."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ups_store import cli


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes:
        exit_code: 0 if all went well.
        stdout: Its results.
        stderr: Everything else that it said.
    """

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both, for a failing test's message."""
        return self.stdout + self.stderr


def run_command(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    """Run `ups-store` with the arguments as text; returns the exit code."""
    monkeypatch.setattr("sys.argv", ["ups-store", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def run_ups(*args: object) -> Done:
    """Run `ups` with the arguments as text."""
    from ups.cli import main

    return _run(main, "ups", *args)


def run_ups_store(*args: object) -> Done:
    """Run `ups-store` with the arguments as text."""
    return _run(cli.main, "ups-store", *args)


def run_build(*args: object) -> Done:
    """Run `ups-store build` with the arguments as text, without the reader that it would have ready."""
    from ups_store.building import command
    from ups_store.console import run

    return _run(lambda: run(command.main), "ups-store build", *args)


def _run(main: Callable[[], Any], *words: object) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patched.setattr("sys.argv", [*map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())
