"""What a command leaves and shows: files, written whole or not at all, tables, and progress."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from ups.errors import OutputError
from ups_store.system.files import create_replacement, real_place, take_over_permissions

if TYPE_CHECKING:
    from rich.console import Console


def check_writable(folder: Path) -> None:
    """Fail before the work, and not after it, where no file can be made in a folder; leaves nothing behind.

    Args:
        folder: Where files are to go. It needn't be there yet: then what is there of its parents is tried.
    """
    try:
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OutputError.of(error, folder) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that appears whole and survives a power cut; its folder is made if missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with appears_whole(path) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise OutputError.of(error, path) from error


def write_together(files: Mapping[Path, bytes | Callable[[Path], object]]) -> None:
    """Write files of one folder tree, all of them before the first appears; folders are made if missing.

    Args:
        files: Contents, or what writes a file that is there and empty.
    """
    for folder in {path.parent for path in files}:
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as whole:
        for path, content in files.items():
            partial = whole.enter_context(appears_whole(path))
            partial.write_bytes(content) if isinstance(content, bytes) else content(partial)


@contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`: renamed to it if the block ends well, removed if it doesn't.

    Args:
        path: Where the file shall be; what is there is replaced, in one step that survives a power cut, or
            what a symbolic link there points to. The new file has its mode and owner.
    """
    place = real_place(path)
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.close(
            create_replacement(partial, place)
        )  # what is written into it is never more open than the old
        yield partial
        with partial.open("rb") as file:
            take_over_permissions(file.fileno(), place)
            os.fsync(file.fileno())  # else a power cut could leave the new name without the content
        partial.replace(place)
        sync_folder(place.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def with_nulls(value: Any) -> Any:
    """JSON values with null for NaN and infinity, which JSON doesn't have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): with_nulls(item) for key, item in value.items()}
    return [with_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Lines of a table; a text that a spreadsheet would compute gets an apostrophe in front."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_as_text(value) for value in row] for row in rows)
    return text.getvalue()


def _as_text(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def json_document(path: Path) -> dict[str, Any]:
    """What a file of one JSON document holds; empty where there is none, or it can't be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def terminal() -> Console:
    """The console on stderr where progress is shown, which -q silences."""
    from ups_store.console import console  # typer and rich: not for what only writes files

    return console


@contextmanager
def progress_bar(description: str, *, total: float) -> Iterator[Callable[[float], None]]:
    """Show a bar with the time left while the block runs; nothing unless stderr is a terminal.
    Yields:
        A function that takes how much is done.
    """
    if terminal().quiet or not terminal().is_terminal:
        yield lambda done: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    name = TextColumn("{task.description}", markup=False)
    with Progress(name, *columns, console=terminal(), transient=True) as progress:
        bar = progress.add_task(description, total=total)
        yield lambda done: progress.update(bar, completed=done)
