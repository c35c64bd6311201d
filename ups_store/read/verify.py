"""`verify`: every byte of a finished file checked: payloads by checksum, all others by making them again.

Reads with `pread` through a descriptor of its own, so memory that somebody changed in a mapping doesn't count
and a file that is cut meanwhile is an error, not a signal (spec 7.6). What it finds is a `Report`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError, StoreReplacedError, VersionTooNewError
from ups_store.format.checksum import combine_crc32, combine_crc32c, crc32, crc32c, crc32c_each
from ups_store.format.layout import CHECKSUM_BYTES, ArrayLayout
from ups_store.format.metadata import ArrayMeta
from ups_store.format.root import FORMAT_VERSION, RootMeta, constant_digest
from ups_store.format.zip_records import Entry
from ups_store.printable import one_line
from ups_store.read.catalog import Catalog, fingerprint_of, read_finished, reads_of
from ups_store.read.directory import ReadAt
from ups_store.read.file_reads import read_into
from ups_store.read.verify_rows import RowVerifier
from ups_store.system import files
from ups_store.system.memory import num_cores
from ups_store.system.progress import Progress
from ups_store.system.runs import Memory, damaged_slots

_BLOCK_BYTES = 4 << 20  # of one task of a thread
_PIECE_BYTES = 256 << 10  # read at a time: both checksums find it in the second-level cache

_MAX_SHOWN = 16  # differing stretches of one record that are reported one by one


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: Stable identifier. Of chunks "chunk_crc", "slot_padding", "shard_index", "entry_crc",
            "bool_value", "constant_digest" (and what decoding a packed one raises), of ragged ones "offsets",
            "fill", "text"; of metadata "metadata_text"; of ZIP records "local_header".
        clause: Clause of the spec that is violated.
        byte_range: `(first, past_last)` byte in the file.
        array: Array, where one is concerned.
        sample: Sample, where one can be told.
        detail: What was expected and found.
        path: The file, where the store has several.
    """

    kind: str
    clause: str
    byte_range: tuple[int, int]
    array: str | None = None
    sample: int | None = None
    detail: str = ""
    path: Path | None = None

    def __str__(self) -> str:
        where = [self.path.name] if self.path else []
        where += [f"array {self.array!r}"] if self.array else []
        where += [f"sample {self.sample}"] if self.sample is not None else []
        where += [f"bytes {self.byte_range[0]}..{self.byte_range[1]}"]
        what = f"{self.kind} {self.detail}" if self.detail else self.kind
        return one_line(f"{', '.join(where)}: {what} (spec {self.clause})")


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        path: The store.
        nbytes: Bytes that were checked: all of them.
        num_chunks: Chunk checksums that were checked.
        problems: What is wrong, in file order; of a store in partitions with the numbers that samples have in
            the whole, and the file's path.
        partitions: A report for each partition, with the file's own numbers; empty for a store in one file.
    """

    path: Path
    nbytes: int
    num_chunks: int
    problems: tuple[Problem, ...]
    partitions: tuple[Report, ...] = ()

    @classmethod
    def joined(cls, path: Path, partitions: Sequence[Report], firsts: Sequence[int]) -> Report:
        """The report on a store in partitions, which begin with the samples `firsts`."""
        problems = tuple(
            replace(
                problem,
                path=report.path,
                sample=None if problem.sample is None else problem.sample + first,
            )
            for report, first in zip(partitions, firsts, strict=True)
            for problem in report.problems
        )
        nbytes = sum(report.nbytes for report in partitions)
        num_chunks = sum(report.num_chunks for report in partitions)
        return cls(path, nbytes, num_chunks, problems, tuple(partitions))

    @property
    def parts(self) -> tuple[Report, ...]:
        """The report on each file: those on the partitions, or this one."""
        return self.partitions or (self,)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def check(self, problem: str, *, hint: str) -> None:
        """Raise if anything is wrong.

        Raises:
            CorruptChunkError: Names the first damaged array, sample and byte range.
        """
        if self.ok:
            return
        first, num_more = self.problems[0], len(self.problems) - 1
        what = f"{problem}: {first.kind} {first.detail}".rstrip()
        raise CorruptChunkError(
            what + (f", and {num_more:,} more" if num_more else ""),
            path=self.path,
            array=first.array,
            sample=first.sample,
            byte_range=first.byte_range,
            clause=first.clause,
            hint=hint,
        )

    @property
    def damaged(self) -> dict[str, list[int]]:
        """Samples with damage, by array; an array of which no sample can be told has an empty list."""
        found: dict[str, set[int]] = {}
        for problem in self.problems:
            if problem.array:
                found.setdefault(problem.array, set()).update(
                    [] if problem.sample is None else [problem.sample]
                )
        return {name: sorted(samples) for name, samples in found.items()}


@dataclass(frozen=True)
class _Part:
    """Result of one stretch of an entry's data."""

    crc: int
    nbytes: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class _Sums:
    """Both checksums of a stretch of payload, and whether it has bytes that no bool has."""

    crc32: int
    crc32c: int
    nbytes: int
    has_wrong_bool: bool


def verify_file(
    path: Path,
    *,
    fingerprint: str | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check a finished file; see `Store.verify`.

    Raises:
        FormatError: If it can't be opened as a store.
        StoreReplacedError: If it isn't the file of `fingerprint`.
    """
    with files.opened(path) as fd:
        catalog = read_finished(fd, path)
        if fingerprint not in (None, fingerprint_of(catalog)):
            raise StoreReplacedError("another file took the path", path=path, hint="open it again")
        return verify_catalog(reads_of(fd), path, catalog, num_threads=num_threads, progress=progress, fd=fd)


def verify_catalog(
    read: ReadAt,
    path: Path,
    catalog: Catalog,
    *,
    num_threads: int | None = None,
    progress: Progress | None = None,
    fd: int | None = None,
) -> Report:
    """Check every byte of what may be no file of this machine; see `Store.verify`.

    Args:
        read: Returns its bytes; called by several threads at once.
        path: For messages.
        catalog: What it holds and where.
        num_threads: Threads that read and check; one per processor by default.
        progress: Called with the number of bytes that were checked since the last call.
        fd: Of the file that `read` reads, if it is one: then memory is used again.
    """
    if catalog.root.version > FORMAT_VERSION:
        raise VersionTooNewError(
            "a newer minor version may hold bytes that this reader doesn't know, so it can't verify it",
            path=path,
            clause="10.3",
            expected=f"at most {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}",
            found=f"{catalog.root.version[0]}.{catalog.root.version[1]}",
        )
    with ThreadPoolExecutor(num_threads or num_cores()) as pool:
        return _Verifier(read, path, catalog, pool, progress or (lambda nbytes: None), fd).run()


class _Verifier:
    def __init__(
        self,
        read: ReadAt,
        path: Path,
        catalog: Catalog,
        pool: ThreadPoolExecutor,
        progress: Progress,
        fd: int | None,
    ) -> None:
        self._fd = fd
        self._read_at, self.path, self.catalog, self.pool, self.progress = read, path, catalog, pool, progress
        self.layout = catalog.layout
        self.num_chunks = 0
        self._buffers = threading.local()

    def run(self) -> Report:
        crcs = dict(zip(self.layout.entries, self.catalog.crcs, strict=True))
        metas = [array.meta for array in self.layout.arrays.values()]
        root, *entries = self.layout.metadata
        problems = self._check_metadata(root, self.catalog.root, crcs[root])
        problems += empty_constant_problems(root, self.catalog.root.identity, metas)
        for entry, meta in zip(entries, metas, strict=True):
            problems += self._check_metadata(entry, meta, crcs[entry])
        for array in self.layout.arrays.values():
            if array.entry:
                problems += self._check_header(array.entry, crcs[array.entry])
                problems += self._check_data(array, array.entry, crcs[array.entry])
            elif array.meta.is_ragged:  # no rows, but offsets and checksums that must say so
                problems += [problem for part in self._check_rows(array) for problem in part.problems]
        self.progress(self.layout.file_nbytes - self.layout.directory_offset)  # compared when it was opened
        return Report(self.path, self.layout.file_nbytes, self.num_chunks, tuple(problems))

    def _check_header(self, entry: Entry, crc: int) -> list[Problem]:
        return self._compare(entry.offset, entry.pack_local_header(crc), "local_header", "3.3")

    def _check_metadata(self, entry: Entry, document: RootMeta | ArrayMeta, crc: int) -> list[Problem]:
        text = document.to_json()
        problems = self._check_header(entry, crc)
        return problems + self._compare(entry.data_offset, text, "metadata_text", "4.1")

    def _check_data(self, array: ArrayLayout, entry: Entry, stored: int) -> list[Problem]:
        if array.meta.is_ragged:
            parts = self._check_rows(array)
        else:
            parts = self._check_slots(array) if array.meta.is_sharded else self._check_chunk(array, entry)
        problems = [problem for part in parts for problem in part.problems]
        computed = combine_crc32((part.crc, part.nbytes) for part in parts)
        if computed != stored and not problems:
            detail = f"stored {stored:08x}, computed {computed:08x}"
            where = (entry.data_offset, entry.end)
            problems.append(Problem("entry_crc", "3.2", where, array.meta.name, detail=detail))
        return problems

    def _check_slots(self, array: ArrayLayout) -> list[_Part]:
        """Every slot of a shard, then its index."""
        num_samples = array.meta.shape[0]
        per_block = max(1, _BLOCK_BYTES // array.stride)
        firsts = range(0, num_samples, per_block)
        parts = list(self._in_order(lambda first: self._check_block(array, first, per_block), firsts))
        self.num_chunks += num_samples
        index = array.pack_index()
        offset = array.slot(num_samples)[0]
        problems = self._compare(offset, index, "shard_index", "5.4", array.meta.name)
        found = self._read(offset, len(index))
        return [*parts, _Part(crc32(found), len(index), tuple(problems))]

    def _check_rows(self, array: ArrayLayout) -> list[_Part]:
        """Every sample of a ragged array, then what follows the last one."""
        name = array.meta.name
        verifier = RowVerifier(self.layout.ragged[name], self._read)
        parts = []
        for block in self.pool.map(verifier.check, verifier.blocks):
            self.progress(block.nbytes)
            flaws = (Problem(f.kind, f.clause, f.byte_range, name, f.sample, f.detail) for f in block.flaws)
            parts.append(_Part(block.crc, block.nbytes, tuple(flaws)))
        self.num_chunks += self.layout.num_samples
        if array.entry is None:
            return parts
        trailer, end = array.pack_index(), array.offset + array.meta.nbytes
        num_fill = array.meta.row_geometry.fill_nbytes
        problems = self._compare(end, trailer[:num_fill], "fill", "14.5", name)
        problems += self._compare(end + num_fill, trailer[num_fill:], "shard_index", "5.4", name)
        return [*parts, _Part(crc32(self._read(end, len(trailer))), len(trailer), tuple(problems))]

    def _in_order(self, check: Callable[[int], _Part], firsts: range) -> Iterator[_Part]:
        for part in self.pool.map(check, firsts):
            self.progress(part.nbytes)
            yield part

    def _check_block(self, array: ArrayLayout, first: int, num: int) -> _Part:
        end, crc, problems = min(first + num, array.meta.shape[0]), 0, list[Problem]()
        if array.stride > _PIECE_BYTES:
            parts = [self._check_long_slot(array, sample) for sample in range(first, end)]
            crc = combine_crc32((part.crc, part.nbytes) for part in parts)
            return _Part(crc, (end - first) * array.stride, sum((part.problems for part in parts), ()))
        step = _PIECE_BYTES // array.stride
        for sample in range(first, end, step):
            slots = self._piece(array.slot(sample)[0], min(step, end - sample) * array.stride)
            crc = crc32(slots.data, crc)
            slots = slots.reshape(-1, array.stride)
            for wrong in _suspects(array, slots):
                problems += self._check_slot(array, sample + wrong, slots[wrong])
        return _Part(crc, (end - first) * array.stride, tuple(problems))

    def _check_long_slot(self, array: ArrayLayout, sample: int) -> _Part:
        """A slot that isn't read as a whole unless something is wrong with it."""
        begin, _ = array.slot(sample)
        found = self._check_bytes(begin, array.meta.sample_nbytes, array.meta.dtype == "bool")
        behind = self._read(begin + found.nbytes, array.stride - found.nbytes)
        problems: tuple[Problem, ...] = ()
        is_right = behind == struct.pack("<I", found.crc32c).ljust(len(behind), b"\0")
        if not is_right or found.has_wrong_bool:
            slot = np.frombuffer(self._read(begin, array.stride), np.uint8)
            problems = tuple(self._check_slot(array, sample, slot))
        return _Part(crc32(behind, found.crc32), array.stride, problems)

    def _check_bytes(self, offset: int, nbytes: int, is_bool: bool) -> _Sums:
        """Both checksums of a stretch of payload."""
        crc, castagnoli, has_wrong_bool = 0, 0, False
        for first in range(0, nbytes, _PIECE_BYTES):
            piece = self._piece(offset + first, min(_PIECE_BYTES, nbytes - first))
            crc, castagnoli = crc32(piece.data, crc), crc32c(piece.data, castagnoli)
            has_wrong_bool |= is_bool and bool((piece > 1).any())
        return _Sums(crc, castagnoli, nbytes, has_wrong_bool)

    def _check_slot(self, array: ArrayLayout, sample: int, slot: npt.NDArray[np.uint8]) -> Iterator[Problem]:
        nbytes, begin = array.meta.sample_nbytes, array.slot(sample)[0]
        name, end = array.meta.name, begin + nbytes
        computed = crc32c(slot[:nbytes].data)
        stored = struct.unpack("<I", slot[nbytes : nbytes + CHECKSUM_BYTES].tobytes())[0]
        if stored != computed:
            detail = f"crc32c stored {stored:08x}, computed {computed:08x}"
            yield Problem("chunk_crc", "5.2", (begin, end + CHECKSUM_BYTES), name, sample, detail)
        if slot[nbytes + CHECKSUM_BYTES :].any():
            where = (end + CHECKSUM_BYTES, begin + array.stride)
            yield Problem("slot_padding", "5.3", where, name, sample, "expected zeros")
        if array.meta.dtype == "bool" and (slot[:nbytes] > 1).any():
            yield Problem("bool_value", "4.7", (begin, end), name, sample, "expected bytes 0 and 1")

    def _check_chunk(self, array: ArrayLayout, entry: Entry) -> list[_Part]:
        """A plain chunk: payload and the checksum behind it."""
        self.num_chunks += 1
        meta, sums = array.meta, list[_Sums]()
        firsts = range(0, meta.nbytes, _BLOCK_BYTES)

        def check(first: int) -> _Sums:
            nbytes = min(_BLOCK_BYTES, meta.nbytes - first)
            return self._check_bytes(entry.data_offset + first, nbytes, meta.dtype == "bool")

        for found in self.pool.map(check, firsts):
            sums.append(found)
            self.progress(found.nbytes)
        crc = combine_crc32((found.crc32, found.nbytes) for found in sums)
        castagnoli = combine_crc32c((found.crc32c, found.nbytes) for found in sums)
        trailer = self._read(entry.end - CHECKSUM_BYTES, CHECKSUM_BYTES)
        self.progress(CHECKSUM_BYTES)
        where, problems = (entry.data_offset, entry.end), []
        if trailer != struct.pack("<I", castagnoli):
            detail = f"crc32c stored {struct.unpack('<I', trailer)[0]:08x}, computed {castagnoli:08x}"
            problems.append(Problem("chunk_crc", "5.2", where, meta.name, detail=detail))
        if any(found.has_wrong_bool for found in sums):
            problems.append(Problem("bool_value", "4.7", where, meta.name, detail="expected bytes 0 and 1"))
        if meta.is_constant:
            payload = (array.offset, array.offset + meta.nbytes)
            identity = self.catalog.root.identity
            problems += constant_problems(identity, meta.name, self._read(array.offset, meta.nbytes), payload)
        return [_Part(crc32(trailer, crc), entry.nbytes, tuple(problems))]

    def _compare(
        self, offset: int, expected: bytes, kind: str, clause: str, array: str | None = None
    ) -> list[Problem]:
        """Problems for every stretch of bytes at `offset` that differs from `expected`."""
        found = self._read(offset, len(expected))
        self.progress(len(expected))
        if found == expected:
            return []
        differs = np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8)
        edges = np.flatnonzero(np.diff(differs, prepend=False, append=False)).reshape(-1, 2)
        if len(edges) > _MAX_SHOWN:
            edges = np.array([[edges[0, 0], edges[-1, 1]]])
        return [
            self._difference(offset, found, expected, edge, kind, clause, array) for edge in edges.tolist()
        ]

    def _difference(
        self, offset: int, found: bytes, expected: bytes, edge: Any, kind: str, clause: str, array: str | None
    ) -> Problem:
        first, end = edge
        detail = f"expected {expected[first:end][:16].hex()}, found {found[first:end][:16].hex()}"
        return Problem(kind, clause, (offset + first, offset + end), array, detail=detail)

    def _read(self, offset: int, nbytes: int) -> bytes:
        raw = self._read_at(offset, nbytes)
        self._check_length(offset, nbytes, len(raw))
        return raw

    def _piece(self, offset: int, nbytes: int) -> Memory:
        """Bytes in memory that the thread's next call uses again: new memory takes longer to get."""
        if self._fd is None:
            return np.frombuffer(self._read(offset, nbytes), np.uint8)
        buffer: Memory | None = getattr(self._buffers, "buffer", None)
        if buffer is None:
            buffer = self._buffers.buffer = np.empty(_PIECE_BYTES, np.uint8)
        piece = buffer[:nbytes]
        self._check_length(offset, nbytes, read_into(self._fd, offset, piece.data))
        return piece

    def _check_length(self, offset: int, nbytes: int, found: int) -> None:
        if found < nbytes:
            raise StoreReplacedError(
                "the file was cut while it was checked",
                path=self.path,
                byte_range=(offset, offset + nbytes),
                hint="another program writes to it: a store is never changed in place",
            )


def _suspects(array: ArrayLayout, slots: Memory) -> list[int]:
    """Slots, of shape (n, stride), in which something is wrong."""
    nbytes = array.meta.sample_nbytes
    wrong = damaged_slots(slots, nbytes)
    if wrong is None:
        found = np.array(crc32c_each([slot[:nbytes].data for slot in slots]), np.uint32)
        stored = np.ndarray((len(slots),), "<u4", slots, nbytes, (array.stride,))
        wrong = (stored != found) | slots[:, nbytes + CHECKSUM_BYTES :].any(axis=1)
    if array.meta.dtype == "bool":
        wrong |= (slots[:, :nbytes] > 1).any(axis=1)
    suspects: list[int] = np.flatnonzero(wrong).tolist()
    return suspects


def empty_constant_problems(
    root: Entry, identity: Mapping[str, Any], arrays: Iterable[ArrayMeta]
) -> list[Problem]:
    """A problem for each constant without elements whose digest, in the entry `root`, is wrong (spec 8.1)."""
    where = (root.data_offset, root.end)
    empty = [meta.name for meta in arrays if meta.is_constant and not meta.nbytes]
    return [problem for name in empty for problem in constant_problems(identity, name, b"", where)]


def constant_problems(
    identity: Mapping[str, Any], name: str, payload: bytes, where: tuple[int, int]
) -> list[Problem]:
    """A problem if a constant's bytes, which lie at `where`, aren't those of the identity (spec 8.1)."""
    stored, computed = identity["constants"][name], constant_digest(payload)
    if stored == computed:
        return []
    detail = f"sha256 in the identity {stored}, computed {computed}"
    return [Problem("constant_digest", "8.1", where, name, detail=detail)]
