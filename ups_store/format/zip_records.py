"""ZIP64 records: local header, central directory, end records; pack beside unpack; pure (spec 3).

All integers are little-endian. Sizes and offsets always stand in ZIP64 extra fields, so a record's length
never depends on a value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ups_store.errors import FormatError

ROOT_NAME = "zarr.json"
ARCHIVE_COMMENT = b"ups_store: a Zarr v3 hierarchy"
DATA_ALIGNMENT = 4096  # of the data of every entry that isn't metadata (spec 3.4)
MAX_DIRECTORY_BYTES = 2 << 20  # 4096 arrays of the longest names have less

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # APPNOTE 4.3.7
_CENTRAL_RECORD = struct.Struct("<4s6H3I5H2I")  # APPNOTE 4.3.12
_ZIP64_END = struct.Struct("<4sQ2H2I4Q")  # APPNOTE 4.3.14
_ZIP64_LOCATOR = struct.Struct("<4sIQI")  # APPNOTE 4.3.15
_END_RECORD = struct.Struct("<4s4H2IH")  # APPNOTE 4.3.16
_LOCAL_ZIP64 = struct.Struct("<HHQQ")  # extra field 0x0001: size, compressed size
_CENTRAL_ZIP64 = struct.Struct("<HHQQQ")  # extra field 0x0001: size, compressed size, header offset
_PADDING = struct.Struct("<HHH")  # extra field 0xD935: alignment, then zeros

_VERSION_NEEDED = 45  # ZIP64
_MADE_BY = 3 << 8 | 45  # Unix, so that the file mode below counts
_FLAGS = 1 << 11  # names are UTF-8
_DOS_DATE = 1 << 5 | 1  # 1980-01-01: no times in the file
_FILE_MODE = 0o100644 << 16
_IN_ZIP64 = 0xFFFFFFFF  # the true value stands in the ZIP64 extra field
_NUM_IN_ZIP64 = 0xFFFF

END_MAGIC = b"PK\5\6"  # of the end record, which every finished ZIP file has near its end
END_BYTES = _ZIP64_END.size + _ZIP64_LOCATOR.size + _END_RECORD.size + len(ARCHIVE_COMMENT)  # 128


def align(offset: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that isn't below `offset`."""
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class Entry:
    """One ZIP entry (spec 3.2)."""

    name: str  # the Zarr key
    offset: int  # of its local header
    nbytes: int  # of its data
    is_aligned: bool = False  # whether its data start on a multiple of `DATA_ALIGNMENT`

    @property
    def padding_nbytes(self) -> int:
        """Bytes of extra field 0xD935; 0 where the data are aligned without it (spec 3.4)."""
        plain = self.offset + _plain_header_nbytes(self.name)
        if not self.is_aligned or plain % DATA_ALIGNMENT == 0:
            return 0
        return align(plain + _PADDING.size, DATA_ALIGNMENT) - plain

    @property
    def header_nbytes(self) -> int:
        """Bytes of the local header with its extra fields."""
        return _plain_header_nbytes(self.name) + self.padding_nbytes

    @property
    def data_offset(self) -> int:
        """First byte of the data."""
        return self.offset + self.header_nbytes

    @property
    def end(self) -> int:
        """First byte past the data."""
        return self.data_offset + self.nbytes

    @property
    def central_nbytes(self) -> int:
        """Bytes of the central directory record."""
        return central_nbytes(self.name)

    def pack_local_header(self, crc: int) -> bytes:
        """Pack the local header for data with CRC-32 `crc` (spec 3.3)."""
        name, nbytes = self.name.encode(), self.padding_nbytes
        padding = _PADDING.pack(0xD935, nbytes - 4, DATA_ALIGNMENT).ljust(nbytes, b"\0") if nbytes else b""
        fixed = _LOCAL_HEADER.pack(
            b"PK\3\4", _VERSION_NEEDED, _FLAGS, 0, 0, _DOS_DATE, crc, _IN_ZIP64, _IN_ZIP64,
            len(name), _LOCAL_ZIP64.size + nbytes,
        )  # fmt: skip
        return fixed + name + _LOCAL_ZIP64.pack(1, 16, self.nbytes, self.nbytes) + padding

    def pack_central_record(self, crc: int) -> bytes:
        """Pack the central directory record for data with CRC-32 `crc` (spec 3.5)."""
        name = self.name.encode()
        fixed = _CENTRAL_RECORD.pack(
            b"PK\1\2", _MADE_BY, _VERSION_NEEDED, _FLAGS, 0, 0, _DOS_DATE, crc, _IN_ZIP64, _IN_ZIP64,
            len(name), _CENTRAL_ZIP64.size, 0, 0, 0, _FILE_MODE, _IN_ZIP64,
        )  # fmt: skip
        return fixed + name + _CENTRAL_ZIP64.pack(1, 24, self.nbytes, self.nbytes, self.offset)


def _plain_header_nbytes(name: str) -> int:
    """Return the bytes of a local header without padding."""
    return _LOCAL_HEADER.size + len(name) + _LOCAL_ZIP64.size


def central_nbytes(name: str) -> int:
    """Return the bytes of the central directory record of an entry of that name (spec 3.5)."""
    return _CENTRAL_RECORD.size + len(name) + _CENTRAL_ZIP64.size


def pack_records(entries: Sequence[Entry], crcs: Sequence[int]) -> bytes:
    """Pack the central directory, for the CRC-32 of each entry (spec 3.5)."""
    return b"".join(entry.pack_central_record(crc) for entry, crc in zip(entries, crcs, strict=True))


def pack_directory(entries: Sequence[Entry], crcs: Sequence[int]) -> bytes:
    """Pack what follows the entries, directory and end records, for the CRC-32 of each (spec 3.5, 3.6)."""
    records = pack_records(entries, crcs)
    return records + EndRecords(len(entries), entries[-1].end, len(records)).pack()


@dataclass(frozen=True)
class EndRecords:
    """What the end of the file says of the central directory (spec 3.6)."""

    num_entries: int
    directory_offset: int
    directory_nbytes: int

    def pack(self) -> bytes:
        """Pack the end records, 128 bytes; they follow the directory."""
        num, nbytes, offset = self.num_entries, self.directory_nbytes, self.directory_offset
        end64 = _ZIP64_END.pack(
            b"PK\6\6", _ZIP64_END.size - 12, _MADE_BY, _VERSION_NEEDED, 0, 0, num, num, nbytes, offset
        )
        locator = _ZIP64_LOCATOR.pack(b"PK\6\7", 0, offset + nbytes, 1)
        sizes = (_NUM_IN_ZIP64, _NUM_IN_ZIP64, _IN_ZIP64, _IN_ZIP64)
        end = _END_RECORD.pack(END_MAGIC, 0, 0, *sizes, len(ARCHIVE_COMMENT))
        return end64 + locator + end + ARCHIVE_COMMENT


def parse_end(tail: bytes, file_nbytes: int, *, path: object) -> EndRecords:
    """Read the end records, the last `END_BYTES` bytes of a file; others than ours are refused (spec 7.1)."""

    def bad(problem: str, kind: str, hint: str, **values: Any) -> FormatError:
        where = (file_nbytes - len(tail), file_nbytes)
        return FormatError(problem, path=path, kind=kind, clause="3.6", byte_range=where, hint=hint, **values)

    if not tail.endswith(ARCHIVE_COMMENT):
        if END_MAGIC in tail:
            raise bad("it is a ZIP file of another program", "foreign", "read it with zarr-python")
        expected = f"the last bytes to be {ARCHIVE_COMMENT.decode()!r}"
        hint = "check the path: it isn't a store"
        raise bad("not a store, or its end is missing", "no_end_record", hint, expected=expected)
    if len(tail) == END_BYTES:
        num_entries, nbytes, offset = _ZIP64_END.unpack_from(tail)[-3:]
        if offset + nbytes == file_nbytes - END_BYTES:
            end = EndRecords(num_entries, offset, nbytes)
            if end.pack() == tail:
                return end
    problem = "end records disagree with each other, or with the length of the file"
    raise bad(problem, "end_records", "it was cut, appended to or edited: copy it again")


def parse_central_record(raw: bytes, at: int, name: str) -> tuple[int, int] | None:
    """Read size and CRC-32 from the record of an entry at `at`; None if it can't be that entry's.

    Its other bytes are compared with the computed directory (spec 7.1, step 7).
    """
    end = at + central_nbytes(name)
    if end > len(raw):
        return None
    first, fields = at + _CENTRAL_RECORD.size, _CENTRAL_RECORD.unpack_from(raw, at)
    crc, name_nbytes = fields[7], fields[10]
    if raw[first : first + name_nbytes] != name.encode():
        return None
    nbytes: int = _CENTRAL_ZIP64.unpack_from(raw, first + len(name))[2]
    return nbytes, crc


def may_be_store(start: bytes, end: bytes) -> bool:
    """Tell whether a file with these first and last bytes may be a store, if a damaged one (spec 2, 3.6)."""
    name = start[_LOCAL_HEADER.size :][: len(ROOT_NAME)]
    return name == ROOT_NAME.encode() or end.endswith(ARCHIVE_COMMENT)


def parse_local_header(raw: bytes, name: str, offset: int, *, path: object) -> tuple[int, int]:
    """Read size and CRC-32 from the local header of a metadata entry; no other byte than ours is allowed."""
    if len(raw) == _plain_header_nbytes(name):
        crc = _LOCAL_HEADER.unpack_from(raw)[6]
        nbytes = _LOCAL_ZIP64.unpack_from(raw, _LOCAL_HEADER.size + len(name))[2]
        if raw == Entry(name, offset, nbytes).pack_local_header(crc):
            return nbytes, crc
    raise FormatError(
        f"no local header of {name}",
        path=path,
        kind="local_header",
        clause="3.3",
        byte_range=(offset, offset + len(raw)),
        found=raw[:8].hex(" ") or "the end of the file",
        hint="it isn't a store under construction, or its start is damaged: move it away",
    )
