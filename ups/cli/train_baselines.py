"""The verb `train-baselines`: the FNO and the U-Net that stand beside an operator, within a budget."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.common import AllowCode, AsJson, Config, Kinds, Overrides, Restart, Seeds, ending
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
            resolved = load_config(config, overrides=overrides or ())
            train_configured_baselines(resolved, restart=restart)
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
