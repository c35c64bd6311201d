"""The verb `compare`: an operator beside FNO and U-Net at equal wall time and at equal samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ups.cli.common import (
    Also,
    AsJson,
    Checkpoint,
    Config,
    Kinds,
    Overrides,
    Restart,
    Split,
    note,
    publish,
)
from ups.output import check_writable
from ups_store.console import importing


def compare(
    overrides: Overrides = None,
    *,
    config: Config = None,
    checkpoint: Checkpoint = None,
    split: Split = None,
    kinds: Kinds = None,
    budget_seconds: Annotated[
        float | None, typer.Option(help="[default: what the run's training took, by its logs]")
    ] = None,
    budget_samples: Annotated[
        int | None, typer.Option(help="[default: the windows that the operator was trained on]")
    ] = None,
    also: Also = None,
    restart: Restart = False,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("reports/compare"),
    as_json: AsJson = False,
) -> None:
    """Train each baseline at both budgets, and evaluate all beside the operator."""
    check_writable(out)
    with importing():
        from ups.eval.runs import compare_run
    report = compare_run(
        checkpoint,
        config_path=config,
        overrides=overrides or (),
        split=split,
        kinds=kinds,
        seconds=budget_seconds,
        samples=budget_samples,
        also=also or (),
        restart=restart,
        note=note,
    )
    publish(report, out, as_json=as_json)
