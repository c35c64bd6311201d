"""Print the annotated hex dump of the smallest store; `--write` puts it into docs/format/spec.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import ups_store

SPEC = Path(__file__).parents[1] / "docs" / "format" / "spec.md"
BEGIN, END = "<!-- hexdump -->\n", "<!-- /hexdump -->"
BYTES_PER_LINE = 16


def smallest_store(folder: Path) -> Path:
    path = folder / "smallest.zarr.zip"
    arrays = {"u": ups_store.ArraySpec((1,), "int8")}
    with ups_store.create(path, arrays, identity={}) as writer:
        writer.commit(0, {"u": np.int8(7)})
        return writer.finish()


def dump(path: Path) -> str:
    from ups_store.catalog import read_finished
    from ups_store.files import close, open_existing

    fd = open_existing(path)
    try:
        layout = read_finished(fd, path).layout
    finally:
        close(fd)
    raw = path.read_bytes()
    parts: list[tuple[str, int, int]] = []
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


def _part(raw: bytes, title: str, first: int, end: int) -> str:
    lines, previous, skipped = [f"; {title}, bytes {first}..{end}"], b"", False
    for at in range(first, end, BYTES_PER_LINE):
        row = raw[at : min(at + BYTES_PER_LINE, end)]
        if row == previous and len(set(row)) == 1:
            skipped = True
            continue
        lines += ["*"] if skipped else []
        skipped, previous = False, row
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {text}".rstrip())
    return "\n".join(lines + (["*"] if skipped else []))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = f"```\n{dump(smallest_store(Path(folder)))}\n```\n"
    if "--write" not in sys.argv[1:]:
        print(text)
        return
    page = SPEC.read_text()
    before, rest = page.split(BEGIN)
    SPEC.write_text(before + BEGIN + text + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
