"""The application of `ups VERB`. What a verb needs of torch is imported once the command line is parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ups.cli.compare import compare
from ups.cli.configs import app as configs
from ups.cli.demo import demo
from ups.cli.evaluate import evaluate
from ups.cli.make_data import make_data
from ups.cli.predict import predict
from ups.cli.train import train
from ups.cli.train_baselines import train_baselines
from ups.cli.tune import tune
from ups_store.command_line import make_app
from ups_store.console import print_lines
from ups_store.errors import CorruptChunkError, FormatError, StoreNotFoundError

_UNREADABLE = 3  # a store that is read is a source, as HDF5 files are of a build

app = make_app(
    {
        "train": train,
        "evaluate": evaluate,
        "predict": predict,
        "compare": compare,
        "train-baselines": train_baselines,
        "tune": tune,
        "make-data": make_data,
        "demo": demo,
    }
)
app.add_typer(configs, name="configs")


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
        return app(words, prog_name="ups", standalone_mode=False)
    except (CorruptChunkError, FormatError, StoreNotFoundError) as error:
        error.exit_code = _UNREADABLE
        raise
