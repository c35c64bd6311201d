"""ZIP64 records: local header, central directory, end records; pack beside unpack; pure (spec 3).

All integers are little-endian. Sizes and offsets always stand in ZIP64 extra fields, so a record's length
never depends on a value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ups_store.errors import FormatError

ROOT_NAME = "zarr.json"
ARCHIVE_COMMENT = b'{"format":"ups_store","version":"1.0"}'
MAX_COMMENT_BYTES = 4095
MAX_DIRECTORY_BYTES = 64 << 20  # 4096 arrays with the longest names and paddings need 36 MiB
MAX_ENTRIES = 1 << 16  # 1.0 has at most two an array; a newer minor version may add some (spec 10.3)

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

MAX_LOCAL_HEADER_BYTES = 512  # of a metadata entry: the name has at most 138 bytes
END_BYTES = _ZIP64_END.size + _ZIP64_LOCATOR.size + _END_RECORD.size + len(ARCHIVE_COMMENT)
MAX_END_BYTES = END_BYTES - len(ARCHIVE_COMMENT) + MAX_COMMENT_BYTES


def align(offset: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that isn't below `offset`."""
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class Entry:
    """One ZIP entry (spec 3.2).

    Attributes:
        name: Zarr key.
        offset: First byte of its local header.
        nbytes: Bytes of its data.
        alignment: Multiple that its data starts on; 1 means no padding field.
    """

    name: str
    offset: int
    nbytes: int
    alignment: int = 1

    @property
    def header_nbytes(self) -> int:
        """Bytes of the local header with its extra fields."""
        plain = _plain_header_nbytes(self.name)
        if self.alignment == 1:
            return plain
        return align(self.offset + plain + _PADDING.size, self.alignment) - self.offset

    @property
    def data_offset(self) -> int:
        """First byte of the data."""
        return self.offset + self.header_nbytes

    @property
    def end(self) -> int:
        """First byte past the data."""
        return self.data_offset + self.nbytes

    @property
    def padding_nbytes(self) -> int:
        """Bytes of extra field 0xD935; 0 without it (spec 3.4)."""
        return self.header_nbytes - _plain_header_nbytes(self.name)

    @property
    def padding(self) -> bytes:
        """Extra field 0xD935, the same in the local header and the central record (spec 3.4)."""
        nbytes = self.padding_nbytes
        return _PADDING.pack(0xD935, nbytes - 4, self.alignment).ljust(nbytes, b"\0") if nbytes else b""

    @property
    def central_nbytes(self) -> int:
        """Bytes of the central directory record."""
        return _CENTRAL_RECORD.size + len(self.name) + _CENTRAL_ZIP64.size + self.padding_nbytes

    def pack_local_header(self, crc: int) -> bytes:
        """The local header for data with CRC-32 `crc` (spec 3.3)."""
        name, padding = self.name.encode(), self.padding
        fixed = _LOCAL_HEADER.pack(
            b"PK\3\4", _VERSION_NEEDED, _FLAGS, 0, 0, _DOS_DATE, crc, _IN_ZIP64, _IN_ZIP64,
            len(name), _LOCAL_ZIP64.size + len(padding),
        )  # fmt: skip
        return fixed + name + _LOCAL_ZIP64.pack(1, 16, self.nbytes, self.nbytes) + padding

    def pack_central_record(self, crc: int) -> bytes:
        """The central directory record for data with CRC-32 `crc` (spec 3.5)."""
        name, padding = self.name.encode(), self.padding
        fixed = _CENTRAL_RECORD.pack(
            b"PK\1\2", _MADE_BY, _VERSION_NEEDED, _FLAGS, 0, 0, _DOS_DATE, crc, _IN_ZIP64, _IN_ZIP64,
            len(name), _CENTRAL_ZIP64.size + len(padding), 0, 0, 0, _FILE_MODE, _IN_ZIP64,
        )  # fmt: skip
        zip64 = _CENTRAL_ZIP64.pack(1, 24, self.nbytes, self.nbytes, self.offset)
        return fixed + name + zip64 + padding


def _plain_header_nbytes(name: str) -> int:
    """Bytes of a local header without padding."""
    return _LOCAL_HEADER.size + len(name) + _LOCAL_ZIP64.size


def pack_directory(entries: Sequence[Entry], crcs: Sequence[int]) -> bytes:
    """Central directory and end records that follow the entries, for the CRC-32 of each (spec 3.5, 3.6)."""
    records = b"".join(e.pack_central_record(crc) for e, crc in zip(entries, crcs, strict=True))
    return records + EndRecords(len(entries), entries[-1].end, len(records), ARCHIVE_COMMENT).pack()


@dataclass(frozen=True)
class EndRecords:
    """What the end of the file says of the central directory (spec 3.6)."""

    num_entries: int
    directory_offset: int
    directory_nbytes: int
    comment: bytes

    def pack(self) -> bytes:
        """The end records; they follow the directory."""
        num, nbytes, offset = self.num_entries, self.directory_nbytes, self.directory_offset
        end64 = _ZIP64_END.pack(
            b"PK\6\6", _ZIP64_END.size - 12, _MADE_BY, _VERSION_NEEDED, 0, 0, num, num, nbytes, offset
        )
        locator = _ZIP64_LOCATOR.pack(b"PK\6\7", 0, offset + nbytes, 1)
        sizes = (_NUM_IN_ZIP64, _NUM_IN_ZIP64, _IN_ZIP64, _IN_ZIP64)
        end = _END_RECORD.pack(b"PK\5\6", 0, 0, *sizes, len(self.comment))
        return end64 + locator + end + self.comment


def parse_end(tail: bytes, file_nbytes: int, *, path: object) -> EndRecords:
    """Read the end records from the last bytes of a file.

    Args:
        tail: The last bytes of the file, at least `END_BYTES` and the longest comment, or all of it.
        file_nbytes: Length of the file.
        path: For messages.
    """

    def bad(problem: str, kind: str = "end_records", **values: object) -> FormatError:
        return FormatError(problem, path=path, kind=kind, clause="3.6", **values)  # type: ignore[arg-type]

    at = _find_end_record(tail)
    if at < 0:
        raise bad(
            "not a ZIP file, or its end is missing",
            kind="no_end_record",
            expected=f"PK\\5\\6 and a comment of at most {MAX_COMMENT_BYTES} bytes at the end",
            hint="check the path: it isn't a store",
        )
    zip64_nbytes = _ZIP64_END.size + _ZIP64_LOCATOR.size
    if at < zip64_nbytes or tail[at - _ZIP64_LOCATOR.size :][:4] != b"PK\6\7":
        raise bad("no ZIP64 end records", kind="no_zip64", hint="it is a ZIP file of another program")
    start = file_nbytes - len(tail) + at - zip64_nbytes
    num_entries, nbytes, offset = _ZIP64_END.unpack_from(tail, at - zip64_nbytes)[-3:]
    if offset + nbytes != start:
        raise bad(
            "central directory doesn't end where the end records begin",
            expected=start,
            found=offset + nbytes,
        )
    end = EndRecords(num_entries, offset, nbytes, tail[at + _END_RECORD.size :])
    if tail[at - zip64_nbytes :] != end.pack():
        raise bad("end records disagree with each other", byte_range=(start, file_nbytes))
    return end


def _find_end_record(tail: bytes) -> int:
    """Where the last end record begins whose comment reaches exactly to the end; -1 if none does."""
    first = max(0, len(tail) - _END_RECORD.size - MAX_COMMENT_BYTES)
    at = tail.rfind(b"PK\5\6", first, max(0, len(tail) - _END_RECORD.size + 4))
    while at >= 0 and at + _END_RECORD.size + _END_RECORD.unpack_from(tail, at)[-1] != len(tail):
        at = tail.rfind(b"PK\5\6", first, at + 3)
    return at


@dataclass(frozen=True)
class CentralRecord:
    """What the central directory, or a local header, says of one entry."""

    name: str
    offset: int
    nbytes: int
    crc: int

    @property
    def data_offset(self) -> int:
        """First byte of the data, for an entry without padding, as all metadata entries are."""
        return self.offset + _plain_header_nbytes(self.name)

    @property
    def end(self) -> int:
        """First byte past the data, for an entry without padding."""
        return self.data_offset + self.nbytes


def parse_directory(raw: bytes, num_entries: int, *, path: object) -> list[CentralRecord]:
    """Read the central directory; compressed, encrypted or repeated entries are refused (spec 3.5)."""
    if num_entries > MAX_ENTRIES:
        raise FormatError(
            "too many entries",
            path=path,
            kind="limits",
            clause="9.1",
            expected=f"at most {MAX_ENTRIES}",
            found=num_entries,
        )
    records, at, seen = [], 0, set()
    for i in range(num_entries):
        record, nbytes = _parse_central_record(raw, at, i, path)
        if record.name in seen:
            raise _bad_record(path, i, "two entries of one name", "duplicate_name", found=record.name)
        seen.add(record.name)
        records.append(record)
        at += nbytes
    if at != len(raw):
        raise _bad_record(path, num_entries, "bytes left over", "directory", found=f"{len(raw) - at} bytes")
    return records


def _bad_record(path: object, i: int, problem: str, kind: str, **values: object) -> FormatError:
    where = f"central directory record {i}: {problem}"
    return FormatError(where, path=path, kind=kind, clause="3.5", **values)  # type: ignore[arg-type]


def _parse_central_record(raw: bytes, at: int, i: int, path: object) -> tuple[CentralRecord, int]:
    if at + _CENTRAL_RECORD.size > len(raw):
        raise _bad_record(path, i, "directory ends early", "directory", found=f"{len(raw)} bytes")
    fields = _CENTRAL_RECORD.unpack_from(raw, at)
    signature, flags, method, crc = fields[0], fields[3], fields[4], fields[7]
    name_nbytes, extra_nbytes, comment_nbytes = fields[10:13]
    if signature != b"PK\1\2":
        raise _bad_record(path, i, "signature", "directory", expected="PK\\1\\2", found=signature.hex())
    if flags & 1 or flags & (1 << 6):
        raise _bad_record(path, i, "encrypted entry", "encrypted", expected="flags 2048", found=flags)
    if method != 0:
        raise _bad_record(path, i, "compressed entry", "compressed", expected="method 0", found=method)
    start = at + _CENTRAL_RECORD.size
    end = start + name_nbytes + extra_nbytes
    if end > len(raw) or extra_nbytes < _CENTRAL_ZIP64.size or comment_nbytes:
        raise _bad_record(
            path, i, "lengths", "directory", expected="name, ZIP64 field, no comment", found=fields[10:13]
        )
    try:
        name = raw[start : start + name_nbytes].decode("ascii")
    except UnicodeDecodeError as error:
        raise _bad_record(path, i, "name is not ASCII", "name", found=str(error.object[:80])) from error
    tag, tag_nbytes, size, packed, offset = _CENTRAL_ZIP64.unpack_from(raw, start + name_nbytes)
    in_zip64 = {*fields[8:10], fields[16]} == {_IN_ZIP64}
    if (tag, tag_nbytes) != (1, 24) or size != packed or not in_zip64:
        raise _bad_record(
            path, i, "sizes", "sizes", expected="equal sizes in the ZIP64 field", found=(size, packed)
        )
    return CentralRecord(name, offset, size, crc), end - at


def may_be_store(start: bytes, end: bytes) -> bool:
    """Whether a file with these first and last bytes may be a store, if a damaged one (spec 2.2, 3.6)."""
    name = start[_LOCAL_HEADER.size :][: len(ROOT_NAME)]
    return name == ROOT_NAME.encode() or end.endswith(ARCHIVE_COMMENT)


def parse_local_header(raw: bytes, offset: int, *, path: object) -> CentralRecord:
    """Read the local header of a metadata entry; any other byte than ours is refused (spec 3.3).

    Args:
        raw: Bytes of the file from `offset` on, `MAX_LOCAL_HEADER_BYTES` of them where there are as many.
        offset: Where the header lies.
        path: For messages.
    """
    if len(raw) >= _LOCAL_HEADER.size:
        crc, name_nbytes = _LOCAL_HEADER.unpack_from(raw)[6], _LOCAL_HEADER.unpack_from(raw)[9]
        name = raw[_LOCAL_HEADER.size :][:name_nbytes]
        extra = raw[_LOCAL_HEADER.size + name_nbytes :][: _LOCAL_ZIP64.size]
        if len(extra) == _LOCAL_ZIP64.size and name.isascii():
            nbytes = _LOCAL_ZIP64.unpack(extra)[2]
            record = CentralRecord(name.decode("ascii"), offset, nbytes, crc)
            if raw.startswith(Entry(record.name, offset, nbytes).pack_local_header(crc)):
                return record
    raise FormatError(
        "no local header of a metadata entry",
        path=path,
        kind="local_header",
        clause="3.3",
        byte_range=(offset, offset + len(raw)),
        found=raw[:8].hex(" ") or "the end of the file",
        hint="it isn't a store under construction, or its start is damaged: move it away",
    )
