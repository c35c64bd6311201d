"""The verbs about what stands beside an operator at equal cost: `train-baselines`, `compare`; and `tune`."""

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
from ups.stages import BASELINES, OPERATOR
from ups_store.command_line import completing
from ups_store.console import importing, print_json, print_lines


def train_baselines(
    overrides: Overrides = None,
    *,
    config: Config = None,
    seeds: Seeds = None,
    kinds: Kinds = None,
    budget_flops: Annotated[
        float | None,
        typer.Option(help="counted operations of each [default: what the run's operator took, by its logs]"),
    ] = None,
    budget_samples: Annotated[int | None, typer.Option(help="training windows that each sees")] = None,
    budget_seconds: Annotated[float | None, typer.Option(help="processor time of each")] = None,
    configured: Annotated[
        bool,
        typer.Option("--configured", help="FNO and U-Net of evaluation.baseline_*, as `ups run` does"),
    ] = False,
    restart: Restart = False,
    allow_code: AllowCode = None,
    as_json: AsJson = False,
) -> None:
    """Train each baseline on every task of a run, into <checkpoint.dir>/baselines."""
    with ending(restart):
        with importing():
            from ups.config import load_config
            from ups.config.seeds import parse_seeds
            from ups.train.train_baselines import train_baselines_of_run, train_configured_baselines
        if configured:
            train_configured_baselines(load_config(config, overrides=overrides or ()), restart=restart)
            return
        trained = train_baselines_of_run(
            config,
            overrides=overrides or (),
            seeds=parse_seeds(seeds) if seeds else (),
            kinds=kinds,
            amounts={"flops": budget_flops, "samples": budget_samples, "seconds": budget_seconds},
            restart=restart,
        )
    if as_json:
        print_json(trained)
    else:
        print_lines(*trained)


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


def tune(
    overrides: Overrides = None,
    *,
    config: Config = None,
    stage: Annotated[
        str,
        typer.Option(
            help=f"{OPERATOR.name}, {', '.join(BASELINES)}",
            autocompletion=completing(lambda: (OPERATOR.name, *BASELINES)),
        ),
    ],
    trials: Annotated[int, typer.Option(min=1, help="trainings in all, those of before counted")] = 20,
    budget_flops: Annotated[float | None, typer.Option(help="counted operations of each trial")] = None,
    budget_samples: Annotated[int | None, typer.Option(help="training windows of each trial")] = None,
    budget_seconds: Annotated[float | None, typer.Option(help="processor time of each trial")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="forget the trials that are there")] = False,
    as_json: AsJson = False,
) -> None:
    """Search; run it again to continue after an interruption, or with more trials.

    The best values go to <checkpoint.dir>/tune/<stage>/best.yaml, for `include:` in a configuration.
    """
    with ending(restart):
        with importing():
            from ups.train.tune import tune as search
        report = search(
            stage,
            config,
            overrides=overrides or (),
            num_trials=trials,
            amounts={"flops": budget_flops, "samples": budget_samples, "seconds": budget_seconds},
            restart=restart,
        )
    if as_json:
        print_json(report)
        return
    print_lines(*(f"{key}={value}" for key, value in report["best"].items()), report["file"])
