"""`verify_packed`: every byte of a packed file checked, every chunk decoded (spec 13.9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError
from ups_store.format.canonical import canonical_json
from ups_store.format.checksum import crc32
from ups_store.format.metadata import dtype_of
from ups_store.format.zip_records import Entry
from ups_store.packed.catalog import PackedArray, PackedCatalog
from ups_store.packed.chunk_codecs import packed_document
from ups_store.packed.chunks import ChunkReader
from ups_store.read.store_file import StoreFile, read_bytes
from ups_store.read.verify import Problem, Report, constant_problems, empty_constant_problems
from ups_store.system.memory import num_cores

_BLOCK_BYTES = 4 << 20


def verify_packed(
    fd: int,
    path: Path,
    catalog: PackedCatalog,
    *,
    num_threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Check a packed file; see `PackedStore.verify`.

    Args:
        fd: The file, stays the caller's.
        path: For messages.
        catalog: What it holds and where.
        num_threads: Threads that decode; one per processor by default.
        progress: Called with the number of bytes of the file that were checked since the last call.
    """
    with ThreadPoolExecutor(num_threads or num_cores()) as pool:
        return _PackedVerifier(fd, path, catalog, pool, progress or (lambda nbytes: None)).run()


class _PackedVerifier:
    def __init__(
        self,
        fd: int,
        path: Path,
        catalog: PackedCatalog,
        pool: ThreadPoolExecutor,
        progress: Callable[[int], None],
    ) -> None:
        self.fd, self.path, self.catalog, self.pool, self.progress = fd, path, catalog, pool, progress
        self.chunks = ChunkReader(StoreFile(path, fd, catalog.nbytes, access="pread", keeps_fd=True))
        self.num_chunks = 0

    def run(self) -> Report:
        entries, crcs = self.catalog.entries, self.catalog.crcs
        metas = [array.meta for array in self.catalog.arrays.values()]
        problems = empty_constant_problems(self.catalog.metadata[0], self.catalog.root.identity, metas)
        for entry, text in zip(self.catalog.metadata, self._texts(), strict=True):
            problems += self._compare(entry.data_offset, text, "metadata_text", "4.1")
        for entry, crc in zip(entries, crcs, strict=True):
            problems += self._compare(entry.offset, entry.pack_local_header(crc), "local_header", "3.3")
        for array in self.catalog.arrays.values():
            if array.entry:
                problems += self._check_chunks(array)
        damaged = {problem.array for problem in problems}
        for entry, crc in zip(entries, crcs, strict=True):
            name = entry.name.split("/")[0]
            if self._crc_of(entry) != crc and name not in damaged:
                where = (entry.data_offset, entry.end)
                problems.append(Problem("entry_crc", "3.2", where, name, detail=f"stored {crc:08x}"))
        problems.sort(key=lambda problem: problem.byte_range[0])
        return Report(self.path, self.catalog.nbytes, self.num_chunks, tuple(problems))

    def _texts(self) -> Iterator[bytes]:
        yield self.catalog.root.to_json()
        for array in self.catalog.arrays.values():
            yield canonical_json(packed_document(array.meta, self.catalog.packing), what=array.meta.name)

    def _check_chunks(self, array: PackedArray) -> list[Problem]:
        samples: list[int | None] = [*range(array.meta.shape[0])] if array.meta.is_sharded else [None]
        problems: list[Problem] = []
        for found in self.pool.map(partial(self._check_chunk, array), samples):
            self.num_chunks += 1
            problems += found
            if found and found[0].kind == "shard_index":
                break  # every chunk would say so
        return problems

    def _check_chunk(self, array: PackedArray, sample: int | None) -> list[Problem]:
        meta = array.meta
        payload = np.empty(meta.shape if sample is None else meta.sample_shape, dtype_of(meta.dtype))
        try:
            self.chunks.read(array, sample, payload)
        except CorruptChunkError as error:
            where = error.byte_range or (0, 0)
            return [Problem(error.kind, error.clause or "", where, meta.name, sample, error.problem)]
        return list(self._check_values(array, sample, payload))

    def _check_values(
        self, array: PackedArray, sample: int | None, payload: npt.NDArray[np.generic]
    ) -> Iterator[Problem]:
        assert array.entry is not None
        name, where = array.meta.name, (array.entry.data_offset, array.entry.end)
        if array.meta.dtype == "bool" and (payload.view(np.uint8) > 1).any():
            yield Problem("bool_value", "4.7", where, name, sample, "expected bytes 0 and 1")
        if array.meta.is_constant:
            yield from constant_problems(self.catalog.root.identity, name, payload.tobytes(), where)

    def _crc_of(self, entry: Entry) -> int:
        crc = 0
        for first in range(entry.data_offset, entry.end, _BLOCK_BYTES):
            num = min(_BLOCK_BYTES, entry.end - first)
            block = read_bytes(self.fd, first, num, path=self.path)
            crc = crc32(block, crc)
            self.progress(len(block))
        return crc

    def _compare(self, offset: int, expected: bytes, kind: str, clause: str) -> list[Problem]:
        found = read_bytes(self.fd, offset, len(expected), path=self.path)
        if found == expected:
            return []
        differs = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8))
        first, end = int(differs[0]), int(differs[-1]) + 1
        shown = f"expected {expected[first:end][:16].hex()}, found {found[first:end][:16].hex()}"
        return [Problem(kind, clause, (offset + first, offset + end), detail=shown)]
