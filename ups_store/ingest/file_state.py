"""Whether a source is still the file that it was when the build began."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from ups_store.errors import SourceError

FileState: TypeAlias = tuple[int, ...]


def file_state(path: Path) -> FileState:
    """What differs once a file was replaced, written or deleted."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def changed(path: Path) -> SourceError:
    """The error for a source that isn't what it was when the build began."""
    return SourceError(
        "source changed during the build",
        kind="source_changed",
        path=path,
        hint="wait until nobody writes to it and run again; --overwrite if samples were committed",
    )
