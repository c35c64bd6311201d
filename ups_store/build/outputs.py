"""Where a build writes besides the stores: folders, and small text files that are replaced atomically."""

from __future__ import annotations

from pathlib import Path

from ups_store.errors import ConfigError
from ups_store.small_file import replace_file


def make_folder(path: Path, *, hint: str) -> None:
    """Make a folder and those above it, unless it is there.

    Raises:
        ConfigError: If it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no file system can hold the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"can't make the folder ({reason.lower()})", path=path, hint=hint) from error


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically, as `replace_file` does."""
    replace_file(path, text.encode())
