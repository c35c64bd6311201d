"""`verify`: every byte of a finished file checked: payloads by checksum, all others by making them again.

Reads with `pread` through a descriptor of its own, so memory that somebody changed in a mapping doesn't count
and a file that is cut meanwhile is an error, not a signal (spec 7.6). What it finds is a `Report`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import StoreReplacedError, VersionTooNewError
from ups_store.format.checksum import combine_crc32, crc32, crc32c
from ups_store.format.identity import constant_digest
from ups_store.format.layout import CHECKSUM_BYTES, ArrayLayout
from ups_store.format.metadata import ArrayMeta
from ups_store.format.root_metadata import FORMAT_VERSION, RootMeta
from ups_store.format.zip_records import Entry
from ups_store.printable import one_line
from ups_store.read.catalog import Catalog, fingerprint_of, read_finished
from ups_store.read.verify_rows import RowVerifier
from ups_store.system import files

_BLOCK_BYTES = 4 << 20  # read at a time and thread

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


def verify_file(
    path: Path,
    *,
    fingerprint: str | None = None,
    num_threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Check a finished file; see `Store.verify`.

    Raises:
        FormatError: If it can't be opened as a store.
        StoreReplacedError: If it isn't the file of `fingerprint`.
    """
    with files.opened(path) as fd:
        catalog = read_finished(fd, path)
        if catalog.root.version > FORMAT_VERSION:
            raise VersionTooNewError(
                "a newer minor version may hold bytes that this reader doesn't know, so it can't verify it",
                path=path,
                clause="10.3",
                expected=f"at most {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}",
                found=f"{catalog.root.version[0]}.{catalog.root.version[1]}",
            )
        if fingerprint not in (None, fingerprint_of(catalog)):
            raise StoreReplacedError("another file took the path", path=path, hint="open it again")
        with ThreadPoolExecutor(num_threads or os.cpu_count() or 1) as pool:
            return _Verifier(fd, path, catalog, pool, progress or (lambda nbytes: None)).run()


class _Verifier:
    def __init__(
        self, fd: int, path: Path, catalog: Catalog, pool: ThreadPoolExecutor, progress: Callable[[int], None]
    ) -> None:
        self.fd, self.path, self.catalog, self.pool, self.progress = fd, path, catalog, pool, progress
        self.layout = catalog.layout
        self.num_chunks = 0

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
        num = min(num, array.meta.shape[0] - first)
        raw = self._read(array.slot(first)[0], num * array.stride)
        slots = np.frombuffer(raw, np.uint8).reshape(num, array.stride)
        problems = [p for i in range(num) for p in self._check_slot(array, first + i, slots[i])]
        return _Part(crc32(raw), len(raw), tuple(problems))

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
        meta, crc, castagnoli, is_bool = array.meta, 0, 0, True
        blocks = []
        for offset in range(0, meta.nbytes, _BLOCK_BYTES):
            block = self._read(entry.data_offset + offset, min(_BLOCK_BYTES, meta.nbytes - offset))
            crc, castagnoli = crc32(block, crc), crc32c(block, castagnoli)
            is_bool &= meta.dtype != "bool" or not (np.frombuffer(block, np.uint8) > 1).any()
            blocks += [block] if meta.is_constant else []
            self.progress(len(block))
        trailer = self._read(entry.end - CHECKSUM_BYTES, CHECKSUM_BYTES)
        self.progress(CHECKSUM_BYTES)
        where, problems = (entry.data_offset, entry.end), []
        if trailer != struct.pack("<I", castagnoli):
            detail = f"crc32c stored {struct.unpack('<I', trailer)[0]:08x}, computed {castagnoli:08x}"
            problems.append(Problem("chunk_crc", "5.2", where, meta.name, detail=detail))
        if not is_bool:
            problems.append(Problem("bool_value", "4.7", where, meta.name, detail="expected bytes 0 and 1"))
        if meta.is_constant and not problems:
            payload = (array.offset, array.offset + meta.nbytes)
            identity = self.catalog.root.identity
            problems += constant_problems(identity, meta.name, b"".join(blocks), payload)
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
        raw = files.read_at(self.fd, offset, nbytes)
        if len(raw) < nbytes:
            raise StoreReplacedError(
                "the file was cut while it was checked",
                path=self.path,
                byte_range=(offset, offset + nbytes),
                hint="another program writes to it: a store is never changed in place",
            )
        return raw


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
