"""The command `ups VERB`, also `python -m ups VERB`: each verb parses and calls one function."""

from __future__ import annotations

from ups_store.system.interrupt import importing


def main(*verb: str) -> None:
    """Run the verb that the command line names, and end the process with its exit code.

    Args:
        verb: Run this one, such as "validate", "config", and take the command line for its arguments, as
            `scripts/<verb>.py` does; by default the command line names it.
    """
    with importing():
        import sys

        from ups.errors import check_installed

        check_installed("typer", "rich", "yaml", "pydantic", "torch", extra="train")
        from ups.cli.app import run_verb
        from ups_store.console import run
    run(lambda: run_verb([*verb, *sys.argv[1:]]))
