"""Files that a command leaves: whether they can be, told before the work; and written whole or not at all."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ups.errors import OutputError


def expect_writable(folder: Path) -> None:
    """Fail before the work, and not after it, where no file can be made in a folder; leaves nothing behind.

    Args:
        folder: Where files are to go. It needn't be there yet: then what is there of its parents is tried.

    Raises:
        OutputError: With what the system says.
    """
    try:
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OutputError.of(error, folder) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that appears whole and survives a power cut; the old one stays until then."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name
        finally:
            os.close(folder)
    finally:
        partial.unlink(missing_ok=True)


def with_nulls(value: Any) -> Any:
    """JSON values with null for NaN and infinity, which JSON doesn't have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): with_nulls(item) for key, item in value.items()}
    return [with_nulls(item) for item in value] if isinstance(value, list | tuple) else value
