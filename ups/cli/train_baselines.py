"""The verb `train-baselines`: the FNO and the U-Net that stand beside an operator, within a budget."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.common import AsJson, Config, Kinds, Overrides, Restart, note
from ups_store.console import importing, print_json, print_lines


def train_baselines(
    overrides: Overrides = None,
    *,
    config: Config = None,
    kinds: Kinds = None,
    budget_seconds: Annotated[float | None, typer.Option(help="wall time of each")] = None,
    budget_samples: Annotated[int | None, typer.Option(help="training windows that each sees")] = None,
    restart: Restart = False,
    as_json: AsJson = False,
) -> None:
    """Train each baseline on every task of a run, into <checkpoint.dir>/baselines."""
    with importing():
        from ups.eval.runs import train_baselines_of_run
    trained = train_baselines_of_run(
        config,
        overrides=overrides or (),
        kinds=kinds,
        seconds=budget_seconds,
        samples=budget_samples,
        restart=restart,
        note=note,
    )
    if as_json:
        print_json(trained)
    else:
        print_lines(*trained)
