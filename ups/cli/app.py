"""The application of `ups VERB`. What a verb needs of torch is imported once the command line is parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ups.cli.baselines import compare, train_baselines, tune
from ups.cli.common import STORE_IS_SOURCE, UNREADABLE_STORE, showing_notes
from ups.cli.configs import app as configs
from ups.cli.demo import demo
from ups.cli.evaluate import evaluate
from ups.cli.launch import app as launch
from ups.cli.make_data import make_data
from ups.cli.predict import predict
from ups.cli.records import leaderboard, lineage, status
from ups.cli.run import run
from ups.cli.train import train
from ups.cli.validate import app as validate
from ups.cli.validate import dry_run
from ups_store.command_line import make_app
from ups_store.console import print_lines

app = make_app(
    {
        "run": run,
        "train": train,
        "dry-run": dry_run,
        "evaluate": evaluate,
        "predict": predict,
        "compare": compare,
        "status": status,
        "leaderboard": leaderboard,
        "lineage": lineage,
        "train-baselines": train_baselines,
        "tune": tune,
        "make-data": make_data,
        "demo": demo,
    }
)
app.add_typer(configs, name="configs")
app.add_typer(validate, name="validate")
app.add_typer(launch, name="launch")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print_lines(f"ups {version('ups-store')}")
        raise typer.Exit


@app.callback()
def _common(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit"),
    ] = False,
) -> None:
    """Train neural PDE solvers on stores, evaluate them beside baselines, and predict with them."""


def run_verb(words: Sequence[str]) -> Any:
    """Parse and run; errors pass, each with its exit code."""
    try:
        with showing_notes():
            return app(words, prog_name="ups", standalone_mode=False)
    except UNREADABLE_STORE as error:
        error.exit_code = STORE_IS_SOURCE
        raise
