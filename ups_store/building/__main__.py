"""Entry point of `ups-store build` and `python -m ups_store.build`."""

from __future__ import annotations

import sys
import time

from ups_store.system.interrupt import importing

TYPE_CHECKING = False  # as in `typing`, which isn't imported before Ctrl-C is handled
if TYPE_CHECKING:
    from ups_store.building.command import Begin


def main(
    arguments: list[str] | None = None,
    *,
    name: str = "python -m ups_store.build",
    begin: Begin | None = None,
) -> None:
    """Build what the command line says, and end the process with its exit code.

    Args:
        arguments: By default those of the process.
        name: Of the command, in its help.
        begin: Called before the work with the configuration's file and the overrides; may return a function
            that is given the `BuildReport`.
    """
    started_s = time.perf_counter()
    words = sys.argv[1:] if arguments is None else arguments
    with importing():
        from ups_store.errors import check_installed

        for_all = ("h5py", "blake3", "yaml", "pydantic", "typer", "rich")
        check_installed(*for_all, extra="hdf5")  # before a reader process misses one
        from ups_store.building.command import main as command
        from ups_store.building.progress import Stopwatch
        from ups_store.console import run
    clock = Stopwatch(started_s=started_s)
    clock.add("imports", time.perf_counter() - started_s)
    run(lambda: command(words, name=name, clock=clock, begin=begin))


if __name__ == "__main__":
    main()
