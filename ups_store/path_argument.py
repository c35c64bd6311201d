"""The path that a caller gave, as an absolute one that the system can take."""

from __future__ import annotations

import os
from pathlib import Path

from ups_store.errors import SpecError

MAX_NAME_BYTES = 255  # NAME_MAX of Linux file systems
_MAX_PATH_BYTES = 4095  # PATH_MAX without the NUL behind it


def path_of(path: str | os.PathLike[str], *, suffix_nbytes: int = 0) -> Path:
    """The absolute path, checked before the system sees it.

    Args:
        path: As the caller gave it.
        suffix_nbytes: Bytes that are going to be appended to its name.
    Raises:
        SpecError: If it is no text, holds a NUL character, or is too long.
    """
    text: object = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        hint = "give text, such as os.fsdecode(path)" if isinstance(text, bytes) else None
        what = type(text).__name__
        raise SpecError("path", kind="path", expected="a str or os.PathLike[str]", found=what, hint=hint)
    if "\0" in text:
        hint = "check how the path was made"
        raise SpecError("path holds a NUL character", kind="path", path=repr(text), hint=hint)
    absolute = Path(text).absolute()
    _check_length(absolute, suffix_nbytes)
    return absolute


def _check_length(path: Path, suffix_nbytes: int) -> None:
    limit = MAX_NAME_BYTES - suffix_nbytes
    for found, most, what in (
        (len(os.fsencode(path.name)), limit, "file name"),
        (max(len(os.fsencode(part)) for part in path.parts), MAX_NAME_BYTES, "folder name"),
        (len(os.fsencode(path)), _MAX_PATH_BYTES - suffix_nbytes, "path"),
    ):
        if found > most:
            raise SpecError(
                f"{what} too long",
                kind="path",
                path=path,
                expected=f"at most {most} bytes",
                found=found,
                hint="choose a shorter one",
            )
