"""`PackedStore`: a packed file, of which each chunk is decoded when it is used (spec 13)."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import (
    CorruptChunkError,
    FormatError,
    MemoryLimitError,
    VersionTooNewError,
)
from ups_store.format.canonical import canonical_json
from ups_store.format.checksum import combine_crc32, crc32, crc32c
from ups_store.format.layout import CHECKSUM_BYTES, INDEX_RECORD_BYTES, ArrayLayout, plan
from ups_store.format.metadata import ArrayMeta, dtype_of, parse_array
from ups_store.format.root import FORMAT_VERSION, RootMeta
from ups_store.format.zip_records import ROOT_NAME, Entry
from ups_store.packed.codecs import MAX_CHUNK_BYTES, ChunkCodec, Packing
from ups_store.read.catalog import (
    Catalog,
    check_arrays,
    check_regular,
    fingerprint_of,
    num_samples_of,
    read_arrays,
    read_directory,
    read_root,
    reads_of,
)
from ups_store.read.chunked import ChunkedStore, ChunkRead
from ups_store.read.preload import PreloadReport, Request, preload, ram_budget, refused
from ups_store.read.store_file import Chunk, StoreFile, chunk_of, read_bytes
from ups_store.read.verify import Checked, Problem, Report, Sums, Verifier
from ups_store.system import files, memory
from ups_store.system.files import Progress
from ups_store.system.memory import num_cores
from ups_store.system.parallel import for_each
from ups_store.system.paths import check_one_file, path_of

MAX_THREADS = 8
BYTES_PER_THREAD = 1 << 20  # less is decoded sooner than another thread begins
PRELOAD_BYTES = 64 << 20  # between two calls of `progress`


@dataclass(frozen=True)
class PackedArray:
    """One array of a packed store."""

    layout: ArrayLayout  # where it lies in the mapped form
    entry: Entry | None  # its data entry here; None for an array without elements
    codec: ChunkCodec  # how its chunks are packed

    @cached_property
    def num_chunks(self) -> int:
        """Count the chunks, where it has elements."""
        return self.layout.meta.shape[0] if self.layout.meta.is_sharded else 1

    @cached_property
    def index_nbytes(self) -> int:
        """Bytes of the shard index, its checksum included; 0 for a plain chunk."""
        return self.num_chunks * INDEX_RECORD_BYTES + CHECKSUM_BYTES if self.layout.meta.is_sharded else 0


@dataclass(frozen=True)
class PackedCatalog(Catalog):
    """What a packed file holds and where; its `layout` is the geometry of the mapped form."""

    packing: Packing
    arrays: dict[str, PackedArray]  # by name, sorted
    metadata: tuple[Entry, ...]  # entries of the `zarr.json` documents, root first
    directory_offset: int  # first byte of the central directory
    nbytes: int  # length of the file

    def _read_again(self, fd: int, path: Path) -> Catalog:
        return read_packed(fd, path)


def mapped_root(root: RootMeta) -> RootMeta:
    """Make the root's metadata of the mapped form."""
    return RootMeta(root.version, root.config_hash, root.identity, root.attrs)


def read_packed(fd: int, path: Path) -> PackedCatalog:
    """Read and check the catalog of a packed file; every address is checked before it is used (spec 13.6)."""
    check_regular(fd, path)
    read = reads_of(fd)
    directory = read_directory(read, files.size(fd), path)
    claim = directory.next_claim(ROOT_NAME, 0)
    root = read_root(read, path, claim)
    if root.packed is None:
        hint = "it is mapped as it is: open it with `ups_store.open`; there is nothing to unpack"
        raise FormatError("it is no packed store", path=path, kind="not_packed", clause="13.2", hint=hint)
    if root.version > FORMAT_VERSION:
        expected, actual = ("{}.{}".format(*version) for version in (FORMAT_VERSION, root.version))
        raise VersionTooNewError(
            "packed by a newer minor version, perhaps in a way that this reader doesn't know",
            path=path,
            clause="10.3",
            expected=f"at most {expected}",
            found=actual,
        )
    packing = Packing.parse(root.packed, path=path)
    parse = partial(parse_array, path=path, document_of=packing.document_of)
    documents = read_arrays(read, path, directory.next_claim, claim, root.identity["arrays"], parse)
    check_arrays(root, documents, path)
    metas = [meta for meta, _ in documents.metas]
    for meta in metas:
        check_chunk_size(meta, path)
    texts = [(meta, len(meta.to_json())) for meta in metas]
    layout = plan(len(mapped_root(root).to_json()), texts, num_samples_of(documents, path))
    arrays: dict[str, PackedArray] = {}
    entries, crcs = [*documents.entries], [*documents.crcs]
    for name, mapped in layout.arrays.items():
        if mapped.entry is None:
            arrays[name] = PackedArray(mapped, None, packing.codec_of(mapped.meta.dtype))
            continue
        entry, crc = directory.next_claim(mapped.meta.chunk_key, entries[-1].end)
        arrays[name] = array = PackedArray(mapped, entry, packing.codec_of(mapped.meta.dtype))
        entries.append(entry)
        crcs.append(crc)
        least = array.index_nbytes + array.num_chunks * (CHECKSUM_BYTES + 1)
        if entry.nbytes < least:
            raise FormatError(
                "data entry",
                path=path,
                array=name,
                kind="geometry",
                clause="13.6",
                expected=f"at least {least} bytes",
                found=entry.nbytes,
            )
    directory.check(entries, crcs, is_newer=False)
    metadata, end = tuple(documents.entries), entries[-1].end
    return PackedCatalog(root, layout, tuple(crcs), packing, arrays, metadata, end, files.size(fd))


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


class PackedStore(ChunkedStore):
    """A packed store, read-only: `sample` and `gather` decode; there is no array of samples to map.

    Opened by `ups_store.open`. Every chunk's checksum is checked before it is decoded. Picklable, usable
    after fork, safe to read from several threads.

    Attributes:
        catalog: What it holds and where.
        config_hash: sha256 of the identity document, that of the mapped form too.
    """

    access: Literal["decode"] = "decode"
    _why_no_array = (
        "a packed array can't be mapped",
        'use gather or sample, preload("copy"), or unpack it with `ups-store unpack`',
    )

    def __init__(self, path: Path, fd: int, catalog: PackedCatalog) -> None:
        super().__init__(path, catalog.root, catalog.layout)
        self.catalog, self.codec, self.nbytes = catalog, catalog.packing.codec, catalog.nbytes
        self._file = StoreFile(path, fd, self.nbytes, access="pread", keeps_fd=True)
        self.network = self._file.network
        self._edges: dict[str, npt.NDArray[np.int64]] = {}

    def _summary(self) -> list[str]:
        packing = self.catalog.packing
        return [f"{self.nbytes:,} bytes", f"packed by {packing.codec} {packing.level}"]

    @property
    def fingerprint(self) -> str:
        """Digest of the content, that of the mapped form: see `Store.fingerprint`."""
        return self.catalog.packing.fingerprint

    def _read_chunks(self, reads: Sequence[ChunkRead], num_threads: int | None) -> None:
        def decode(read: ChunkRead) -> None:
            read.take(partial(self.read_chunk, read.chunk.array, read.chunk.sample))

        if not self._is_copy():
            self._file.check_length()
        if num_threads is None:  # one for each MiB
            nbytes = sum(read.chunk.nbytes for read in reads)
            num_threads = max(1, min(MAX_THREADS, num_cores(), nbytes // BYTES_PER_THREAD))
        for_each(decode, reads, num_threads=num_threads)

    def read_chunk(self, name: str, sample: int | None, out: npt.NDArray[Any]) -> bytes:
        """Decode one chunk into `out`, C-contiguous, once its checksum is found right; returns its bytes."""
        chunk, descriptor = self.chunk(name, sample), self._file.descriptor  # held, see there
        raw = read_bytes(descriptor.fd, chunk.first, chunk.end - chunk.first, path=self.path)
        packed, hint = chunk.payload_of(raw), "`ups-store doctor` says what to do"
        if packed is None:
            raise chunk.damaged(self.path, "damaged chunk: its crc32c doesn't match", hint=hint)
        try:
            self.catalog.arrays[name].codec.decode(packed, out.reshape(-1).view(np.uint8))
        except (ValueError, RuntimeError, TypeError) as error:
            problem = f"damaged chunk: it can't be decoded ({error})"
            raise chunk.damaged(self.path, problem, hint=hint) from error
        return raw

    def chunk(self, name: str, sample: int | None) -> Chunk:
        """Find a chunk by the shard index, which is read and checked once."""
        edges = self._edges.get(name)
        if edges is None:
            edges = self._edges[name] = self._read_edges(self.catalog.arrays[name])
        number = 0 if sample is None else sample
        first, end = edges[number : number + 2].tolist()
        return Chunk(name, sample, first, end - first - CHECKSUM_BYTES)

    def _read_edges(self, array: PackedArray) -> npt.NDArray[np.int64]:
        """Find where each chunk begins in the file, and past the last one its end: shape (chunks + 1,)."""
        entry = array.entry
        assert entry is not None
        if not array.layout.meta.is_sharded:
            return np.array([entry.data_offset, entry.end])
        where, descriptor = (entry.end - array.index_nbytes, entry.end), self._file.descriptor
        raw = read_bytes(descriptor.fd, where[0], array.index_nbytes, path=self.path)
        data_nbytes = where[0] - entry.data_offset
        index = np.frombuffer(raw[:-CHECKSUM_BYTES], "<u8").reshape(-1, 2)
        flaw = ""
        if raw[-CHECKSUM_BYTES:] != struct.pack("<I", crc32c(raw[:-CHECKSUM_BYTES])):
            flaw = "checksum"
        elif (index > data_nbytes).any():  # before sums could wrap around
            flaw = "extents outside the entry"
        edges = np.append(index[:, 0], np.uint64(data_nbytes)).astype(np.int64)
        is_gapless = edges[0] == 0 and (np.diff(edges) == index[:, 1].astype(np.int64)).all()
        if not flaw and not (is_gapless and (index[:, 1] > CHECKSUM_BYTES).all()):
            flaw = "chunks that follow one another"
        if flaw:
            raise CorruptChunkError(
                f"shard index: {flaw}",
                path=self.path,
                array=array.layout.meta.name,
                byte_range=where,
                kind="shard_index",
                clause="5.4",
            )
        return edges + entry.data_offset

    def _is_copy(self) -> bool:
        return len(self._wholes) == len(self.catalog.arrays)

    def _preload(self, request: Request) -> PreloadReport:
        mode = request.mode
        is_other = request.device is not None or request.samples is not None or request.shared
        if is_other or mode not in ("auto", "copy", "page-cache"):
            hint = 'use mode="copy" or "page-cache" alone, or unpack it with `ups-store unpack`'
            raise self._unsupported(f"a packed store has no samples to preload by mode {mode!r}", hint)
        began, wholes, refusal = time.perf_counter(), self._wholes, ""
        missing = [array for name, array in self._layout.arrays.items() if name not in wholes]
        budget = ram_budget(sum(array.meta.nbytes for array in missing), is_new=True)
        try:
            if mode != "page-cache":
                budget.check("copy", margin=request.margin, path=self.path)
        except MemoryLimitError as error:
            if mode == "copy":
                raise
            refusal = f"{refused('copy', error)}; "
        if refusal or mode == "page-cache":
            report = preload(self._file, self.catalog, request)
            return replace(report, why=refusal + report.why)
        # Decode every array that isn't yet; then nothing is read from the file any more.
        for array in missing:
            name, meta, dtype = array.meta.name, array.meta, dtype_of(array.meta.dtype)
            if not meta.is_sharded or array.entry is None:
                self._whole(array)
                continue
            values = np.ndarray(meta.shape, dtype, memory.new_memory(meta.nbytes, kind=mmap.mmap))
            step = max(1, PRELOAD_BYTES // meta.sample_nbytes)
            for first in range(0, len(self), step):
                block = range(first, min(first + step, len(self)))
                reads = [
                    ChunkRead(chunk_of(array, i), meta.sample_shape, dtype, values[i, ...]) for i in block
                ]
                self._read_chunks(reads, request.num_threads)
                if request.progress is not None:
                    request.progress(len(block) * meta.sample_nbytes)
            values.flags.writeable = False
            wholes[name] = values
        nbytes = sum(values.nbytes for values in wholes.values())
        seconds = time.perf_counter() - began
        return PreloadReport(self.path, "copy", f"copy: {budget}", nbytes, seconds)

    def residency(self) -> float:
        """Give the share of the file that lies in the page cache, 0 to 1; 1 once all is decoded in memory."""
        self.check_open()
        if self._is_copy():
            return 1.0
        self._file.check_length()
        return memory.resident_nbytes(self._file.mapping(), self.nbytes) / self.nbytes

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Check every byte of the file, every decoded chunk, and the fingerprint; see `AnyStore.verify`."""
        self.check_open()
        with files.opened(self.path) as fd:
            self.catalog.check_still(fd, self.path)
            with PackedStore(self.path, fd, self.catalog) as fresh:
                return _PackedVerifier(fd, fresh, progress).run(num_threads)

    def check_open(self) -> None:
        """Fail after `close`, with `StoreClosedError`."""
        self._file.check_open()

    def close(self) -> None:
        """Close the file; a read under way ends. Closing twice is allowed."""
        super().close()
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopened(str(self.path), {})


def open_descriptor(path: Path, fd: int) -> PackedStore:
    """Open a packed store by its descriptor, which stays the caller's."""
    return PackedStore(path, fd, read_packed(fd, path))


def open_packed(path: str | os.PathLike[str]) -> PackedStore:
    """Open what must be a packed store; `ups_store.open` opens every kind."""
    target = path_of(path)
    check_one_file(target)
    with files.opened(target) as fd:
        return open_descriptor(target, fd)


class _PackedVerifier(Verifier):
    """Checks a packed file: decodes every chunk, and compares all with the fingerprint of the mapped form."""

    def __init__(self, fd: int, store: PackedStore, progress: Progress | None) -> None:
        super().__init__(reads_of(fd), store.path, store.catalog.root, store.nbytes, progress)
        self.store, self.catalog = store, store.catalog
        self._mapped: list[int] = []  # CRC-32 of each array's data in the mapped form

    def run(self, num_threads: int | None) -> Report:
        """Check everything."""
        catalog, arrays = self.catalog, self.catalog.arrays.values()
        metas, entries = [array.layout.meta for array in arrays], [array.entry for array in arrays]
        texts = [canonical_json(catalog.packing.document_of(meta), what=meta.name) for meta in metas]
        problems = self.walk(
            num_threads,
            crcs=dict(zip([*catalog.metadata, *filter(None, entries)], catalog.crcs, strict=True)),
            documents=zip(catalog.metadata, [self.root.to_json(), *texts], strict=True),
            arrays=zip(metas, entries, strict=True),
            directory_offset=catalog.directory_offset,
        )
        if not problems:
            documents = [mapped_root(self.root).to_json(), *(meta.to_json() for meta in metas)]
            mapped = Catalog(self.root, catalog.layout, (*map(crc32, documents), *self._mapped))
            if (computed := fingerprint_of(mapped)) != catalog.packing.fingerprint:
                detail = f"stored {catalog.packing.fingerprint}, that of what was decoded {computed}"
                where = (catalog.metadata[0].data_offset, catalog.metadata[0].end)
                problems.append(Problem("fingerprint", "13.7", where, detail=detail))
        return self.report(problems)

    def check_data(self, name: str) -> list[Checked]:
        """Decode an array's chunks, and note the CRC-32 of its data in the mapped form."""
        array = self.catalog.arrays[name]
        layout, meta, entry = array.layout, array.layout.meta, array.entry
        if entry is None:
            return []
        samples: list[int | None] = [*range(array.num_chunks)] if meta.is_sharded else [None]
        try:
            self.store.chunk(name, samples[0])
        except CorruptChunkError as error:
            return [Checked(0, entry.nbytes, (self._problem(error, name, None),))]
        checked: list[Checked] = []
        slots: list[tuple[int, int]] = []
        for part, slot in self.pool.map(partial(self._check_chunk, array), samples):
            self.num_chunks += 1
            self.progress(part.nbytes)
            checked.append(part)
            slots.append(slot)
        if meta.is_sharded:
            index = self.read(entry.end - array.index_nbytes, array.index_nbytes)
            self.progress(len(index))
            checked.append(Checked(crc32(index), len(index)))
            slots.append((crc32(layout.pack_index()), len(layout.pack_index())))
        self._mapped.append(combine_crc32(slots))
        return checked

    def _check_chunk(self, array: PackedArray, sample: int | None) -> tuple[Checked, tuple[int, int]]:
        """Check one chunk; returns also CRC-32 and length of its slot, or entry, in the mapped form."""
        layout, meta = array.layout, array.layout.meta
        slot_nbytes = meta.nbytes + CHECKSUM_BYTES if sample is None else layout.stride
        payload = np.empty(meta.shape if sample is None else meta.sample_shape, dtype_of(meta.dtype))
        try:
            raw = self.store.read_chunk(meta.name, sample, payload)
        except CorruptChunkError as error:
            problem = self._problem(error, meta.name, sample)
            first, end = problem.byte_range
            return Checked(0, end - first, (problem,)), (0, slot_nbytes)
        sums, chunk = Sums(meta), self.store.chunk(meta.name, sample)
        sums.add(payload.reshape(-1).view(np.uint8).data)
        problems = list(sums.problems(chunk, sums.crc32c))
        if meta.is_constant:
            problems += self.check_constant(meta.name, payload.tobytes(), (chunk.first, chunk.end))
        behind = struct.pack("<I", sums.crc32c).ljust(slot_nbytes - sums.nbytes, b"\0")
        return Checked(crc32(raw), len(raw), tuple(problems)), (crc32(behind, sums.crc32), slot_nbytes)

    def _problem(self, error: CorruptChunkError, name: str, sample: int | None) -> Problem:
        where = error.byte_range or (0, 0)
        return Problem(error.kind, error.clause or "", where, name, sample, error.problem)
