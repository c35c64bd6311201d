"""Print the annotated hex dumps of docs/format/spec.md, section 12; `--write` puts them into the page."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ups_store
from ups_store.format.layout import Layout
from ups_store.read.catalog import read_finished
from ups_store.system.files import close, open_existing

SPEC = Path(__file__).parents[1] / "docs" / "format" / "spec.md"
BYTES_PER_LINE = 16

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


def dump(path: Path) -> str:
    """Every byte of a store, entry by entry."""
    layout, raw = _read(path)
    parts: list[Part] = []
    for entry in layout.entries:
        parts.append((f"local header of {entry.name} (3.3)", entry.offset, entry.data_offset))
        parts.append((f"data of {entry.name}", entry.data_offset, entry.end))
    offset = layout.directory_offset
    for entry in layout.entries:
        parts.append((f"central record of {entry.name} (3.5)", offset, offset + entry.central_nbytes))
        offset += entry.central_nbytes
    parts += [
        ("ZIP64 end record (3.6)", offset, offset + 56),
        ("ZIP64 end locator", offset + 56, offset + 76),
        ("end record and comment", offset + 76, len(raw)),
    ]
    return "\n".join(_part(raw, *part) for part in parts)


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
    return "\n".join(_part(raw, *part) for part in parts)


def array_document(path: Path) -> str:
    """The `zarr.json` of a store's only array, indented for people."""
    layout, raw = _read(path)
    entry = layout.entries[1]
    return _indented(json.loads(raw[entry.data_offset : entry.end]))


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
    fd = open_existing(path)
    try:
        return read_finished(fd, path).layout, path.read_bytes()
    finally:
        close(fd)


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


def blocks(folder: Path) -> dict[str, str]:
    """What stands on the page between `<!-- NAME -->` and `<!-- /NAME -->`, by name."""
    sharded = sharded_store(folder)
    return {
        "hexdump": f"```\n{dump(smallest_store(folder))}\n```\n",
        "sharded document": f"```json\n{array_document(sharded)}\n```\n",
        "sharded hexdump": f"```\n{dump_shard(sharded, sample_nbytes=4096, slot_nbytes=4160)}\n```\n",
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
    page = SPEC.read_text()
    for name, block in made.items():
        before, _, behind = split_page(page, name)
        page = before + block + behind
    SPEC.write_text(page)


if __name__ == "__main__":
    main()
