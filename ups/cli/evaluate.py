"""The verb `evaluate`: a trained operator beside its baselines, in a report."""

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
    Overrides,
    Seeds,
    Split,
    parse_numbers,
    publish,
)
from ups.output import check_writable
from ups_store.console import importing


def evaluate(
    overrides: Overrides = None,
    *,
    config: Config = None,
    checkpoint: Checkpoint = None,
    seeds: Seeds = None,
    split: Split = None,
    horizon: Annotated[
        int | None, typer.Option(help="steps to predict [default: evaluation.horizon, or to the end]")
    ] = None,
    members: Annotated[
        int | None,
        typer.Option(
            min=2, help="members of ensembles, of models that have any [default: evaluation.members]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of the members' noise")] = 0,
    also: Also = None,
    best: Annotated[
        Path | None, typer.Option(help="the best operator so far, for a row of its own, whatever its seed")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("reports/evaluation"),
    title: Annotated[str | None, typer.Option(help="heading of the report")] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="name=seconds of what happened before, for the report")
    ] = None,
    allow_code: AllowCode = None,
    as_json: AsJson = False,
) -> None:
    """Roll out on a split; baselines in <checkpoint.dir>/baselines are evaluated, too.

    With --checkpoint alone, the configuration is what the checkpoint was made with. What `ups train --seeds`
    trained is one row, with intervals over its seeds.
    """
    check_writable(out)
    phases = parse_numbers("--phase", phase or ())
    with importing():
        from ups.config.seeds import parse_seeds
        from ups.eval.evaluate import evaluate_run
        from ups.train.tracking import send_report
    report = evaluate_run(
        checkpoint,
        config_path=config,
        overrides=overrides or (),
        seeds=parse_seeds(seeds) if seeds else (),
        split=split,
        horizon=horizon,
        members=members,
        seed=seed,
        also=also or (),
        best=best,
        phases=phases,
        title=title,
    )
    files = publish(report, out, as_json=as_json)
    send_report(report, files, name=out.name, joins=True)
