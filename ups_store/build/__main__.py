"""Entry point of `python -m ups_store.build`."""

from __future__ import annotations

from ups_store.early_interrupt import importing


def main() -> None:
    """Build what the command line says, and end the process with its exit code."""
    with importing():
        from ups_store.build.command import main as command
        from ups_store.console import run
    run(command)


if __name__ == "__main__":
    main()
