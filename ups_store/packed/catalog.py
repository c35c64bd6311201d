"""What a packed file holds and where: every address is checked before anything is read (spec 13.6)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError, FormatError, VersionTooNewError
from ups_store.format.checksum import crc32c
from ups_store.format.layout import CHECKSUM_BYTES, FORMAT_VERSION, INDEX_RECORD_BYTES
from ups_store.format.metadata import ArrayMeta, RootMeta, parse_array
from ups_store.format.zip_records import ARCHIVE_COMMENT, CentralRecord, EndRecords, Entry
from ups_store.packed.chunk_codecs import (
    MAX_CHUNK_BYTES,
    Chain,
    Packing,
    chain_of,
    packed_document,
    parse_packing,
)
from ups_store.read.catalog import (
    Catalog,
    array_name,
    check_regular,
    checked_layout,
    read_json,
    read_root,
)
from ups_store.read.directory import read_directory
from ups_store.system import files


@dataclass(frozen=True)
class PackedArray:
    """One array of a packed store.

    Attributes:
        meta: The array.
        entry: Its data entry; None for an array without elements.
        chain: How its chunks are packed.
    """

    meta: ArrayMeta
    entry: Entry | None
    chain: Chain

    @property
    def index_nbytes(self) -> int:
        """Bytes of the shard index, its checksum included; 0 for a plain chunk."""
        return self.meta.shape[0] * INDEX_RECORD_BYTES + CHECKSUM_BYTES if self.meta.is_sharded else 0


@dataclass(frozen=True)
class PackedCatalog(Catalog):
    """What a packed store holds and where; its `layout` is the geometry of the mapped form.

    Attributes:
        packing: How it is packed.
        arrays: By name, sorted.
        metadata: Entries of the `zarr.json` documents, root first.
        nbytes: Length of the file.
    """

    packing: Packing
    arrays: dict[str, PackedArray]
    metadata: tuple[Entry, ...]
    nbytes: int

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries in file order."""
        return (*self.metadata, *(array.entry for array in self.arrays.values() if array.entry))


def read_packed(fd: int, path: Path) -> PackedCatalog:
    """Read and check the catalog of a packed file (spec 13.6).

    Raises:
        FormatError: Says what is wrong where, with the clause; kind "not_packed" for a mapped store.
        VersionTooNewError: For a newer version, a minor one too: it may pack in ways that are unknown here.
    """
    check_regular(fd, path)
    directory = read_directory(fd, path)
    root = read_root(fd, directory.root, path)
    if root.packed is None:
        hint = "open it with `ups_store.open`"
        raise FormatError("it is no packed store", path=path, kind="not_packed", clause="13.2", hint=hint)
    if root.version > FORMAT_VERSION:
        expected, found = ("{}.{}".format(*version) for version in (FORMAT_VERSION, root.version))
        raise VersionTooNewError(
            "packed by a newer minor version, perhaps in a way that this reader doesn't know",
            path=path,
            clause="10.3",
            expected=f"at most {expected}",
            found=found,
        )
    packing = parse_packing(root.packed, path=path)
    metas = [_read_array(fd, record, packing, path) for record in directory.arrays]
    mapped = RootMeta(root.version, root.config_hash, root.identity, root.attrs)
    documents = [(meta, len(meta.to_json())) for meta in metas]
    layout = checked_layout(mapped, len(mapped.to_json()), documents, path)
    metadata = tuple(Entry(r.name, r.offset, r.nbytes) for r in (directory.root, *directory.arrays))
    arrays = _place(metas, packing, metadata[-1].end, directory.records[len(metadata) :], path)
    crcs = tuple(record.crc for record in directory.records)
    catalog = PackedCatalog(root, layout, crcs, packing, arrays, metadata, files.size(fd))
    _check_end(catalog, directory.end, path)
    return catalog


def _read_array(fd: int, record: CentralRecord, packing: Packing, path: Path) -> ArrayMeta:
    raw, document_of = read_json(fd, record, path), partial(packed_document, packing=packing)
    meta = parse_array(array_name(record, path), raw, path=path, document_of=document_of)
    check_chunk_size(meta, path)
    return meta


def check_chunk_size(meta: ArrayMeta, path: Path, *, hint: str | None = None) -> None:
    """Refuse chunks that no codec takes, before memory is allocated for one (spec 13.8)."""
    nbytes = meta.sample_nbytes if meta.is_sharded else meta.nbytes
    if nbytes > MAX_CHUNK_BYTES:
        raise FormatError(
            "chunk too large for a packed store",
            path=path,
            array=meta.name,
            kind="limits",
            clause="13.8",
            expected=f"at most {MAX_CHUNK_BYTES} bytes",
            found=nbytes,
            hint=hint,
        )


def _place(
    metas: list[ArrayMeta], packing: Packing, offset: int, records: tuple[CentralRecord, ...], path: Path
) -> dict[str, PackedArray]:
    """The data entries: names and order from the metadata, sizes from the directory, no gaps (spec 13.3)."""
    placed, rest = {}, list(records)
    for meta in metas:
        chain, entry = chain_of(packing, meta.dtype), None
        if meta.nbytes:
            found = rest.pop(0) if rest else None
            if found is None or (found.name, found.offset) != (meta.chunk_key, offset):
                expected = f"{meta.chunk_key} at byte {offset}"
                raise _bad_geometry("data entry", path, meta.name, expected, found)
            entry = Entry(found.name, offset, found.nbytes)
            offset = entry.end
        placed[meta.name] = array = PackedArray(meta, entry, chain)
        if entry and entry.nbytes < array.index_nbytes + CHECKSUM_BYTES:
            raise _bad_geometry("data entry", path, meta.name, f"{array.index_nbytes} bytes or more", found)
    if rest:
        raise FormatError("unknown entry", path=path, kind="unknown_entry", clause="13.3", found=rest[0].name)
    return placed


def _bad_geometry(what: str, path: Path, array: str | None, expected: object, found: object) -> FormatError:
    return FormatError(
        what, path=path, array=array, kind="geometry", clause="13.3", expected=expected, found=found
    )


def _check_end(catalog: PackedCatalog, end: EndRecords, path: Path) -> None:
    """Entries without padding, the directory right behind them: so all extents lie within the file."""
    entries = catalog.entries
    nbytes = sum(entry.central_nbytes for entry in entries)
    expected = EndRecords(len(entries), entries[-1].end, nbytes, ARCHIVE_COMMENT)
    if end != expected:
        raise _bad_geometry("end records", path, None, expected, end)


def read_index(fd: int, array: PackedArray, path: Path) -> npt.NDArray[np.int64]:
    """Where each sample's chunk begins in the file, and past the last one its end: shape (N + 1,).

    Raises:
        CorruptChunkError: If the index is damaged, or its chunks don't follow one another (spec 13.5).
    """
    assert array.entry is not None
    where = (array.entry.end - array.index_nbytes, array.entry.end)
    raw = files.read_at(fd, where[0], array.index_nbytes)
    is_whole = len(raw) == array.index_nbytes
    if not is_whole or raw[-CHECKSUM_BYTES:] != struct.pack("<I", crc32c(raw[:-CHECKSUM_BYTES])):
        raise _bad_index(array, where, path, "checksum")
    index = np.frombuffer(raw[:-CHECKSUM_BYTES], "<u8").reshape(-1, 2)
    data_nbytes = where[0] - array.entry.data_offset
    if (index > data_nbytes).any():  # before sums could wrap around
        raise _bad_index(array, where, path, "extents outside the entry")
    edges = np.concatenate([index[:, 0], [data_nbytes]]).astype(np.int64)
    if edges[0] != 0 or (np.diff(edges) != index[:, 1]).any() or (index[:, 1] <= CHECKSUM_BYTES).any():
        raise _bad_index(array, where, path, "chunks that follow one another")
    return edges + array.entry.data_offset


def _bad_index(array: PackedArray, where: tuple[int, int], path: Path, what: str) -> CorruptChunkError:
    return CorruptChunkError(
        f"shard index: {what}",
        path=path,
        array=array.meta.name,
        byte_range=where,
        kind="shard_index",
        clause="13.5",
    )
