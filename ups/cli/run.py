"""The verb `run`: from one configuration to a gated result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ups.cli.common import (
    AllowCode,
    AsJson,
    Config,
    ExportAnyway,
    exporting_anyway,
    parse_numbers,
)
from ups.cli.notify import Notify, notifying
from ups.cli.validate import Words, split_words
from ups.errors import ConfigError, GateMissedError
from ups_store.console import importing, print_json, print_lines
from ups_store.launch import ONLY_ONCE, check_shared


def run(
    words: Words = None,
    *,
    config: Config = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="such as 0,1,2: all of it with each, in <checkpoint.dir>/seed-N, and one report"),
    ] = None,
    skip_validation: Annotated[
        bool, typer.Option("--skip-validation", help="without `ups validate config`")
    ] = False,
    skip_data_check: Annotated[
        bool, typer.Option("--skip-data-check", help="without `ups validate data`")
    ] = False,
    skip_dry_run: Annotated[bool, typer.Option("--skip-dry-run", help="without `ups dry-run`")] = False,
    skip_training: Annotated[
        bool, typer.Option("--skip-training", help="neither stores nor stages: what is there is evaluated")
    ] = False,
    skip_small_eval: Annotated[
        bool, typer.Option("--skip-small-eval", help="without the small evaluation and its gates")
    ] = False,
    skip_full_eval: Annotated[
        bool, typer.Option("--skip-full-eval", help="without the full evaluation, its gates and promotion")
    ] = False,
    first: Annotated[
        str | None,
        typer.Option("--from", metavar="NODE", help="begin there; what comes before is taken as it is"),
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="NODE", help="this node alone")] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="execute what is valid, too, and train from scratch")
    ] = False,
    export_anyway: ExportAnyway = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the nodes and which are valid")] = False,
    price_per_hour: Annotated[float | None, typer.Option(help="of the machine, for the cost")] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="name=seconds of what happened before, for the reports")
    ] = None,
    notify: Notify = None,
    allow_code: AllowCode = None,
    as_json: AsJson = False,
) -> None:
    """Build stores, train, evaluate, decide by gates, promote; run it again to continue.

    Executes what isn't valid, each node in a process of its own. A missed gate is exit code 10. With --seeds
    what doesn't depend on the seed is done once, and the leaderboard has intervals over the seeds. Without
    CONFIG it takes the one that the variable TRAIN_CONFIG names.
    """
    phases = parse_numbers("--phase", phase or ())
    with importing():
        from ups.config.seeds import parse_seeds
        from ups.pipeline.run import Options, open_run, open_seeds, run_pipeline, run_seeds
    check_shared(hint=ONLY_ONCE)
    skipped = {
        "validation": skip_validation,
        "data-check": skip_data_check,
        "dry-run": skip_dry_run,
        "training": skip_training,
        "small-eval": skip_small_eval,
        "full-eval": skip_full_eval,
    }
    options = Options(
        skipped=[group for group, is_skipped in skipped.items() if is_skipped],
        first=first,
        only=only,
        restart=restart,
        dry_run=dry_run,
        price_per_hour=price_per_hour,
    )
    numbers = parse_seeds(seeds) if seeds is not None else ()
    with notifying(None if dry_run else notify) as notice:
        path, overrides = split_words(words, config)
        path = path or Path(os.environ.get("TRAIN_CONFIG", ""))
        if not path.name:
            expected = "a YAML file or a name of `ups configs`, as a word, --config or TRAIN_CONFIG"
            raise ConfigError("CONFIG", expected=expected, found="none")
        overrides += exporting_anyway(export_anyway)
        opened = open_run(path, overrides, phases=phases)
        notice.run = opened.folder
        runs = open_seeds(opened, numbers, config_path=path, overrides=overrides)
        try:
            done = run_seeds(opened, runs, options) if runs else run_pipeline(opened, options)
        except GateMissedError:
            print_lines(str(opened.folder))  # what was found lies there
            raise
    if as_json:
        print_json(done)
    else:
        print_lines(*(_plan_lines(done["plan"]) if "plan" in done else [str(opened.folder)]))


def _plan_lines(plan: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A line a node, below the seed where there are several."""
    width = max(map(len, plan), default=0) + 2
    for name, state in plan.items():
        if isinstance(state, Mapping):
            yield f"{indent}{name}"
            yield from _plan_lines(state, f"{indent}  ")
        else:
            yield f"{indent}{name:<{width}}{state}"
