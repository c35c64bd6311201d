"""The verb `dry-run`: what a run would build, reuse and train, and what that takes."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.common import AsJson, Config
from ups.cli.validate import Words, split_words
from ups_store.console import importing, print_json, results


def dry_run(
    words: Words = None,
    *,
    config: Config = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="of the machine, in any currency: gives the cost")
    ] = None,
    steps: Annotated[int, typer.Option("--measured-steps", min=0, help="of each stage; 0: none")] = 5,
    as_json: AsJson = False,
) -> None:
    """Say what `ups train` would do, and measure a few steps of each stage; nothing of the run is written."""
    with importing():
        from ups.pipeline.dry_run import dry_run as plan_run
    path, overrides = split_words(words, config)
    plan = plan_run(path, overrides, price_per_hour=price_per_hour, num_steps=steps)
    if as_json:
        print_json(plan.to_json())
    else:
        plan.show(results())
    raise typer.Exit(plan.exit_code)
