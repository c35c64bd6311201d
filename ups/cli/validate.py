"""The verbs `validate config` and `validate data`: what would end a run, found before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.common import AsJson, Config
from ups.cli.validate_optimizations import optimizations
from ups.errors import ConfigError
from ups_store.build import shipped_configs
from ups_store.command_line import Verb, Verbs, completing
from ups_store.console import importing, print_json, results

if TYPE_CHECKING:
    from ups.pipeline.report import Report

app = typer.Typer(cls=Verbs, no_args_is_help=True)

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="YAML file or a name of `ups configs`; then such as training.lr=1e-4, which wins over it",
        autocompletion=completing(shipped_configs),
    ),
]


def split_words(words: Sequence[str] | None, config: Path | None) -> tuple[Path | None, list[str]]:
    """The configuration, which may be the first word or --config, and the overrides.

    Raises:
        ConfigError: For a second configuration.
    """
    first, *others = words or [""]
    if not first or "=" in first:
        return config, list(words or ())
    if config is not None:
        raise ConfigError("CONFIG", expected="one, as a word or as --config", found=f"{first} and {config}")
    return Path(first), others


@app.callback()
def validate() -> None:
    """Check a run before it begins; exit code 2: configuration, 3: data, 6: disk, 10: the machine."""


@app.command("config", cls=Verb)
def validate_config(words: Words = None, *, config: Config = None, as_json: AsJson = False) -> None:
    """Check a configuration and what it needs of this machine: a line per check, all problems at once."""
    with importing():
        from ups.pipeline.config_checks import check_config
    _check(check_config, words, config, as_json=as_json)


@app.command("data", cls=Verb)
def validate_data(words: Words = None, *, config: Config = None, as_json: AsJson = False) -> None:
    """Check the data of a run: each file opens, its first time steps are finite, its sizes fit."""
    with importing():
        from ups.pipeline.data_checks import check_data
    _check(check_data, words, config, as_json=as_json)


def _check(
    check: Callable[[Path | None, Sequence[str]], Report],
    words: Sequence[str] | None,
    config: Path | None,
    *,
    as_json: bool,
) -> None:
    path, overrides = split_words(words, config)
    report = check(path, overrides)
    if as_json:
        print_json(report.to_json())
    else:
        report.show(results())
    raise typer.Exit(report.exit_code)


app.command("optimizations", cls=Verb)(optimizations)
