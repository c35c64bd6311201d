"""What the verbs share: messages on stderr, options that several have, `name=number`, a report's output."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.errors import ConfigError, InterruptedTrainingError, UpsError
from ups.log import logger
from ups.registry import ALLOWED_CODE
from ups_store.build import shipped_configs
from ups_store.command_line import completing
from ups_store.console import log, print_json, print_lines, results
from ups_store.errors import CorruptChunkError, FormatError, StoreError, StoreNotFoundError
from ups_store.launch import rank_of

if TYPE_CHECKING:
    from ups.eval.report import Report

UNREADABLE_STORE = (CorruptChunkError, FormatError, StoreNotFoundError)
STORE_IS_SOURCE = 3  # exit code of these: a store that is read is a source, as HDF5 files are of a build

_WITHOUT_RESTART = "the same command without --restart"

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="such as training.lr=1e-4; wins over the file")
]
Config = Annotated[
    Path | None,
    typer.Option(help="YAML file, or a name of `ups configs`", autocompletion=completing(shipped_configs)),
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="the operator [default: <checkpoint.dir>/operator.safetensors]")
]
Split = Annotated[
    str | None,
    typer.Option(
        help="dev, val, test or train [default: evaluation.split]; uses of test are counted",
        autocompletion=completing(lambda: ("dev", "val", "test", "train")),
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(help="such as 0,1,2: training seeds, each in <checkpoint.dir>/seed-N"),
]
Also = Annotated[
    list[Path] | None,
    typer.Option(help="another operator of the same tasks, or a folder with one for each seed; repeatable"),
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind", help="fno, unet, fno_neuraloperator, or module:class of your own [default: fno, unet]"
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="train again what is there already")]
ExportAnyway = Annotated[
    bool,
    typer.Option(
        "--export-anyway",
        help="as diffusion.export_anyway=true: a model that missed its gates, too, marked",
    ),
]


def _allow_code(modules: list[str] | None) -> list[str] | None:
    """Tell everything in this process, and those that it starts."""
    if modules:
        os.environ[ALLOWED_CODE] = ",".join([os.environ.get(ALLOWED_CODE, ""), *modules]).strip(",")
    return modules


AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code",
        metavar="MODULE",
        callback=_allow_code,
        help="import it where a checkpoint names code of it; repeatable",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout")]


class _Lines(logging.Handler):
    """Shows what a run says on stderr; what ranks find alike, the first one says."""

    def emit(self, record: logging.LogRecord) -> None:
        if rank_of() == 0:
            prefix = "warning: " if record.levelno >= logging.WARNING else ""
            note(f"{prefix}{record.getMessage()}")


@contextmanager
def showing_notes() -> Iterator[None]:
    """Inside, what `ups.log.logger` is told appears on stderr."""
    handler, level = _Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def note(text: str, *, is_last: bool = False) -> None:
    """Show a message on one line of stderr; ranks but the first name themselves. -q leaves warnings.

    Args:
        text: The message; it may begin with "warning: ".
        is_last: Whether it says how the command ended, which -q leaves, too.
    """
    prefix = f"rank {rank_of()}: " if rank_of() else ""
    warning = text.removeprefix("warning: ")
    if warning == text:
        log(f"{prefix}{text}", is_last=is_last)
    else:
        log(f"{prefix}{warning}", label="warning", style="yellow")


def exporting_anyway(wanted: bool) -> list[str]:
    """What --export-anyway says, as overrides."""
    return ["diffusion.export_anyway=true"] if wanted else []


@contextmanager
def ending(restart: bool) -> Iterator[None]:
    """Inside, errors say which rank met them, and none says that a command with --restart continues."""
    try:
        yield
    except KeyboardInterrupt:  # a second Ctrl-C, or one while a build works
        command = _WITHOUT_RESTART if restart else "the same command"
        note(f"stopped at once: what was saved before is kept; {command} continues from there", is_last=True)
        raise typer.Exit(InterruptedTrainingError.exit_code) from None
    except (UpsError, StoreError) as error:
        if restart and isinstance(error, UpsError) and error.continued_by:
            error.continued_by = _WITHOUT_RESTART
        if isinstance(error, InterruptedTrainingError):  # as it was asked to: no error
            note(str(error), is_last=True)
        elif rank_of():
            note(f"error: {error}", is_last=True)
        else:
            raise
        raise typer.Exit(error.exit_code) from None


def parse_numbers(flag: str, given: Sequence[str]) -> dict[str, float]:
    """Numbers by name from `name=number`."""
    found: dict[str, float] = {}
    for one in given:
        name, _, number = one.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError(flag, expected="name=number", found=repr(one))
    return found


def publish(report: Report, folder: Path, *, as_json: bool) -> dict[str, Path]:
    """Write a report; on stdout are its table and where its files lie, or all of it as JSON.

    Args:
        report: What was found.
        folder: Where `report.json`, `report.csv` and `report.html` go.
        as_json: Whether stdout is for a program: then stderr has where the files lie.

    Returns:
        The three files, by suffix.
    """
    from ups.eval.report import show_evaluation, write_report

    paths = write_report(folder, report)
    if as_json:
        print_json(report.to_json())
    else:
        show_evaluation(report, results())
    for path in paths.values():
        (note if as_json else print_lines)(str(path))
    return paths
