"""The command `ups-store VERB`, also `python -m ups_store VERB`: each verb parses and calls one function."""

from __future__ import annotations

import sys

from ups_store.system.interrupt import importing


def main() -> None:
    """Run the verb that the command line names, and end the process with its exit code."""
    if sys.argv[1:2] == ["build"]:  # its readers start before anything else is imported
        from ups_store.building.__main__ import main as build

        build(sys.argv[2:], name="ups-store build")
    with importing():
        from ups_store.errors import check_installed

        check_installed("typer", "rich", extra="cli")
        from ups_store.cli.app import app
        from ups_store.console import run
    run(lambda: app(prog_name="ups-store", standalone_mode=False))
