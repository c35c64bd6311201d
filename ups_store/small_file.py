"""Small files beside the stores, such as a picture or a manifest, that are replaced in one step."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ups_store import files


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file under a temporary name and rename it: no failure leaves a third content.

    Args:
        path: The file; one that is there is replaced, in one step.
        data: All of it.
    Raises:
        DiskFullError: If the file system has no room for it.
        OSError: As the file system says, with the name of the file.
    """
    temporary = path.with_name(f"{path.name}.{files.build_id()[:8].hex()}")
    try:
        _write_new(temporary, path, data)
        files.rename(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            files.remove(temporary)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # not the temporary one
        raise


def _write_new(temporary: Path, path: Path, data: bytes) -> None:
    with files.disk_full_named(path, len(data)):
        fd = files.create_new(temporary)
        try:
            files.write_at(fd, 0, data)
            files.sync_data(fd)  # else a power cut could leave the new name without the content
        finally:
            files.close(fd)
