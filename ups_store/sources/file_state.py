"""What tells a file from the one that took its place, and the files that a source needs beside itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ups_store.errors import SourceError

FileState: TypeAlias = tuple[int, ...]  # of `file_state`


def file_state(path: Path) -> FileState:
    """What differs once a file was replaced, written or deleted."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class OuterFile:
    """A file that a source needs beside itself.

    Attributes:
        name: What it is called in the file that names it.
        path: Where it is, without symbolic links.
        state: As it was when it was opened first.
    """

    name: str
    path: Path
    state: FileState


def outer_state(files: Sequence[OuterFile]) -> FileState:
    """The states of any number of outer files as one number, to stand behind that of their source."""
    states = [(os.fspath(file.path), *file.state) for file in files]
    return (int.from_bytes(hashlib.sha256(repr(states).encode()).digest()[:8], "little"),) if states else ()


def changed(path: Path | str) -> SourceError:
    """The error for a source that isn't what it was when the build began."""
    return SourceError(
        "source changed during the build",
        kind="source_changed",
        path=path,
        hint="wait until no program writes to it and run again; --overwrite if samples were committed",
    )
