"""The verb `status`: what a run does now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ups.cli.common import AsJson
from ups.errors import ConfigError
from ups_store.console import importing, print_json, print_lines, results

_REFRESH_S = 2.0


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="of checkpoints, or of `ups run`")],
    *,
    watch: Annotated[bool, typer.Option("--watch", help="refresh until nothing runs there any more")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a run does now: step, rates, time left, memory, the last warning.

    Reads logs and records, so it also works where the run's folder is mounted, or over ssh.
    """
    if watch and as_json:
        raise ConfigError("--watch and --json", expected="one of them", found="both")
    with importing():
        from dataclasses import asdict

        from rich.live import Live
        from rich.text import Text

        from ups.output import with_nulls
        from ups.pipeline.status import read_status
    run = read_status(folder)
    if as_json:
        print_json(with_nulls(asdict(run)))
    elif not watch:
        print_lines(*run.lines())
    else:
        with Live(Text("\n".join(run.lines())), console=results(), auto_refresh=False) as live:
            while run.is_running:
                time.sleep(_REFRESH_S)
                run = read_status(folder)
                live.update(Text("\n".join(run.lines())), refresh=True)
