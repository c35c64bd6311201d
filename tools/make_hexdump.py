"""Print the examples of the specification, annotated hex dumps above all; `--write` puts them into its pages.

They are the same on every machine: a building file gets fixed ids, a packed one what numcodecs writes.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import ups_store
from ups_store.format.build_tail import OWNER_NBYTES, OWNER_OFFSET
from ups_store.format.layout import Layout
from ups_store.packed.pack import pack_store
from ups_store.read.catalog import read_finished
from ups_store.read.recovery import building_path, read_building_file
from ups_store.system import files

FORMAT = Path(__file__).parents[1] / "docs" / "format"
SPEC, WRITING, PACKED = FORMAT / "spec.md", FORMAT / "writing.md", FORMAT / "packed.md"
BYTES_PER_LINE = 16
BUILD_ID, BOOT_ID = bytes(range(0xB0, 0xC0)), bytes(range(0xC0, 0xD0))
PID, HOST = 4321, "node7"

Part = tuple[str, int, int]  # title, first byte, past the last


def smallest_store(folder: Path) -> Path:
    path = folder / "smallest.zarr.zip"
    arrays = {"u": ups_store.ArraySpec((1,), "int8")}
    with ups_store.create(path, arrays, identity={}) as writer:
        writer.commit(0, {"u": np.int8(7)})
        return writer.finish()


def sharded_store(folder: Path) -> Path:
    """Two samples of 4096 bytes: the smallest that get slots (spec 5.1)."""
    path = folder / "sharded.zarr.zip"
    arrays = {"v": ups_store.ArraySpec((2, 2048), "bfloat16", dims=("sample", "x"))}
    with ups_store.create(path, arrays, identity={}) as writer:
        for i, value in enumerate((1, 2)):
            writer.commit(i, {"v": np.full(2048, value, arrays["v"].dtype)})
        return writer.finish()


def float_store(folder: Path) -> Path:
    """Two samples in slots, of a type that both packed codecs have their own chain for (spec 13.4)."""
    path = folder / "floats.zarr.zip"
    arrays = {"w": ups_store.ArraySpec((2, 1024), "float32", dims=("sample", "x"))}
    with ups_store.create(path, arrays, identity={}) as writer:
        writer.commit_many(range(2), {"w": np.repeat(np.array([[1], [2]], np.float32), 1024, axis=1)})
        return writer.finish()


def packed_store(folder: Path, codec: str) -> Path:
    path = folder / f"{codec}.packed.zarr.zip"
    if not path.exists():
        with ups_store.open(float_store(folder)) as store:
            pack_store(store, path, codec=codec)
    return path


def building_store(folder: Path) -> Path:
    """The smallest store with two samples, while it is built: sample 0 is committed, sample 1 isn't."""
    path = folder / "unfinished.zarr.zip"
    arrays = {"u": ups_store.ArraySpec((2,), "int8")}
    with (
        mock.patch.object(files, "build_id", return_value=BUILD_ID),
        mock.patch.object(files, "boot_id", return_value=BOOT_ID),
        mock.patch.object(os, "getpid", return_value=PID),
        mock.patch.object(socket, "gethostname", return_value=HOST),
        ups_store.create(path, arrays, identity={}) as writer,
    ):
        writer.commit(0, {"u": np.int8(7)})
    return path


def dump(path: Path) -> str:
    """Every byte of a finished mapped file, entry by entry."""
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        infos, offset = archive.infolist(), archive.start_dir
    parts: list[Part] = []
    for info in infos:
        lengths = raw[info.header_offset + 26 : info.header_offset + 30]
        data = info.header_offset + 30 + int.from_bytes(lengths[:2], "little")
        data += int.from_bytes(lengths[2:], "little")
        parts.append((f"local header of {info.filename} (3.3)", info.header_offset, data))
        parts.append((f"data of {info.filename}", data, data + info.file_size))
    for info in infos:
        end = offset + 74 + len(info.filename)
        parts.append((f"central record of {info.filename} (3.5)", offset, end))
        offset = end
    parts += [
        ("ZIP64 end record (3.6)", offset, offset + 56),
        ("ZIP64 end locator", offset + 56, offset + 76),
        ("end record and comment", offset + 76, len(raw)),
    ]
    return _parts(raw, parts)


def dump_packed(path: Path, *, num_chunks: int) -> str:
    """The chunks of a packed file's last entry, where the shard index says that they lie, and the index."""
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        info, end = archive.infolist()[-1], archive.start_dir
    first, index = end - info.file_size, end - 4 - 16 * num_chunks
    parts: list[Part] = []
    for i, (offset, nbytes) in enumerate(struct.iter_unpack("<QQ", raw[index : end - 4])):
        crc = first + offset + nbytes - 4
        parts.append((f"chunk {i}: encoded payload (13.5)", first + offset, crc))
        parts.append((f"chunk {i}: CRC-32C of the encoded bytes", crc, crc + 4))
    parts.append(("shard index: offset and size of each chunk (5.4)", index, end - 4))
    return _parts(raw, [*parts, ("CRC-32C of the shard index", end - 4, end)])


def inner_codecs(path: Path) -> str:
    """The codecs of the chunks of `w`, one line each."""
    with zipfile.ZipFile(path) as archive:
        document = json.loads(archive.read("w/zarr.json"))
    codecs = document["codecs"][0]["configuration"]["codecs"]
    return "".join(f"{json.dumps(codec)}\n" for codec in codecs)


def dump_building(path: Path) -> str:
    """What a building file holds behind its metadata: data without header, then the build tail."""
    target = building_path(path)
    with files.opened(target) as fd:
        layout = read_building_file(fd, target).catalog.layout
    raw, entry, tail = target.read_bytes(), layout.entries[-1], layout.tail_offset
    owner, table, num = tail + OWNER_OFFSET, layout.table_offset, layout.record_nbytes
    checksum = entry.end - 4
    return _parts(
        raw,
        [
            (f"local header of {entry.name}, not written yet (6.8)", entry.offset, entry.data_offset),
            (f"data of {entry.name}: sample 0, sample 1 missing", entry.data_offset, checksum),
            ("CRC-32C of the chunk, not written yet (6.8)", checksum, entry.end),
            ("central directory and end records, not written yet (6.8)", entry.end, layout.file_nbytes),
            ("zeros up to the build tail (6.1)", layout.file_nbytes, tail),
            ("magic, version, flags, arrays (6.2)", tail, tail + 16),
            ("build id", tail + 16, tail + 32),
            ("boot id", tail + 32, tail + 48),
            ("N, F", tail + 48, tail + 64),
            ("reserved, CRC-32C of the header", tail + 64, tail + 128),
            ("zeros", tail + 128, owner),
            ("owner: process id, length of the host's name, the name (6.3)", owner, owner + OWNER_NBYTES),
            ("zeros", owner + OWNER_NBYTES, table),
            ("commit record of sample 0 (6.4)", table, table + num),
            ("commit record of sample 1: none", table + num, table + 2 * num),
            ("zeros up to a page (6.1)", table + 2 * num, len(raw)),
        ],
    )


def dump_shard(path: Path, *, sample_nbytes: int, slot_nbytes: int) -> str:
    """The data entry of a store's only array: slot by slot, then the shard index."""
    layout, raw = _read(path)
    entry = layout.entries[-1]
    parts: list[Part] = []
    num_samples = entry.nbytes // slot_nbytes
    for i in range(num_samples):
        first = entry.data_offset + i * slot_nbytes
        crc = first + sample_nbytes
        parts += [
            (f"slot {i}: payload of sample {i} (5.2)", first, crc),
            (f"slot {i}: CRC-32C of the payload (5.2)", crc, crc + 4),
            (f"slot {i}: zeros up to the slot size (5.3)", crc + 4, first + slot_nbytes),
        ]
    index = entry.data_offset + num_samples * slot_nbytes
    parts += [("shard index: offset and size of each chunk (5.4)", index, entry.end - 4)]
    parts += [("CRC-32C of the shard index (5.4)", entry.end - 4, entry.end)]
    return _parts(raw, parts)


def document(path: Path, index: int = 1) -> str:
    """A `zarr.json` of a file, by default that of the first array, indented for people."""
    with zipfile.ZipFile(path) as archive:
        return _indented(json.loads(archive.read(archive.infolist()[index])))


def _indented(value: Any, level: int = 0, *, width: int = 100) -> str:
    """JSON with a line for every item of what doesn't fit into one."""
    line = json.dumps(value)
    if len(line) + 2 * level <= width or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        items = [f'"{key}": {_indented(inner, level + 1)}' for key, inner in value.items()]
    else:
        items = [_indented(inner, level + 1) for inner in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    inside = ",\n".join("  " * (level + 1) + item for item in items)
    return f"{begin}\n{inside}\n{'  ' * level}{end}"


def _read(path: Path) -> tuple[Layout, bytes]:
    with files.opened(path) as fd:
        return read_finished(fd, path).layout, path.read_bytes()


def _parts(raw: bytes, parts: list[Part]) -> str:
    return "\n".join(_part(raw, *part) for part in parts)


def _part(raw: bytes, title: str, first: int, end: int) -> str:
    lines, previous, skipped = [f"; {title}, bytes {first}..{end}"], b"", False
    for at in range(first, end, BYTES_PER_LINE):
        row = raw[at : min(at + BYTES_PER_LINE, end)]
        if row == previous:
            skipped = True
            continue
        lines += ["*"] if skipped else []
        skipped, previous = False, row
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {text}".rstrip())
    return "\n".join(lines + (["*"] if skipped else []))


def blocks(folder: Path) -> dict[tuple[Path, str], str]:
    """What stands on a page between `<!-- NAME -->` and `<!-- /NAME -->`, by page and name."""
    sharded, blosc, pcodec = (
        sharded_store(folder),
        packed_store(folder, "blosc"),
        packed_store(folder, "pcodec"),
    )
    shard = dump_shard(sharded, sample_nbytes=4096, slot_nbytes=4160)
    return {
        (SPEC, "hexdump"): f"```\n{dump(smallest_store(folder))}\n```\n",
        (SPEC, "sharded document"): f"```json\n{document(sharded)}\n```\n",
        (SPEC, "sharded hexdump"): f"```\n{shard}\n```\n",
        (WRITING, "building hexdump"): f"```\n{dump_building(building_store(folder))}\n```\n",
        (PACKED, "packed codecs"): f"```json\n{inner_codecs(blosc)}\n{inner_codecs(pcodec)}```\n",
        (PACKED, "packed hexdump"): f"```\n{dump_packed(blosc, num_chunks=2)}\n```\n",
    }


def split_page(page: str, name: str) -> tuple[str, str, str]:
    """The page before a block, the block, and the page behind it; the marks are in the outer parts."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, rest = page.split(begin)
    block, behind = rest.split(end)
    return before + begin, block, end + behind


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = blocks(Path(folder))
    if "--write" not in sys.argv[1:]:
        print("\n".join(made.values()))
        return
    for (page, name), block in made.items():
        before, _, behind = split_page(page.read_text(), name)
        page.write_text(before + block + behind)


if __name__ == "__main__":
    main()
