"""What benchmarks share that train for hours: stopped, they go on; in the end there is a table."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from benchmarks.harness import machine
from benchmarks.harness.report import write_docs
from ups.log import logger
from ups.output import with_nulls, write_atomically

PAGES = Path(__file__).resolve().parents[2] / "docs" / "results"


class Progress(logging.Handler):
    """Shows on stderr what a run says, warnings too."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one sentence."""
        note(record.getMessage())


def show_progress() -> None:
    """Show from now on what trainings say."""
    logger.addHandler(Progress())
    logger.setLevel(logging.INFO)


def note(text: str) -> None:
    """Say on stderr what is being done."""
    Console(stderr=True).print(
        f"{time.strftime('%H:%M:%S')} {text}", style="dim", markup=False, soft_wrap=True
    )


def chosen(only: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Names that `--only` gives; all that are known by default."""
    names = list(known)
    if unknown := [name for name in only or () if name not in names]:
        raise typer.BadParameter(f"{unknown[0]}: expected {', '.join(names)}", param_hint="--only")
    return list(only or names)


def show_and_keep(
    text: str, path: Path, document: Mapping[str, Any] | None = None, *, page: str = "", block: str = "table"
) -> None:
    """Print a table, and write it, its values as JSON with machine and version, and a page of docs/results.

    Args:
        text: The table as Markdown.
        path: Where it is written; the JSON has the same name.
        document: The JSON values; none by default.
        page: Name of the page whose block is replaced; "" for none.
        block: Name of the block.
    """
    if document is not None:
        values = {"machine": machine.describe(path.parent), "torch": version("torch"), **document}
        write_atomically(path.with_suffix(".json"), json.dumps(with_nulls(values), indent=1).encode())
    write_atomically(path, text.encode())
    Console().print(text, markup=False, soft_wrap=True)
    if page:
        end = f"<!-- end {block} -->"
        write_docs(PAGES / f"{page}.md", text, begin=f"<!-- begin {block} -->\n", end=end)
