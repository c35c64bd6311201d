"""`pack` writes a store with compressed chunks, `unpack_store` makes the same mapped file again (spec 13)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError, DiskFullError, FormatError, SpecError, StoreError
from ups_store.format.canonical import canonical_json
from ups_store.format.checksum import crc32, crc32c
from ups_store.format.metadata import ArrayMeta
from ups_store.format.root import FORMAT_VERSION, RootMeta
from ups_store.format.zip_records import ROOT_NAME, Entry, pack_directory
from ups_store.packed.codecs import ChunkCodec, Packing
from ups_store.packed.store import PackedStore, check_chunk_size
from ups_store.read.base import AnyStore
from ups_store.read.catalog import fingerprint_of, read_finished
from ups_store.read.open import open_any, open_store
from ups_store.read.ragged import check_not_ragged
from ups_store.read.recovery import UNPACKING_SUFFIX
from ups_store.read.store import Store
from ups_store.system import files
from ups_store.system.files import (
    OWN_USE,
    Progress,
    check_file_or_free,
    check_not_read_only,
    take_over_permissions,
)
from ups_store.system.memory import num_cores
from ups_store.system.parallel import in_order
from ups_store.system.paths import check_store_name, path_of
from ups_store.writing.create import create
from ups_store.writing.plan import identity_of
from ups_store.writing.target import check_not_source, check_sound, check_target, new_file, publish_file

BLOCK_BYTES = 32 << 20  # of payload that is encoded at a time


@dataclass(frozen=True)
class PackReport:
    """What packing did."""

    path: Path  # the packed file
    nbytes: int  # its length
    mapped_nbytes: int  # length of the mapped file


def pack(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    codec: str = "blosc",
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Pack a mapped file, or unpack a packed one; unlike for `pack_store`, `out` may be the file itself.

    What is new is complete, checked and durable before it takes the place of what was there; until then both
    take room on the disk. What is there already in that form stays as it is.

    Args:
        path: A finished store in one file.
        out: File to write; the same as `path` to replace it.
        codec: "blosc" or "pcodec" to pack it, "none" to unpack it.
        force: Whether to replace what else is there; the file itself also if it is read-only.
        progress: Called with the number of payload bytes that were written since the last call.
    Raises:
        SpecError: For an unknown codec, or a file that is packed by another one, kind "packed".
        AccessError: If the file, which is to be replaced, has no write bit; kind "read_only".
        CorruptChunkError: If the store is damaged; it stays.
        DiskFullError: If there is no room.
    """
    target = path_of(out)
    with open_any(path) as store:
        if store.path != target:
            if codec == "none" and isinstance(store, PackedStore):
                return unpack_store(store, target, force=force, progress=progress)
            return pack_store(store, target, codec=codec, force=force, progress=progress).path
        if codec == store.codec:
            return target
        destination = check_target(target, force=True)
        if not force:
            check_not_read_only(destination, hint="make it writable with chmod u+w, or say force=True")
        if codec == "none" and isinstance(store, PackedStore):
            return _unpack(store, target, destination, force=True, progress=progress)
        return _pack(store, target, Packing.of(codec, None, store.fingerprint), True, None, progress).path


def pack_store(
    store: AnyStore,
    target: str | os.PathLike[str],
    *,
    codec: str = "blosc",
    level: int | None = None,
    force: bool = False,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Write a finished store with compressed chunks; it appears when it is whole, and isn't resumable.

    The store is checked byte by byte first, and every chunk is decoded again and compared.

    Args:
        store: A finished mapped store of this version of the format, in one file.
        target: File to write, usually `<task>_<split>.packed.zarr.zip`.
        codec: "blosc" or "pcodec".
        level: Effort: blosc 0 to 9, pcodec 0 to 12; a measured default where not given.
        force: Whether to replace what is there.
        num_threads: Threads that encode; one per processor by default.
        progress: Called with the number of payload bytes that were packed since the last call.
    Raises:
        SpecError: For an unknown codec or level, if the target exists or is the store (kind "same_file"), if
            the store is packed already (kind "packed"), or the package pcodec is missing.
        CorruptChunkError: If the store is damaged.
        DiskFullError: If there is no room; nothing is left then.
    """
    path = path_of(target)
    check_not_source(path, [store.path])
    check_store_name(path)
    check_target(path, force=force)
    packing = Packing.of(codec, level, store.fingerprint)
    return _pack(store, path, packing, force, num_threads, progress)


def _pack(
    store: AnyStore,
    path: Path,
    packing: Packing,
    force: bool,
    num_threads: int | None,
    progress: Progress | None,
) -> PackReport:
    if not isinstance(store, Store):
        is_packed = isinstance(store, PackedStore)
        hint = "unpack it first, with `ups-store unpack`" if is_packed else "pack each of its `partitions`"
        actual = f"packed by {store.codec}" if is_packed else type(store).__name__
        expected = "a mapped store in one file"
        raise SpecError("pack", kind="packed", path=store.path, expected=expected, found=actual, hint=hint)
    check_not_ragged(
        store.metas.values(), "packing", "ship the store as it is, or compress the file", path=store.path
    )
    with files.opened(store.path) as fd:
        catalog = read_finished(fd, store.path)
    if store.is_partial or store.version > FORMAT_VERSION or fingerprint_of(catalog) != store.fingerprint:
        hint = "finish its build, open it again, or upgrade ups-store"
        raise SpecError("not a finished store of this version", kind="unfinished", path=store.path, hint=hint)
    metas = [array.meta for array in catalog.layout.arrays.values()]
    for meta in metas:
        check_chunk_size(meta, store.path, hint="ship the store as it is, without packing it")
        if meta.is_constant and meta.attrs:
            problem = "attributes of a constant can't be made again by unpacking"
            raise SpecError(problem, kind="attrs", path=store.path, array=meta.name)
    with new_file(path, force=force, needed_bytes=store.nbytes) as target_fd:
        check_sound(store)
        nbytes = _write(target_fd, store, metas, packing, num_threads or num_cores(), progress)
    return PackReport(path, nbytes, catalog.layout.file_nbytes)


def _write(
    fd: int,
    store: Store,
    metas: list[ArrayMeta],
    packing: Packing,
    num_threads: int,
    progress: Progress | None,
) -> int:
    """Write entries one behind the other, each local header when its data are known; returns the length."""
    entries: list[Entry] = []
    crcs: list[int] = []

    def add(name: str, pieces: Iterable[bytes]) -> None:
        offset, crc, nbytes = entries[-1].end if entries else 0, 0, 0
        data_offset = Entry(name, offset, 0).data_offset
        for piece in pieces:
            files.write_at(fd, data_offset + nbytes, piece)
            crc, nbytes = crc32(piece, crc), nbytes + len(piece)
        entry = Entry(name, offset, nbytes)
        files.write_at(fd, offset, entry.pack_local_header(crc))
        entries.append(entry)
        crcs.append(crc)

    document, attrs = dict(store.identity_document), dict(store.attrs)
    root = RootMeta(store.version, store.config_hash, document, attrs, ("packed",), packing.to_json())
    add(ROOT_NAME, [root.to_json()])
    for meta in metas:
        add(f"{meta.name}/{ROOT_NAME}", [canonical_json(packing.document_of(meta), what=meta.name)])

    def pieces(meta: ArrayMeta) -> Iterator[bytes]:
        """Give an array's chunks, and behind those of a shard its index."""
        encode = partial(_encode, packing.codec_of(meta.dtype))
        ahead = max(BLOCK_BYTES // max(1, meta.sample_nbytes), 2 * num_threads)
        values = store[meta.name] if meta.is_sharded else [store[meta.name]]
        index: list[tuple[int, int]] = []
        # By the pool: in the main thread Blosc uses its own threads, and makes other bytes each time.
        for chunk in in_order(pool, encode, values, ahead=ahead):
            index.append((sum(index[-1]) if index else 0, len(chunk)))
            yield chunk
            if progress is not None:
                progress(meta.sample_nbytes if meta.is_sharded else meta.nbytes)
        if meta.is_sharded:
            records = np.array(index, "<u8").tobytes()
            yield records + struct.pack("<I", crc32c(records))

    with ThreadPoolExecutor(num_threads) as pool:
        for meta in metas:
            if meta.nbytes:
                add(meta.chunk_key, pieces(meta))
    directory = pack_directory(entries, crcs)
    files.write_at(fd, entries[-1].end, directory)
    return entries[-1].end + len(directory)


def _encode(codec: ChunkCodec, value: npt.NDArray[Any]) -> bytes:
    """Encode one chunk, its checksum behind it, after it was seen to decode to the same bytes."""
    payload = np.ascontiguousarray(value)
    packed = codec.encode(payload)
    decoded = np.empty(payload.nbytes, np.uint8)
    codec.decode(packed, decoded)
    if not np.array_equal(decoded, payload.reshape(-1).view(np.uint8)):
        raise CorruptChunkError("a chunk decodes to other bytes than were encoded", hint="use another codec")
    return packed + struct.pack("<I", crc32c(packed))


def unpack_store(
    packed: PackedStore,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the mapped form of a packed store: byte for byte the file that was packed.

    Every chunk's checksum is checked, and in the end that all bytes are those of before. An interrupted run
    is continued by the next one.

    Args:
        packed: A packed store, open.
        target: File to write.
        force: Whether to replace what is there: a finished store, and what an interrupted run of another
            packed store left.
        progress: Called with the number of payload bytes that were unpacked since the last call.
    Raises:
        SpecError: If the target exists, or is the packed store (kind "same_file", forced or not).
        CorruptChunkError: If a chunk is damaged, or the result isn't what was packed.
        DiskFullError: If there is no room for the whole store.
    """
    path = path_of(target)
    check_not_source(path, [packed.path])
    check_store_name(path)
    destination = check_target(path, force=force)
    check_file_or_free(destination)
    return _unpack(packed, path, destination, force=force, progress=progress)


def _unpack(packed: PackedStore, path: Path, target: Path, *, force: bool, progress: Progress | None) -> Path:
    unfinished = target.with_name(target.name + UNPACKING_SUFFIX)
    try:  # an earlier run may have ended just before the result got its name
        with open_store(unfinished) as store:
            is_unpacked = store.fingerprint == packed.fingerprint
    except StoreError:
        is_unpacked = False
    if not is_unpacked:
        constants = packed.constants
        options: dict[str, Any] = {
            "constants": constants,
            "dims": {name: packed.dims[name] for name in constants},
            "identity": packed.identity,
            "partition": packed.partition,
        }
        if identity_of(packed.arrays, **options) != packed.identity_document:
            raise FormatError(
                "its identity document isn't one of version 1.0, so no store can be made with it",
                path=packed.path,
                kind="identity_arrays",
                clause="8.1",
                hint="`ups-store verify` says what is wrong; `ups_store.open` reads its samples",
            )
        options |= {"attrs": packed.attrs, "on_mismatch": "restart" if force else "raise"}
        try:
            with create(unfinished, packed.arrays, **options) as writer:
                # Before it holds anything.
                take_over_permissions(writer.building.fd, target, extra=OWN_USE)
                nbytes = sum(packed.metas[name].sample_nbytes for name in packed.arrays)
                step = max(1, BLOCK_BYTES // max(1, nbytes))
                missing = writer.missing().tolist()
                for first in range(0, len(missing), step):
                    samples = missing[first : first + step]
                    batch = packed.gather(samples)
                    writer.commit_many(samples, batch)
                    if progress:
                        progress(sum(values.nbytes for values in batch.values()))
                writer.finish()
        except DiskFullError as error:
            error.path = str(path)  # what the user asked for, not the name it is built under
            raise
    try:
        with files.opened(unfinished) as fd:
            fingerprint = fingerprint_of(read_finished(fd, unfinished))
            if fingerprint != packed.fingerprint:
                raise CorruptChunkError(
                    "unpacking gave other bytes than were packed",
                    path=packed.path,
                    kind="fingerprint",
                    clause="13.7",
                    expected=packed.fingerprint,
                    found=fingerprint,
                    hint="run it again: the unfinished file, which may have held another store's samples, is "
                    "gone; if it says this once more, pack the store again",
                )
            publish_file(fd, unfinished, target, force=force)
    finally:
        files.remove(unfinished)
    return path
