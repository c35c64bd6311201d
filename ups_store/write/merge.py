"""Parts of one identity into one file, by sequential copy; no sample is encoded again (spec 15.5).

Checksums of what is copied inside the kernel follow from those of the parts, so that damage on the way is
found by `verify`. The file appears when it is whole; until then the parts are what there is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ups_store.errors import TruncatedError
from ups_store.format.checksum import combine_crc32, crc32, crc32_before, crc32c
from ups_store.format.layout import ArrayLayout
from ups_store.format.zip_records import Entry, pack_directory
from ups_store.read.catalog import Catalog, read_finished
from ups_store.system import files
from ups_store.system.progress import Progress
from ups_store.write.blueprint import Blueprint
from ups_store.write.target import new_file

_BLOCK_BYTES = 8 << 20  # of what has to be read


@dataclass(frozen=True)
class _Source:
    """A part and what it holds."""

    path: Path
    catalog: Catalog


def merge_parts(
    parts: Sequence[Path], target: Path, blueprint: Blueprint, *, progress: Progress | None = None
) -> None:
    """Write the samples of the parts, in their order, as one store; what is at the path is replaced.

    Args:
        parts: Finished stores of one identity.
        target: Where it will be.
        blueprint: Of the whole, with the constants of the parts and their lengths.
        progress: Called with the number of payload bytes that were copied since the last call.
    Raises:
        TruncatedError: If a part was cut.
        DiskFullError: If there is no room; the parts stay.
    """
    layout = blueprint.layout
    sources = []
    for path in parts:
        with files.opened(path) as fd:
            sources.append(_Source(path, read_finished(fd, path)))
    with new_file(target, force=True, needed_bytes=layout.file_nbytes) as fd:
        files.allocate(fd, layout.file_nbytes)
        crcs = [crc32(document) for document in blueprint.documents]
        for entry, document, crc in zip(layout.metadata, blueprint.documents, crcs, strict=True):
            files.write_at(fd, entry.offset, entry.pack_local_header(crc) + document)
        writer = _EntryWriter(fd, sources, blueprint, progress or (lambda nbytes: None))
        crcs += [writer.write(array, array.entry) for array in layout.arrays.values() if array.entry]
        files.write_at(fd, layout.directory_offset, pack_directory(layout.entries, crcs))


class _EntryWriter:
    """Writes data entries; knows the parts."""

    def __init__(self, fd: int, sources: Sequence[_Source], blueprint: Blueprint, progress: Progress) -> None:
        self._fd, self._sources, self._blueprint, self._progress = fd, sources, blueprint, progress

    def write(self, array: ArrayLayout, entry: Entry) -> int:
        """Write the entry of one array, local header included; returns its CRC-32."""
        if array.meta.is_sharded or array.meta.is_ragged:
            crc, trailer = self._copied(array), array.pack_index()
        else:
            crc, castagnoli = self._rewritten(array)
            trailer = struct.pack("<I", castagnoli)
        files.write_at(self._fd, entry.end - len(trailer), trailer)
        crc = crc32(trailer, crc)
        files.write_at(self._fd, entry.offset, entry.pack_local_header(crc))
        return crc

    def _copied(self, array: ArrayLayout) -> int:
        """Copy samples as they stand; CRC-32 of all of them."""
        offset, crcs = array.offset, []
        for source, part in self._parts_of(array):
            nbytes = part.meta.shape[0] * part.stride
            with files.opened(source.path) as fd:
                copied = files.copy_range(fd, part.offset, self._fd, offset, nbytes)
            _check_whole(source.path, nbytes, copied)
            trailer = part.pack_index()
            whole = source.catalog.crcs[source.catalog.layout.entries.index(_entry(part))]
            crcs.append((crc32_before(whole, crc32(trailer), len(trailer)), nbytes))
            offset += nbytes
            self._progress(nbytes)
        return combine_crc32(crcs)

    def _rewritten(self, array: ArrayLayout) -> tuple[int, int]:
        """Write the payload of a plain chunk; its CRC-32 and CRC-32C."""
        crc, castagnoli, offset = 0, 0, array.offset
        for block in self._blocks_of(array):
            files.write_at(self._fd, offset, block)
            crc, castagnoli, offset = crc32(block, crc), crc32c(block, castagnoli), offset + len(block)
            self._progress(len(block))
        return crc, castagnoli

    def _blocks_of(self, array: ArrayLayout) -> Iterator[bytes]:
        given = self._blueprint.constants.get(array.meta.name)
        if given is not None:  # a constant, or offsets, which count from the first sample of all
            yield given
            return
        for source, part in self._parts_of(array):
            with files.opened(source.path) as fd:
                for first in range(0, part.meta.nbytes, _BLOCK_BYTES):
                    num = min(_BLOCK_BYTES, part.meta.nbytes - first)
                    block = files.read_at(fd, part.offset + first, num)
                    _check_whole(source.path, num, len(block))
                    yield block

    def _parts_of(self, array: ArrayLayout) -> Iterator[tuple[_Source, ArrayLayout]]:
        """What the parts have of an array; nothing of those where it is empty."""
        for source in self._sources:
            part = source.catalog.layout.arrays[array.meta.name]
            if part.entry is not None:
                yield source, part


def _entry(array: ArrayLayout) -> Entry:
    assert array.entry is not None
    return array.entry


def _check_whole(path: Path, expected: int, found: int) -> None:
    if found < expected:
        problem = "another program cut the part while it was copied"
        raise TruncatedError(problem, path=path, expected=f"{expected} bytes", found=found)
