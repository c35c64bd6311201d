"""The verb `compare`: an operator beside FNO and U-Net at equal operations, samples and processor time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ups.cli.common import (
    AllowCode,
    Also,
    AsJson,
    Checkpoint,
    Config,
    Kinds,
    Overrides,
    Restart,
    Seeds,
    Split,
    ending,
    publish,
)
from ups.output import check_writable
from ups_store.console import importing


def compare(
    overrides: Overrides = None,
    *,
    config: Config = None,
    checkpoint: Checkpoint = None,
    seeds: Seeds = None,
    split: Split = None,
    kinds: Kinds = None,
    by: Annotated[
        list[str] | None, typer.Option(help="flops, samples or seconds; may be repeated [default: all]")
    ] = None,
    budget_flops: Annotated[
        float | None, typer.Option(help="[default: what the run's training took, by its logs]")
    ] = None,
    budget_samples: Annotated[
        int | None, typer.Option(help="[default: the windows that the operator was trained on]")
    ] = None,
    budget_seconds: Annotated[
        float | None, typer.Option(help="[default: what the training took, measured again step by step]")
    ] = None,
    also: Also = None,
    restart: Restart = False,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("reports/compare"),
    allow_code: AllowCode = None,
    as_json: AsJson = False,
) -> None:
    """Train each baseline at each budget, and evaluate all beside the operator."""
    check_writable(out)
    with ending(restart):
        with importing():
            from ups.config.seeds import parse_seeds
            from ups.train.compare import compare_run
        report = compare_run(
            checkpoint,
            config_path=config,
            overrides=overrides or (),
            seeds=parse_seeds(seeds) if seeds else (),
            split=split,
            kinds=kinds,
            by=by,
            amounts={"flops": budget_flops, "samples": budget_samples, "seconds": budget_seconds},
            also=also or (),
            restart=restart,
        )
    publish(report, out, as_json=as_json)
