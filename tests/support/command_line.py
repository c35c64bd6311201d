"""`ups-store` in the process of the test."""

from __future__ import annotations

import sys

import pytest

from ups_store import cli


def run_command(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    """Run it with the arguments as text; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["ups-store", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)
