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
from ups_store.format.layout import CHECKSUM_BYTES, INDEX_RECORD_BYTES, plan
from ups_store.format.metadata import ArrayMeta, parse_array
from ups_store.format.root import FORMAT_VERSION, RootMeta
from ups_store.format.zip_records import ROOT_NAME, Entry
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
    Documents,
    check_arrays,
    check_regular,
    num_samples_of,
    read_arrays,
    read_root,
    reads_of,
)
from ups_store.read.directory import Directory, read_directory
from ups_store.read.store_file import read_bytes
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
    read = reads_of(fd)
    directory = read_directory(read, files.size(fd), path)
    claim = directory.next_claim(ROOT_NAME, 0)
    root = read_root(read, path, claim)
    packing = _packing_of(root, path)
    parse = partial(parse_array, path=path, document_of=partial(packed_document, packing=packing))
    documents = read_arrays(read, path, directory.next_claim, claim, root.identity["arrays"], parse)
    check_arrays(root, documents, path)
    metas = [meta for meta, _ in documents.metas]
    for meta in metas:
        check_chunk_size(meta, path)
    mapped = RootMeta(root.version, root.config_hash, root.identity, root.attrs)
    texts = [(meta, len(meta.to_json())) for meta in metas]
    layout = plan(len(mapped.to_json()), texts, num_samples_of(documents, path))
    arrays, crcs = _place(metas, packing, documents, directory, path)
    catalog = PackedCatalog(root, layout, crcs, packing, arrays, tuple(documents.entries), files.size(fd))
    directory.check(catalog.entries, crcs, is_newer=False)
    return catalog


def _packing_of(root: RootMeta, path: Path) -> Packing:
    """How the arrays of a store are packed, which must be a packed one of a version that is known."""
    if root.packed is None:
        hint = "it is mapped as it is: open it with `ups_store.open`; there is nothing to unpack"
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
    return parse_packing(root.packed, path=path)


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
    metas: list[ArrayMeta], packing: Packing, documents: Documents, directory: Directory, path: Path
) -> tuple[dict[str, PackedArray], tuple[int, ...]]:
    """The data entries, whose sizes the directory says, and the CRC-32s of all entries (spec 13.3)."""
    placed, crcs, offset = {}, list(documents.crcs), documents.entries[-1].end
    for meta in metas:
        chain, entry = chain_of(packing, meta.dtype), None
        if meta.nbytes:
            entry, crc = directory.next_claim(meta.chunk_key, offset)
            crcs.append(crc)
            offset = entry.end
        placed[meta.name] = array = PackedArray(meta, entry, chain)
        num_chunks = meta.shape[0] if meta.is_sharded else 1
        least = array.index_nbytes + num_chunks * (CHECKSUM_BYTES + 1)
        if entry and entry.nbytes < least:
            raise FormatError(
                "data entry",
                path=path,
                array=meta.name,
                kind="geometry",
                clause="13.6",
                expected=f"at least {least} bytes",
                found=entry.nbytes,
            )
    return placed, tuple(crcs)


def read_index(fd: int, array: PackedArray, path: Path) -> npt.NDArray[np.int64]:
    """Where each sample's chunk begins in the file, and past the last one its end: shape (N + 1,).

    Raises:
        CorruptChunkError: If the index is damaged, or its chunks don't follow one another (spec 13.5).
        TruncatedError: If another program cut the file.
    """
    assert array.entry is not None
    where = (array.entry.end - array.index_nbytes, array.entry.end)
    raw = read_bytes(fd, where[0], array.index_nbytes, path=path)
    if raw[-CHECKSUM_BYTES:] != struct.pack("<I", crc32c(raw[:-CHECKSUM_BYTES])):
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
        clause="5.4",
    )
