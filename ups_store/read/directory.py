"""What the end of a finished file says of its entries, and whether the metadata gives the same (spec 7.1).

The records only claim; nothing that they point at is used before it is compared with the file's length and
with the computed geometry.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from ups_store.errors import FormatError, TruncatedError
from ups_store.format.layout import Layout
from ups_store.format.metadata import MAX_ARRAYS
from ups_store.format.zip_records import (
    ARCHIVE_COMMENT,
    MAX_DIRECTORY_BYTES,
    MAX_END_BYTES,
    ROOT_NAME,
    CentralRecord,
    EndRecords,
    Entry,
    parse_directory,
    parse_end,
)
from ups_store.system import files


@dataclass(frozen=True)
class Directory:
    """End records and central directory of a finished file, as they were found.

    Attributes:
        end: The end records.
        root: Record of the root group's `zarr.json`.
        arrays: Records of the arrays' `zarr.json`, each right behind the one before it, so that reading them
            all reads no more than the file, however many records point at it.
        records: All records in order.
    """

    end: EndRecords
    root: CentralRecord
    arrays: tuple[CentralRecord, ...]
    records: tuple[CentralRecord, ...]


def read_directory(fd: int, path: Path) -> Directory:
    """Read end records and central directory (spec 7.1, steps 1 and 2).

    Raises:
        TruncatedError: If the file begins like a store and has no end.
        FormatError: If it isn't a store, or its directory is damaged.
    """
    end = _read_end(fd, path)
    if end.directory_nbytes > MAX_DIRECTORY_BYTES:
        raise FormatError(
            "central directory too long",
            path=path,
            kind="limits",
            clause="9.1",
            expected=f"at most {MAX_DIRECTORY_BYTES} bytes",
            found=f"{end.directory_nbytes} bytes",
        )
    raw = files.read_at(fd, end.directory_offset, end.directory_nbytes)
    records = parse_directory(raw, end.num_entries, path=path)
    root = records[0] if records else None
    if root is None or (root.name, root.offset) != (ROOT_NAME, 0):
        raise FormatError(
            "first entry",
            path=path,
            kind="foreign",
            clause="2.2",
            expected=f"{ROOT_NAME} at byte 0",
            found=f"{root.name} at byte {root.offset}" if root else "no entry",
            hint="it is a ZIP file of another program",
        )
    arrays = tuple(takewhile(lambda record: record.name.endswith(f"/{ROOT_NAME}"), records[1:]))
    check_num_arrays(len(arrays), path)
    _check_metadata_extents((root, *arrays), path)
    return Directory(end, root, arrays, tuple(records))


def _read_end(fd: int, path: Path) -> EndRecords:
    file_nbytes = files.size(fd)
    nbytes = min(file_nbytes, MAX_END_BYTES)
    try:
        return parse_end(files.read_at(fd, file_nbytes - nbytes, nbytes), file_nbytes, path=path)
    except FormatError as error:
        if error.kind != "no_end_record" or not _begins_like_a_store(fd):
            raise
        raise TruncatedError(
            "it begins like a store, but does not end like one",
            path=path,
            clause="3.6",
            expected="end records in the last bytes",
            found=f"{file_nbytes} bytes in all",
            hint="it was cut off or appended to, or is still being copied: copy it again",
        ) from error


def _begins_like_a_store(fd: int) -> bool:
    """Whether the first local header is one of ours, its CRC-32 and sizes apart."""
    ours = Entry(ROOT_NAME, 0, 0).pack_local_header(0)
    found = files.read_at(fd, 0, len(ours))
    return found[:14] == ours[:14] and found[26:43] == ours[26:43]


def check_num_arrays(num_arrays: int, path: Path) -> None:
    """Refuse more arrays than the format allows, before their metadata is read (spec 9.1)."""
    if num_arrays > MAX_ARRAYS:
        raise FormatError(
            "too many arrays",
            path=path,
            kind="limits",
            clause="9.1",
            expected=f"at most {MAX_ARRAYS}",
            found=num_arrays,
        )


def _check_metadata_extents(records: tuple[CentralRecord, ...], path: Path) -> None:
    for before, record in pairwise(records):
        if record.offset != before.end:
            raise FormatError(
                f"{record.name} doesn't follow the entry before it",
                path=path,
                kind="geometry",
                clause="2.2",
                expected=f"offset {before.end}",
                found=f"offset {record.offset}",
            )


def check_directory(directory: Directory, layout: Layout, *, is_newer: bool, path: Path) -> None:
    """Compare the directory, entry by entry, with the geometry that the metadata gives (spec 7.1, step 5).

    Args:
        directory: As it was found.
        layout: As the metadata gives it.
        is_newer: Whether the file is of a newer minor version, which may hold more (spec 10.3).
        path: For messages.
    """
    records = directory.records
    for i, entry in enumerate(layout.entries):
        record = records[i] if i < len(records) else None
        found = (record.name, record.offset, record.nbytes) if record else "no entry"
        if found != (entry.name, entry.offset, entry.nbytes):
            raise FormatError(
                f"central directory record {i} (name, offset, bytes)",
                path=path,
                kind="geometry",
                clause="2.2",
                expected=(entry.name, entry.offset, entry.nbytes),
                found=found,
            )
    if not is_newer and len(records) > len(layout.entries):
        name = records[len(layout.entries)].name
        raise FormatError("unknown entry", path=path, kind="unknown_entry", clause="2.2", found=name)
    _check_end(directory.end, layout, is_newer, path)


def _check_end(end: EndRecords, layout: Layout, is_newer: bool, path: Path) -> None:
    """Compare the end records; as they close the file, that is also a check of its length."""
    num, offset, nbytes = len(layout.entries), layout.directory_offset, layout.directory_nbytes
    if is_newer:  # all that this version knows lies within the file, the data before the directory
        num, comment = end.num_entries, end.comment
        is_right = (
            end.directory_offset >= offset
            and end.directory_nbytes >= nbytes
            and len(comment) >= len(ARCHIVE_COMMENT)
        )
    else:
        is_right = end == EndRecords(num, offset, nbytes, ARCHIVE_COMMENT)
    if not is_right:
        raise FormatError(
            "end records (directory offset, bytes, comment)",
            path=path,
            kind="geometry",
            clause="3.6",
            expected=(offset, nbytes, ARCHIVE_COMMENT),
            found=(end.directory_offset, end.directory_nbytes, end.comment[:80]),
        )
