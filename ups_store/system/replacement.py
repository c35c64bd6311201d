"""What takes the place of another file: where that is, and the permissions that it takes over.

Everything that replaces a file by a rename goes through here. Where there was nothing the umask decides. A
symbolic link stays, and what it points to is replaced, by a rename in the folder of that. Mode bits decide,
and access(2) isn't asked: root may do anything, and a store without a write bit is to stay all the same.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ups_store.errors import FormatError, ReadOnlyError, StoreError
from ups_store.system import files
from ups_store.system.memory_file import is_in_memory

TAKEN = "move it away, or choose another name"
_WRITE_BITS = 0o222
OWN_USE = 0o600  # a file that is being made must be read and written, whatever it will be


def real_place(path: Path) -> Path:
    """Where a file of this path is replaced: behind the link, if there is one.

    Raises:
        StoreNotFoundError: If the link points to nothing, kind "dangling_link"; names both.
    """
    target = None if is_in_memory(path) else files.link_target(path)
    if target is None:
        return path
    if not os.path.exists(target):
        raise files.dangling_link(path)
    return target


def check_file_or_free(path: Path) -> None:
    """Refuse to take the place of what is no regular file, forced or not: a rename would replace a device.

    Raises:
        FormatError: If there is a folder, a pipe, a socket or a device; kind "not_a_file".
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe, a socket or a device"
        raise FormatError(f"there is {what}", path=path, kind="not_a_file", hint=TAKEN)


def check_not_read_only(path: Path, *, hint: str) -> None:
    """Refuse to replace what has no write bit at all.

    Raises:
        ReadOnlyError: If it hasn't.
    """
    there = files.permissions(path)
    if there is not None and not there.mode & _WRITE_BITS:
        found = f"mode {there.mode:04o}"
        raise ReadOnlyError("it is read-only", path=path, expected="a write bit", found=found, hint=hint)


def create_replacement(temporary: Path, target: Path) -> int:
    """Create the file that will take the target's place, never more open than that; the caller owns it.

    Args:
        temporary: Its name until then.
        target: What it will replace, if that is there.
    Raises:
        FormatError: As `check_file_or_free`.
    """
    check_file_or_free(target)
    there = files.permissions(target)
    if there is None:
        return files.create_new(temporary)
    fd = files.create_new(temporary, mode=OWN_USE)
    _take_over(fd, there, extra=OWN_USE)
    return fd


def take_over_permissions(place: int | Path, target: Path, *, extra: int = 0) -> bool:
    """Give what is about to replace the target the target's mode, and its owner where the system allows that.

    Args:
        place: An open file, or the path of a file or folder.
        target: What is going to be replaced; nothing happens if it isn't there.
        extra: Bits that are set in any case, such as `OWN_USE`.
    Returns:
        Whether anything was changed, which a sync makes durable.
    """
    there = files.permissions(target)
    return there is not None and _take_over(place, there, extra=extra)


def _take_over(place: int | Path, there: files.Permissions, *, extra: int) -> bool:
    here, bits = files.permissions(place), there.mode
    assert here is not None
    if (here.uid, here.gid) != (there.uid, there.gid) and not _take_owner(place, there):
        bits = (bits & ~0o070) | (bits & 0o007) << 3  # another group gets what all others get
    if here.mode != bits | extra:
        files.set_mode(place, bits | extra)
    return files.permissions(place) != here


def _take_owner(place: int | Path, there: files.Permissions) -> bool:
    """Take over owner and group, or the group alone; returns whether it has the group now."""
    for uid in (there.uid, -1):
        with contextlib.suppress(OSError):  # only root may give files away, and only to known users
            files.set_owner(place, uid, there.gid)
            return True
    return False


def replace_file(path: Path, data: bytes, *, follow: bool = True) -> None:
    """Write a small file under a temporary name and rename it: no failure leaves a third content.

    Args:
        path: The file; one that is there is replaced, in one step.
        data: All of it.
        follow: Whether a symbolic link there stays, and what it points to is replaced.
    Raises:
        DiskFullError: If the file system has no room for it.
        OSError: As the file system says, with the name of the file.
    """
    place = real_place(path) if follow else path
    temporary = place.with_name(f"{place.name}.{files.build_id()[:8].hex()}")
    try:
        _write_new(temporary, place, data)
        files.rename(temporary, place)
    except BaseException as error:
        with contextlib.suppress(OSError):
            files.remove(temporary)
        if isinstance(error, StoreError) and isinstance(error, OSError):
            error.filename = str(path)  # not the temporary one
        elif isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def replace_text(path: Path, text: str, *, follow: bool = True) -> None:
    """Write a small file atomically, as `replace_file` does."""
    replace_file(path, text.encode(), follow=follow)


def _write_new(temporary: Path, place: Path, data: bytes) -> None:
    with files.disk_full_as_error(place, len(data)):
        fd = create_replacement(temporary, place)
        try:
            files.write_at(fd, 0, data)
            take_over_permissions(fd, place)
            files.sync(fd)  # else a power cut could leave the new name without the content
        finally:
            files.close(fd)
