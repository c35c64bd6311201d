"""End records and central directory of a finished file (spec 7.1, steps 1, 2 and 7).

They only claim: sizes and checksums are taken from them where the metadata says that a record must lie, and
in the end all their bytes are compared with those that the computed geometry gives.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ups_store.errors import FormatError, TruncatedError
from ups_store.format.metadata import MAX_JSON_BYTES
from ups_store.format.zip_records import (
    END_BYTES,
    MAX_DIRECTORY_BYTES,
    ROOT_NAME,
    EndRecords,
    Entry,
    central_nbytes,
    pack_records,
    parse_central_record,
    parse_end,
)

ReadAt: TypeAlias = Callable[[int, int], bytes]  # a file's bytes from an offset on; fewer where it ends


@dataclass
class Directory:
    """End records and central directory as they were found; records are taken one after the other.

    Attributes:
        end: The end records.
        raw: Bytes of the directory.
        path: For messages.
        position: Where the next record begins in `raw`.
    """

    end: EndRecords
    raw: bytes
    path: Path
    position: int = 0

    def next_claim(self, name: str, offset: int) -> tuple[Entry, int]:
        """The next entry, which must bear this name and be at this offset, and the CRC-32 of its data.

        Raises:
            FormatError: If the next record is another entry's, or its data reach into the directory.
        """
        found = parse_central_record(self.raw, self.position, name)
        if found is None:
            raise self._bad("is missing", name)
        nbytes, crc = found
        entry = Entry(name, offset, nbytes)
        if entry.end > self.end.directory_offset:
            raise self._bad("says that the data reach past the entries", name)
        self.position += central_nbytes(name)
        return entry, crc

    def array_names(self) -> list[str]:
        """Names of the arrays by the records alone, where the root's document can't be read."""
        suffix = f"/{ROOT_NAME}"
        return [name.removesuffix(suffix) for name, _ in self._records() if name.endswith(suffix)]

    def metadata_end(self) -> int:
        """First byte past the documents by the records alone: what to read of them at once."""
        end = 0
        for name, at in self._records():
            found = parse_central_record(self.raw, at, name)
            if found is None or name.rpartition("/")[2] != ROOT_NAME:
                break
            end = Entry(name, end, min(found[0], MAX_JSON_BYTES)).end
        return min(end, self.end.directory_offset)

    def _records(self) -> Iterator[tuple[str, int]]:
        """Name of every entry, and where in `raw` its record begins."""
        at = 0
        while at + central_nbytes("") <= len(self.raw):
            (nbytes,) = struct.unpack_from("<H", self.raw, at + 28)
            name = self.raw[at + 46 : at + 46 + nbytes].decode("ascii", "replace")
            yield name, at
            at += central_nbytes(name)

    def check(self, entries: Sequence[Entry], crcs: Sequence[int], *, is_newer: bool) -> None:
        """Compare everything, byte for byte, with what the entries give (spec 7.1, step 7).

        Args:
            entries: All entries, in file order.
            crcs: CRC-32 of the data of each.
            is_newer: Whether the file is of a newer minor version, which may hold more behind (spec 10.3).
        """
        records = pack_records(entries, crcs)
        if not self.raw.startswith(records):
            self._check_each(entries, crcs)
        found, end = self.end, EndRecords(len(entries), entries[-1].end, len(records))
        is_right = found == end
        if is_newer:
            is_right = (
                found.num_entries >= end.num_entries
                and found.directory_offset >= end.directory_offset
                and found.directory_nbytes >= end.directory_nbytes
            )
        if not is_right:
            raise FormatError(
                "end records don't fit the metadata, or there is an unknown entry",
                path=self.path,
                kind="geometry",
                clause="7.1",
                expected=end,
                found=found,
            )

    def _check_each(self, entries: Sequence[Entry], crcs: Sequence[int]) -> None:
        at = 0
        for entry, crc in zip(entries, crcs, strict=True):
            end = at + entry.central_nbytes
            if self.raw[at:end] != entry.pack_central_record(crc):
                raise self._bad("isn't the one that the metadata gives", entry.name, at)
            at = end

    def _bad(self, problem: str, name: str, at: int | None = None) -> FormatError:
        first = self.end.directory_offset + (self.position if at is None else at)
        return FormatError(
            f"central directory: the record of {name} {problem}",
            path=self.path,
            kind="directory",
            clause="3.5",
            byte_range=(first, first + central_nbytes(name)),
        )


def read_directory(read: ReadAt, file_nbytes: int, path: Path) -> Directory:
    """Read end records and central directory (spec 7.1, steps 1 and 2).

    Args:
        read: Returns the file's bytes.
        file_nbytes: Its length.
        path: For messages.
    Raises:
        TruncatedError: If the file begins like a store and has no end.
        FormatError: If it isn't a store, or its end is damaged.
    """
    end = _read_end(read, file_nbytes, path)
    if end.directory_nbytes > MAX_DIRECTORY_BYTES:
        raise FormatError(
            "central directory too long",
            path=path,
            kind="limits",
            clause="9.1",
            expected=f"at most {MAX_DIRECTORY_BYTES} bytes",
            found=f"{end.directory_nbytes} bytes",
        )
    return Directory(end, read(end.directory_offset, end.directory_nbytes), path)


def _read_end(read: ReadAt, file_nbytes: int, path: Path) -> EndRecords:
    nbytes = min(file_nbytes, END_BYTES)
    try:
        return parse_end(read(file_nbytes - nbytes, nbytes), file_nbytes, path=path)
    except FormatError as error:
        if error.kind not in ("no_end_record", "foreign") or not _begins_like_a_store(read):
            raise
        raise TruncatedError(
            "it begins like a store, but does not end like one",
            path=path,
            clause="3.6",
            expected="end records in the last bytes",
            found=f"{file_nbytes} bytes in all",
            hint="it was cut off or appended to, or is still being copied: copy it again",
        ) from error


def _begins_like_a_store(read: ReadAt) -> bool:
    """Whether the first local header is one of ours, its CRC-32 and sizes apart."""
    ours = Entry(ROOT_NAME, 0, 0).pack_local_header(0)
    found = read(0, len(ours))
    return found[:14] == ours[:14] and found[26:43] == ours[26:43]
