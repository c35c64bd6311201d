"""The build tail: what stands behind the finished layout while a store is being built; pure (spec 6).

Header, owner and commit records, pack beside unpack. A record that checks *is* the commit of its sample.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import FormatError
from ups_store.format.checksum import crc32c, crc32c_rows
from ups_store.format.layout import Layout

TAIL_MAGIC = b"UPSBUILD"
TAIL_VERSION = 1
OWNER_OFFSET = 2048  # from the start of the tail: another sector than the header, which never changes
SPOOL_OFFSET, SPOOL_MAGIC = 3072, b"UPSSPOOL"  # of a file whose N is only what it has room for (6.13)
COMMIT_MARKER = 0x54494D43  # "CMIT": an empty record isn't a checksum that happens to be zero
HOW_TO_REPLACE = "on_mismatch='restart' (build: --overwrite, other verbs: --force)"  # what can't be continued

LOCK_BASE = 1 << 62  # lock bytes lie past any file's end
BUILDER_LOCK = LOCK_BASE
GATE_LOCK = LOCK_BASE + 1
SAMPLE_LOCK = LOCK_BASE + 2  # plus the sample number

_HEADER = struct.Struct("<8sHHI16s16sQQ")
_HEADER_NBYTES = 128
_OWNER = struct.Struct("<QI")
_OWNER_HOST_BYTES = 244


@dataclass(frozen=True)
class TailHeader:
    """The immutable header of a build tail (spec 6.2)."""

    build_id: bytes  # 16 random ones, new for every building file
    boot_id: bytes  # 16, which name the boot of the machine that created it
    is_lazy: bool  # whether commits are recorded without being synced
    num_samples: int
    num_arrays: int  # with a sample axis
    file_nbytes: int  # F, the length of the finished file

    def pack(self) -> bytes:
        """Pack the header's 128 bytes."""
        body = _HEADER.pack(
            TAIL_MAGIC, TAIL_VERSION, int(self.is_lazy), self.num_arrays, self.build_id, self.boot_id,
            self.num_samples, self.file_nbytes,
        ).ljust(_HEADER_NBYTES - 4, b"\0")  # fmt: skip
        return body + struct.pack("<I", crc32c(body))

    @classmethod
    def for_layout(cls, layout: Layout, *, build_id: bytes, boot_id: bytes, is_lazy: bool) -> TailHeader:
        """Make the header that belongs to a layout."""
        shape = (layout.num_samples, len(layout.per_sample), layout.file_nbytes)
        return cls(build_id, boot_id, is_lazy, *shape)


def parse_tail_header(raw: bytes, layout: Layout, *, path: object) -> TailHeader:
    """Read the tail header and compare it with the layout that the metadata gives (spec 6.2)."""

    def bad(problem: str, **values: Any) -> FormatError:
        where = (layout.tail_offset, layout.tail_offset + _HEADER_NBYTES)
        hint = f"the unfinished file is damaged: `ups-store gc` removes it, or say {HOW_TO_REPLACE}"
        values |= {"kind": "build_tail", "clause": "6.2", "byte_range": where, "hint": hint}
        return FormatError(f"build tail: {problem}", path=path, **values)

    raw = raw[:_HEADER_NBYTES]
    if len(raw) < _HEADER_NBYTES or raw[:8] != TAIL_MAGIC:
        raise bad("magic", expected=TAIL_MAGIC, found=raw[:8])
    if struct.unpack_from("<I", raw, _HEADER_NBYTES - 4)[0] != crc32c(raw[: _HEADER_NBYTES - 4]):
        raise bad("checksum is wrong")
    _, version, flags, _, build_id, boot_id, *_ = _HEADER.unpack_from(raw)
    if version != TAIL_VERSION:
        raise bad("version", expected=TAIL_VERSION, found=version)
    header = TailHeader.for_layout(layout, build_id=build_id, boot_id=boot_id, is_lazy=bool(flags & 1))
    if raw != header.pack():
        raise bad("doesn't belong to this metadata", expected=header.pack().hex(), found=raw.hex())
    return header


@dataclass(frozen=True)
class Owner:
    """The process that builds: for messages only, never for decisions (spec 6.3)."""

    pid: int
    host: str

    def pack(self) -> bytes:
        """Pack the owner field's 256 bytes."""
        host = self.host.encode()[:_OWNER_HOST_BYTES]
        return (_OWNER.pack(self.pid, len(host)) + host).ljust(_OWNER.size + _OWNER_HOST_BYTES, b"\0")

    @classmethod
    def parse(cls, raw: bytes) -> Owner | None:
        """Read an owner field; None where none was written."""
        if len(raw) < _OWNER.size:
            return None
        pid, nbytes = _OWNER.unpack_from(raw)
        host = raw[_OWNER.size : _OWNER.size + min(nbytes, _OWNER_HOST_BYTES)]
        return cls(pid, host.decode(errors="replace")) if pid else None


OWNER_NBYTES = _OWNER.size + _OWNER_HOST_BYTES


def pack_records(
    header: TailHeader, samples: npt.NDArray[np.int64], crcs: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Pack the commit records of M samples (spec 6.4).

    `crcs` are the CRC-32 of every sample's slot or bytes, shape (M, num_arrays), arrays in file order; the
    records are little-endian uint32, shape (M, num_arrays + 2): marker, checksums, record checksum.
    """
    records = np.empty((len(samples), header.num_arrays + 2), "<u4")
    records[:, 0] = COMMIT_MARKER
    records[:, 1:-1] = crcs
    records[:, -1] = _record_checksums(header, samples, records)
    return records


def is_committed(
    header: TailHeader, samples: npt.NDArray[np.int64], records: npt.NDArray[np.uint32]
) -> npt.NDArray[np.bool_]:
    """Tell which records check, and so are commits, shape (M,) (spec 6.4)."""
    committed: npt.NDArray[np.bool_] = records[:, 0] == COMMIT_MARKER
    marked = np.flatnonzero(committed)
    if not len(marked):
        return committed
    checks = records[marked, -1] == _record_checksums(header, samples[marked], records[marked])
    committed[marked] = checks
    return committed


def _record_checksums(
    header: TailHeader, samples: npt.NDArray[np.int64], records: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    words = np.empty((len(samples), records.shape[1] + 1), "<u4")
    words[:, :2] = samples.astype("<u8").view("<u4").reshape(-1, 2)
    words[:, 2:] = records[:, :-1]
    return crc32c_rows(words, crc32c(header.build_id))
