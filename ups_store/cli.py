"""Entry point of `python -m ups_store VERB` and `ups-store VERB`."""

from __future__ import annotations

from ups_store.system.interrupt import importing


def main() -> None:
    """Run the verb that the command line names, and end the process with its exit code."""
    with importing():
        from ups_store.console import run
        from ups_store.verbs.app import app
    run(lambda: app(prog_name="ups-store", standalone_mode=False))
