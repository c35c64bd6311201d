"""`verify`: every byte of a finished file checked: payloads by checksum, all others by making them again.

Reads with `pread` through a descriptor of its own, so memory that somebody changed in a mapping doesn't count
and a file that is cut meanwhile is an error, not a signal (spec 7.6). What it finds is a `Report`.
"""

from __future__ import annotations

import codecs
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from ups_store.errors import CorruptChunkError, StoreReplacedError, VersionTooNewError
from ups_store.format.checksum import Bytes, combine_crc32, combine_crc32c, crc32, crc32c, crc32c_each
from ups_store.format.layout import CHECKSUM_BYTES, ArrayLayout, RaggedLayout
from ups_store.format.metadata import ArrayMeta
from ups_store.format.ragged import Offsets
from ups_store.format.root import FORMAT_VERSION, RootMeta, constant_digest
from ups_store.format.zip_records import Entry
from ups_store.printable import one_line
from ups_store.read.catalog import Catalog, ReadAt, fingerprint_of, read_finished, reads_of
from ups_store.read.ragged import offset_flaw
from ups_store.read.store_file import Chunk, chunk_of, read_into, rows_chunk
from ups_store.system import files
from ups_store.system.files import Progress
from ups_store.system.memory import num_cores
from ups_store.system.runs import Memory, damaged_slots

_BLOCK_BYTES = 4 << 20  # of one task of a thread
_PIECE_BYTES = 256 << 10  # read at a time: both checksums find it in the second-level cache
_MAX_SAMPLES = 1 << 16  # of one task, of a ragged array: samples may be empty
_MAX_SHOWN = 16  # differing runs of bytes of one record that are reported one by one

Task = TypeVar("Task")


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
        fault = f"{self.kind} {self.detail}" if self.detail else self.kind
        return one_line(f"{', '.join(where)}: {fault} (spec {self.clause})")


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
        """Give the report on a store in partitions, which begin with the samples `firsts`."""
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
        """Tell whether nothing is wrong."""
        return not self.problems

    def check(self, problem: str, *, hint: str) -> None:
        """Raise if anything is wrong.

        Raises:
            CorruptChunkError: Names the first damaged array, sample and byte range.
        """
        if self.ok:
            return
        first, num_more = self.problems[0], len(self.problems) - 1
        sentence = f"{problem}: {first.kind} {first.detail}".rstrip()
        raise CorruptChunkError(
            sentence + (f", and {num_more:,} more" if num_more else ""),
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
        damage: dict[str, set[int]] = {}
        for problem in self.problems:
            if problem.array:
                damage.setdefault(problem.array, set()).update(
                    [] if problem.sample is None else [problem.sample]
                )
        return {name: sorted(samples) for name, samples in damage.items()}


def verify_file(
    path: Path,
    *,
    fingerprint: str | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check a finished file; see `Store.verify`."""
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
    """Check every byte of what may be no file of this machine; see `Store.verify`."""
    if catalog.root.version > FORMAT_VERSION:
        raise VersionTooNewError(
            "a newer minor version may hold bytes that this reader doesn't know, so it can't verify it",
            path=path,
            clause="10.3",
            expected=f"at most {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}",
            found=f"{catalog.root.version[0]}.{catalog.root.version[1]}",
        )
    layout, verifier = catalog.layout, _MappedVerifier(read, path, catalog, progress, fd)
    texts = [catalog.root.to_json(), *(array.meta.to_json() for array in layout.arrays.values())]
    problems = verifier.walk(
        num_threads,
        crcs=dict(zip(layout.entries, catalog.crcs, strict=True)),
        documents=zip(layout.metadata, texts, strict=True),
        arrays=[(array.meta, array.entry) for array in layout.arrays.values()],
        directory_offset=layout.directory_offset,
    )
    return verifier.report(problems)


class Checked(NamedTuple):
    """Consecutive bytes of an entry's data that were checked: their CRC-32, how many, what is wrong."""

    crc: int
    nbytes: int
    problems: tuple[Problem, ...] = ()


class Sums:
    """Checks the payload of a chunk block by block: both checksums, and values that its array can't have."""

    def __init__(self, meta: ArrayMeta, start: int = 0) -> None:
        self.crc32, self.crc32c, self.nbytes = start, 0, 0
        self._is_bool, self._has_wrong_bool = meta.dtype == "bool", False
        self._decoder = codecs.getincrementaldecoder("utf-8")() if meta.encoding == "utf-8" else None
        self._text_error = ""

    def add(self, block: Bytes, *, is_last: bool = False) -> None:
        """Take the next bytes."""
        self.crc32, self.crc32c = crc32(block, self.crc32), crc32c(block, self.crc32c)
        self.nbytes += len(block)
        if self._is_bool:
            self._has_wrong_bool |= bool((np.frombuffer(block, np.uint8) > 1).any())
        if self._decoder is not None and not self._text_error:
            try:
                self._decoder.decode(block, is_last)
            except UnicodeDecodeError as error:
                self._text_error = error.reason

    def join(self, later: Sums) -> None:
        """Take what another one has of the bytes behind, of an array that isn't text."""
        pairs = (self.nbytes, later.nbytes)
        self.crc32 = combine_crc32(zip((self.crc32, later.crc32), pairs, strict=True))
        self.crc32c = combine_crc32c(zip((self.crc32c, later.crc32c), pairs, strict=True))
        self.nbytes += later.nbytes
        self._has_wrong_bool |= later._has_wrong_bool

    def problems(self, chunk: Chunk, stored: int) -> Iterator[Problem]:
        """Say what is wrong with the chunk, all of which was added."""
        self.add(b"", is_last=True)
        name, sample, where = chunk.array, chunk.sample, (chunk.first, chunk.end)
        if stored != self.crc32c:
            detail = f"crc32c stored {stored:08x}, computed {self.crc32c:08x}"
            yield Problem("chunk_crc", "5.2" if chunk.crc is None else "14.5", where, name, sample, detail)
        if self._has_wrong_bool:
            payload = (chunk.first, chunk.first + chunk.nbytes)
            yield Problem("bool_value", "4.7", payload, name, sample, "expected bytes 0 and 1")
        if self._text_error:
            yield Problem("text", "14.5", where, name, sample, f"expected UTF-8: {self._text_error}")


class Verifier(ABC):
    """Walks a file: its documents, then the data of every array, by several threads.

    Kinds of files differ in how they check an array's data.
    """

    def __init__(
        self, read: ReadAt, path: Path, root: RootMeta, nbytes: int, progress: Progress | None
    ) -> None:
        self.path, self.root, self.nbytes = path, root, nbytes
        self.progress: Progress = progress or (lambda nbytes: None)
        self.num_chunks = 0
        self._read_at = read

    @abstractmethod
    def check_data(self, name: str) -> list[Checked]:
        """Check an array's data, nothing where it has no entry and is no ragged array."""

    def walk(
        self,
        num_threads: int | None,
        *,
        crcs: Mapping[Entry, int],
        documents: Iterable[tuple[Entry, bytes]],
        arrays: Iterable[tuple[ArrayMeta, Entry | None]],
        directory_offset: int,
    ) -> list[Problem]:
        """Check all; the documents, the root's first, have exactly one text (spec 4.1)."""
        problems: list[Problem] = []
        with ThreadPoolExecutor(num_threads or num_cores()) as self.pool:
            for document, text in documents:
                problems += self._check_header(document, crcs[document])
                problems += self.compare(document.data_offset, text, "metadata_text", "4.1")
            root = next(iter(crcs))
            for meta, entry in arrays:
                if meta.is_constant and not meta.nbytes:  # the root's document has its digest
                    problems += self.check_constant(meta.name, b"", (root.data_offset, root.end))
                checked = self.check_data(meta.name)
                wrong = [problem for part in checked for problem in part.problems]
                if entry is not None:
                    problems += self._check_header(entry, crcs[entry])
                    computed = combine_crc32((part.crc, part.nbytes) for part in checked)
                    if computed != crcs[entry] and not wrong:
                        detail = f"stored {crcs[entry]:08x}, computed {computed:08x}"
                        where = entry.data_offset, entry.end
                        wrong = [Problem("entry_crc", "3.2", where, meta.name, detail=detail)]
                problems += wrong
        self.progress(self.nbytes - directory_offset)  # compared when it was opened
        return problems

    def report(self, problems: Iterable[Problem]) -> Report:
        """Make the report, in file order."""
        ordered = sorted(problems, key=lambda problem: problem.byte_range[0])
        return Report(self.path, self.nbytes, self.num_chunks, tuple(ordered))

    def _check_header(self, entry: Entry, crc: int) -> list[Problem]:
        return self.compare(entry.offset, entry.pack_local_header(crc), "local_header", "3.3")

    def check_constant(self, name: str, payload: bytes, where: tuple[int, int]) -> list[Problem]:
        """Compare a constant's bytes, which lie at `where`, with the digest in the identity (spec 8.1)."""
        stored, computed = self.root.identity["constants"][name], constant_digest(payload)
        if stored == computed:
            return []
        detail = f"sha256 in the identity {stored}, computed {computed}"
        return [Problem("constant_digest", "8.1", where, name, detail=detail)]

    def compare(
        self, offset: int, expected: bytes, kind: str, clause: str, array: str | None = None
    ) -> list[Problem]:
        """Compare bytes of the file with what they must be; a problem for every run that differs."""
        actual = self.read(offset, len(expected))
        self.progress(len(expected))
        if actual == expected:
            return []
        differs = np.frombuffer(actual, np.uint8) != np.frombuffer(expected, np.uint8)
        edges = np.flatnonzero(np.diff(differs, prepend=False, append=False)).reshape(-1, 2)
        if len(edges) > _MAX_SHOWN:
            edges = np.array([[edges[0, 0], edges[-1, 1]]])
        problems = []
        for first, end in edges.tolist():
            detail = f"expected {expected[first:end][:16].hex()}, found {actual[first:end][:16].hex()}"
            problems.append(Problem(kind, clause, (offset + first, offset + end), array, detail=detail))
        return problems

    def in_order(self, check: Callable[[Task], Checked], tasks: Iterable[Task]) -> Iterator[Checked]:
        """Check by the pool; results in the order of the tasks."""
        for part in self.pool.map(check, tasks):
            self.progress(part.nbytes)
            yield part

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read bytes that must be there."""
        raw = self._read_at(offset, nbytes)
        self._check_length(offset, nbytes, len(raw))
        return raw

    def _check_length(self, offset: int, nbytes: int, found: int) -> None:
        if found < nbytes:
            raise StoreReplacedError(
                "the file was cut while it was checked",
                path=self.path,
                byte_range=(offset, offset + nbytes),
                hint="another program writes to it: a store is never changed in place",
            )


class _MappedVerifier(Verifier):
    def __init__(
        self, read: ReadAt, path: Path, catalog: Catalog, progress: Progress | None, fd: int | None
    ) -> None:
        super().__init__(read, path, catalog.root, catalog.layout.file_nbytes, progress)
        self.layout, self._fd = catalog.layout, fd
        self._buffers = threading.local()

    def check_data(self, name: str) -> list[Checked]:
        array = self.layout.arrays[name]
        if array.meta.is_ragged:  # without rows there are offsets and checksums that must say so
            return self._check_rows(array)
        if array.entry is None:
            return []
        return self._check_slots(array) if array.meta.is_sharded else self._check_plain(array, array.entry)

    def _check_slots(self, array: ArrayLayout) -> list[Checked]:
        """Check every slot of a shard, then its index."""
        num_samples = array.meta.shape[0]
        per_block = max(1, _BLOCK_BYTES // array.stride)
        check = partial(self._check_block, array, per_block)
        checked = list(self.in_order(check, range(0, num_samples, per_block)))
        self.num_chunks += num_samples
        return [*checked, self._check_trailer(array, array.slot(num_samples)[0], array.pack_index())]

    def _check_trailer(self, array: ArrayLayout, offset: int, index: bytes, num_fill: int = 0) -> Checked:
        """Check what follows the samples of a shard: zeros of a ragged array, then the index."""
        name = array.meta.name
        problems = self.compare(offset, index[:num_fill], "fill", "14.5", name) if num_fill else []
        problems += self.compare(offset + num_fill, index[num_fill:], "shard_index", "5.4", name)
        return Checked(crc32(self.read(offset, len(index))), len(index), tuple(problems))

    def _check_block(self, array: ArrayLayout, num: int, first: int) -> Checked:
        end = min(first + num, array.meta.shape[0])
        if array.stride > _PIECE_BYTES:
            slots = [self._check_slot(array, sample) for sample in range(first, end)]
            crc = combine_crc32((slot.crc, slot.nbytes) for slot in slots)
            return Checked(crc, (end - first) * array.stride, sum((slot.problems for slot in slots), ()))
        crc, problems, step = 0, list[Problem](), _PIECE_BYTES // array.stride
        for sample in range(first, end, step):
            memory = self._piece(array.slot(sample)[0], min(step, end - sample) * array.stride)
            crc = crc32(memory.data, crc)
            for wrong in _suspects(array, memory.reshape(-1, array.stride)):
                problems += self._check_slot(array, sample + wrong).problems
        return Checked(crc, (end - first) * array.stride, tuple(problems))

    def _check_slot(self, array: ArrayLayout, sample: int) -> Checked:
        """Check a slot, its padding included, without reading it as a whole."""
        chunk = chunk_of(array, sample)
        begin, end = array.slot(sample)
        sums = self._sums(array.meta, chunk.first, chunk.nbytes)
        behind = self.read(begin + chunk.nbytes, array.stride - chunk.nbytes)
        checksum, padding = behind[:CHECKSUM_BYTES], behind[CHECKSUM_BYTES:]
        problems = list(sums.problems(chunk, struct.unpack("<I", checksum)[0]))
        if any(padding):
            problem = Problem("slot_padding", "5.3", (chunk.end, end), chunk.array, sample, "expected zeros")
            problems.append(problem)
        return Checked(crc32(behind, sums.crc32), array.stride, tuple(problems))

    def _check_plain(self, array: ArrayLayout, entry: Entry) -> list[Checked]:
        """Check a plain chunk by all threads: payload and the checksum behind it."""
        self.num_chunks += 1
        meta, chunk = array.meta, chunk_of(array)
        tasks = [
            (entry.data_offset + first, min(_BLOCK_BYTES, meta.nbytes - first))
            for first in range(0, meta.nbytes, _BLOCK_BYTES)
        ]
        total = Sums(meta)
        for sums in self.pool.map(lambda task: self._sums(meta, *task), tasks):
            total.join(sums)
            self.progress(sums.nbytes)
        trailer = self.read(entry.end - CHECKSUM_BYTES, CHECKSUM_BYTES)
        self.progress(CHECKSUM_BYTES)
        problems = list(total.problems(chunk, struct.unpack("<I", trailer)[0]))
        if meta.is_constant:
            payload = (array.offset, array.offset + meta.nbytes)
            problems += self.check_constant(meta.name, self.read(array.offset, meta.nbytes), payload)
        return [Checked(crc32(trailer, total.crc32), entry.nbytes, tuple(problems))]

    def _check_rows(self, array: ArrayLayout) -> list[Checked]:
        """Check every sample of a ragged array, then what follows the last one."""
        meta, ragged = array.meta, self.layout.ragged[array.meta.name]
        raw = self.read(ragged.offsets.offset, ragged.offsets.meta.nbytes)
        offsets: Offsets = np.frombuffer(raw, "<i8")
        flaw = offset_flaw(offsets, ragged)
        if flaw is None:
            # Runs of samples of about a block, by the byte at which each begins.
            begins, first, blocks = offsets * ragged.rows.stride, 0, list[tuple[int, int]]()
            while first < self.layout.num_samples:
                end = int(np.searchsorted(begins, begins[first] + _BLOCK_BYTES, side="right")) - 1
                end = min(max(end, first + 1), self.layout.num_samples, first + _MAX_SAMPLES)
                blocks.append((first, end))
                first = end
            checked = list(self.in_order(partial(self._check_row_block, ragged, offsets), blocks))
        else:  # it isn't known where samples begin
            at = ragged.offsets.offset + 8 * flaw[0]
            problem = Problem("offsets", "14.5", (at, at + 16), meta.name, flaw[0], f"found {flaw[1]}")
            sums = self._sums(meta, array.offset, meta.nbytes)
            rows = Chunk(meta.name, None, array.offset, meta.nbytes, 0)
            wrong_bool = [fault for fault in sums.problems(rows, sums.crc32c) if fault.kind == "bool_value"]
            self.progress(meta.nbytes)
            checked = [Checked(sums.crc32, meta.nbytes, (problem, *wrong_bool))]
        self.num_chunks += self.layout.num_samples
        if array.entry is None:
            return checked
        past, num_fill = array.offset + meta.nbytes, meta.row_geometry.fill_nbytes
        return [*checked, self._check_trailer(array, past, array.pack_index(), num_fill)]

    def _check_row_block(self, ragged: RaggedLayout, offsets: Offsets, block: tuple[int, int]) -> Checked:
        """Check consecutive samples, together at most a block unless it is one."""
        first, end = block
        stored = np.frombuffer(self.read(ragged.checks.offset + 4 * first, 4 * (end - first)), "<u4")
        edges = offsets[first : end + 1].tolist()
        begin, past = ragged.extent(edges[0], edges[-1])
        raw = memoryview(self.read(begin, past - begin)) if past - begin <= _BLOCK_BYTES else None
        crc, problems = 0, list[Problem]()
        for i, checksum in enumerate(stored.tolist()):
            chunk = rows_chunk(ragged, first + i, (edges[i], edges[i + 1]), checksum)
            if raw is None:
                sums = self._sums(ragged.rows.meta, chunk.first, chunk.nbytes, crc)
            else:
                sums = Sums(ragged.rows.meta, crc)
                sums.add(raw[chunk.first - begin : chunk.end - begin])
            problems += sums.problems(chunk, checksum)
            crc = sums.crc32
        return Checked(crc, past - begin, tuple(problems))

    def _sums(self, meta: ArrayMeta, offset: int, nbytes: int, start: int = 0) -> Sums:
        """Read a payload, or some of it, piece by piece."""
        sums = Sums(meta, start)
        for first in range(0, nbytes, _PIECE_BYTES):
            sums.add(self._piece(offset + first, min(_PIECE_BYTES, nbytes - first)).data)
        return sums

    def _piece(self, offset: int, nbytes: int) -> Memory:
        """Read into memory that the thread's next call uses again: new memory takes longer to get."""
        if self._fd is None:
            return np.frombuffer(self.read(offset, nbytes), np.uint8)
        buffer: Memory | None = getattr(self._buffers, "buffer", None)
        if buffer is None:
            buffer = self._buffers.buffer = np.empty(_PIECE_BYTES, np.uint8)
        piece = buffer[:nbytes]
        self._check_length(offset, nbytes, read_into(self._fd, offset, piece.data))
        return piece


def _suspects(array: ArrayLayout, slots: Memory) -> list[int]:
    """Find the slots, of shape (n, stride), in which something is wrong."""
    nbytes = array.meta.sample_nbytes
    wrong = damaged_slots(slots, nbytes)
    if wrong is None:
        computed = np.array(crc32c_each([slot[:nbytes].data for slot in slots]), np.uint32)
        stored = np.ndarray((len(slots),), "<u4", slots, nbytes, (array.stride,))
        wrong = (stored != computed) | slots[:, nbytes + CHECKSUM_BYTES :].any(axis=1)
    if array.meta.dtype == "bool":
        wrong |= (slots[:, :nbytes] > 1).any(axis=1)
    suspects: list[int] = np.flatnonzero(wrong).tolist()
    return suspects
