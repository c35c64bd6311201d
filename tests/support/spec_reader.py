"""A reader of stores, written from `docs/format/spec.md` alone, with nothing but the standard library."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from typing import TypeAlias

Entries: TypeAlias = dict[str, tuple[int, int, int]]  # header offset, data offset and size, by name

ITEM_BYTES = {
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8},
}


def crc32c(data: bytes) -> int:
    """Spec 1.3, bit by bit as RFC 3720 defines it, a table of 256 steps at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def table_entry(index: int) -> int:
    for _ in range(8):
        index = (index >> 1) ^ (0x82F63B78 if index & 1 else 0)
    return index


TABLE = [table_entry(i) for i in range(256)]


def align(x: int, a: int) -> int:
    return (x + a - 1) // a * a


def read_entries(raw: bytes) -> Entries:
    """Header offset, data offset and size of every entry, in the order of the directory (spec 3)."""
    end = raw.rindex(b"PK\5\6")
    num, _, offset = struct.unpack_from("<3Q", raw, end - 76 + 32)
    entries = {}
    for _ in range(num):
        crc, n, extra = struct.unpack_from("<I8x2H", raw, offset + 16)
        name = raw[offset + 46 : offset + 46 + n].decode("ascii")
        size, header = struct.unpack_from("<Q8xQ", raw, offset + 46 + n + 4)
        data = header + 30 + sum(struct.unpack_from("<2H", raw, header + 26))
        assert zlib.crc32(raw[data : data + size]) == crc
        entries[name] = header, data, size
        offset += 46 + n + extra
    return entries


def read_array(raw: bytes, entries: Entries, name: str) -> bytes:
    """Payload of a whole array (spec 5)."""
    _, at, size = entries[f"{name}/zarr.json"]
    document = json.loads(raw[at : at + size])
    shape, s = document["shape"], ITEM_BYTES[document["data_type"]]
    if 0 in shape:
        return b""
    _, d, size = entries["/".join([name, "c", *"0" * len(shape)])]
    if document["dimension_names"][:1] != ["sample"] or (s := s * math.prod(shape[1:])) < 4096:
        return checked(raw[d : d + size])
    slot = align(s + 4, 4096 if s >= 1 << 20 else 64)
    index = checked(raw[d + shape[0] * slot : d + size])
    places = [struct.unpack_from("<2Q", index, 16 * i) for i in range(shape[0])]
    assert places == [(i * slot, s + 4) for i in range(shape[0])]
    return b"".join(checked(raw[d + offset : d + offset + nbytes]) for offset, nbytes in places)


def checked(chunk: bytes) -> bytes:
    """The payload in front of its CRC-32C (spec 5.2)."""
    assert struct.unpack("<I", chunk[-4:])[0] == crc32c(chunk[:-4])
    return chunk[:-4]


def read_store(path: Path) -> dict[str, bytes]:
    """Payload of every array of a store."""
    raw = path.read_bytes()
    entries = read_entries(raw)
    _, at, size = entries["zarr.json"]
    ours = json.loads(raw[at : at + size])["attributes"]["ups_store"]
    assert ours["format_version"].split(".")[0] == "1"
    names = [key.removesuffix("/zarr.json") for key in entries if key.endswith("/zarr.json")]
    return {name: read_array(raw, entries, name) for name in names}
