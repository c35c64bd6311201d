"""The verb `tune`: a stage's learning rate and size, searched for on the validation split."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.common import AsJson, Config, Overrides, ending
from ups_store.command_line import completing
from ups_store.console import importing, print_json, print_lines


def tune(
    overrides: Overrides = None,
    *,
    config: Config = None,
    stage: Annotated[
        str,
        typer.Option(
            help="operator, fno, unet or fno_neuraloperator",
            autocompletion=completing(lambda: ("operator", "fno", "unet")),
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
