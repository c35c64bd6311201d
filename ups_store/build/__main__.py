"""Entry point of `python -m ups_store.build`."""

from __future__ import annotations

from ups_store.console import run


def main() -> None:
    """Run the command; what it needs is imported here, where Ctrl-C already ends in a message."""
    from ups_store.build.command import main as command

    command()


if __name__ == "__main__":
    run(main)
