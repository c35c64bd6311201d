"""`RemoteStore`: a store in an object store or behind https, read in place by ranges.

Chunks are fetched together where they lie together, and each is checked before it is used.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import FormatError, SpecError, StoreClosedError
from ups_store.format.layout import Layout
from ups_store.read.base import AnyStore
from ups_store.read.catalog import Catalog, catalog_of, fingerprint_of, read_directory
from ups_store.read.chunked import ChunkedStore, ChunkRead
from ups_store.read.preload import PreloadReport, Request
from ups_store.read.several import PartitionedStore
from ups_store.read.store_file import Chunk
from ups_store.read.verify import Report, verify_catalog
from ups_store.remote.client import DEADLINE_S, RemoteObject
from ups_store.remote.slot_cache import Places, SlotCache, limit_of
from ups_store.system.parallel import MAX_THREADS, for_each
from ups_store.system.paths import Url, check_no_manifest

REQUESTS_IN_FLIGHT = 16  # of one batch
CACHE_DIR, CACHE_BYTES, DEADLINE = "UPS_STORE_CACHE_DIR", "UPS_STORE_CACHE_BYTES", "UPS_STORE_DEADLINE_S"

_END_BYTES = 64 << 10  # of the object: end records and directory, of all but stores of hundreds of arrays
_MAX_METADATA_BYTES = 32 << 20  # of a store; one document has at most half of it
_MAX_GAP_BYTES = 64 << 10  # between chunks: less is fetched along, sooner than another request is answered
_REQUEST_BYTES = 8 << 20  # of neighbours together, and of a large chunk at a time
_PARTITIONS = re.compile(r"(.+)-\*-of-(\d{5})(\.zarr\.zip)")


class RemoteStore(ChunkedStore):
    """A store that is read where it is: `sample` and `gather` fetch chunks, and check every one of them.

    Opened by `ups_store.open(url)`. An array of small samples is one chunk, fetched whole with its first
    sample and kept in memory; of others a sample is fetched whole, also for a window of it. Picklable, safe
    to read from several threads; after a fork see `RemoteObject`.

    Args:
        remote: The object, pinned to the version that the catalog was read from.
        catalog: What it holds and where.
        options: How it is read.

    Attributes:
        path: The URL, without what is secret; `str` of it is the URL again.
        remote: The object.
        cache: Chunks of it on this machine, or None.
    """

    access: Literal["remote"] = "remote"
    _why_no_array = (
        "its samples are fetched when they are asked for",
        "use gather or sample, or copy the store here",
    )

    def __init__(self, remote: RemoteObject, catalog: Catalog, options: RemoteOptions) -> None:
        super().__init__(remote.url.path, catalog.root, catalog.layout)
        self.remote, self._catalog, self._options = remote, catalog, options
        self.network, self.nbytes = remote.url.scheme, catalog.layout.file_nbytes
        self._numbering, self._is_closed = _Numbering(catalog.layout), False
        self.cache: SlotCache | None = None
        if options.cache_dir is not None:
            folder = Path(options.cache_dir)
            self.cache = SlotCache(
                folder,
                limit_of(options.cache_bytes, folder),
                fingerprint=self.fingerprint,
                file_nbytes=self.nbytes,
                num_chunks=self._numbering.num_chunks,
                places=self._numbering.places,
            )

    def _summary(self) -> list[str]:
        return [f"{self.nbytes:,} bytes", f"read from {self.network}"]

    @property
    def modified_s(self) -> float:
        """When the object was written, seconds since the epoch."""
        return self.remote.version.modified_s

    @property
    def fingerprint(self) -> str:
        """Digest of the content: see `Store.fingerprint`."""
        return fingerprint_of(self._catalog)

    def _read_chunks(self, reads: Sequence[ChunkRead], num_threads: int | None) -> None:
        missing = [read for read in reads if not self._take_cached(read)]
        missing.sort(key=lambda read: read.chunk.first)
        ranges = [fetched for block in _blocks(missing) for fetched in block.ranges()]
        for_each(self._fetch, ranges, num_threads=num_threads or REQUESTS_IN_FLIGHT)

    def _take_cached(self, read: ChunkRead) -> bool:
        """Take what the cache has, if that is right."""
        if self.cache is None:
            return False
        chunk, number = read.chunk, self._numbering.of(read.chunk)
        raw = self.cache.get(number, chunk.first, chunk.end - chunk.first)
        if raw is None:
            return False
        payload = chunk.payload_of(raw)
        if payload is None:
            self.cache.drop(number)
            return False
        read.take(partial(_copy, payload))
        return True

    def _fetch(self, request: tuple[_Block, int, int]) -> None:
        block, first, nbytes = request
        raw = block.add(first, self.remote.read(first, nbytes))
        if raw is None:  # other threads have the rest
            return
        for read in block.reads:
            begin, end = read.chunk.first - block.first, read.chunk.end - block.first
            read.take(partial(_copy, self._checked(read.chunk, raw[begin:end])))

    def _checked(self, chunk: Chunk, raw: memoryview) -> memoryview:
        """Check a fetched chunk; it is fetched once more if it doesn't match its checksum."""
        payload = chunk.payload_of(raw)
        if payload is None:
            raw = self.remote.read(chunk.first, chunk.end - chunk.first)
            payload = chunk.payload_of(raw)
        if payload is None:
            hint = "`ups-store verify` shows all damage; put a sound copy in its place"
            raise chunk.damaged(self.path, "the bytes don't match their checksum, twice", hint=hint)
        if self.cache is not None:
            self.cache.put(self._numbering.of(chunk), chunk.first, raw)
        return payload

    def _preload(self, request: Request) -> PreloadReport:
        """Refuse every mode but "auto", which leaves the store as it is."""
        if request.mode != "auto":
            hint = "open it with a cache, which an epoch fills, or copy it here"
            raise self._unsupported(f"a remote store can't be preloaded by mode {request.mode!r}", hint)
        where = "without a cache" if self.cache is None else f"chunks are kept in {self.cache.path.parent}"
        return PreloadReport(self.path, "mapped", f"remote, {where}", 0, 0.0)

    def residency(self) -> float:
        """Share of the store that lies in the local cache, 0 to 1."""
        self.check_open()
        return 0.0 if self.cache is None else min(1.0, self.cache.nbytes / self.nbytes)

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Fetch and check every byte of the object; the cache isn't asked. See `AnyStore.verify`."""
        self.check_open()
        return verify_catalog(
            lambda offset, nbytes: bytes(self.remote.read(offset, nbytes)),
            self.path,
            self._catalog,
            num_threads=num_threads or REQUESTS_IN_FLIGHT,
            progress=progress,
        )

    def check_open(self) -> None:
        """Fail after `close`, with `StoreClosedError`."""
        if self._is_closed:
            raise StoreClosedError("the store is closed", path=self.path, hint="open it again")

    def close(self) -> None:
        """Let go of memory and cache; a read under way ends. Closing twice is allowed."""
        self._is_closed = True
        super().close()
        if self.cache is not None:
            self.cache.close()

    def __reduce__(self) -> tuple[Any, ...]:
        options = asdict(self._options)
        return self._reopened(self.remote.url.text, {**options, "cache_dir": options["cache_dir"] or ""})


@dataclass(frozen=True)
class RemoteOptions:
    """How stores are read from URLs."""

    # Folder that keeps fetched chunks, shared by all stores and processes; None keeps none
    cache_dir: str | None = None
    # What that folder may take on its disk; None: half of what is free there
    cache_bytes: int | None = None
    deadline_s: float = DEADLINE_S  # seconds until a request with all its attempts is an error

    @classmethod
    def of(
        cls,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: float | None = None,
        deadline_s: float | None = None,
    ) -> RemoteOptions:
        """Take what arguments say, else the environment, else the defaults."""
        folder = os.environ.get(CACHE_DIR, "") if cache_dir is None else os.fspath(cache_dir)
        nbytes = _limit_of(cache_bytes, "cache_bytes", CACHE_BYTES)
        seconds = _limit_of(deadline_s, "deadline_s", DEADLINE)
        return cls(
            str(Path(folder).absolute()) if folder else None,
            None if nbytes is None else int(nbytes),
            DEADLINE_S if seconds is None else seconds,
        )


def _limit_of(given: float | None, name: str, variable: str) -> float | None:
    text: Any = given
    if given is None:
        name, text = variable, os.environ.get(variable) or None
    if text is None:
        return None
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise SpecError(name, kind="remote", expected="a positive number", found=repr(text))
    return value


def open_url(path: str | os.PathLike[str], options: RemoteOptions) -> AnyStore:
    """Open a store, or the partitions of a split, `NAME-*-of-00016.zarr.zip`."""
    url = Url.of(path)
    check_no_manifest(url.path)
    match = _PARTITIONS.fullmatch(url.path.name)
    if match is None:
        if "*" in url.path.name:
            hint, name = "name the URLs of its stores, in a list", url.path.name
            expected = "NAME-*-of-00016.zarr.zip, as nothing is listed at a URL"
            raise SpecError("pattern", kind="url", path=url.path, expected=expected, found=name, hint=hint)
        return _open_one(url, options)
    stem, count, suffix = match.groups()
    opened: dict[int, RemoteStore] = {}

    def open_one(number: int) -> None:
        opened[number] = _open_one(url.beside(f"{stem}-{number:05d}-of-{count}{suffix}"), options)

    for_each(open_one, range(int(count)), num_threads=MAX_THREADS)
    return PartitionedStore(url.path, [opened[number] for number in range(int(count))])


def _open_one(url: Url, options: RemoteOptions) -> RemoteStore:
    """Open one store by two requests, one if it is small; the first pins its version."""
    remote = RemoteObject(url, deadline_s=options.deadline_s)
    end = bytes(remote.read_end(_END_BYTES))
    nbytes, path = remote.version.nbytes, remote.url.path
    known = [(nbytes - len(end), end)]

    def read(offset: int, length: int) -> bytes:
        for first, raw in known:
            if first <= offset and offset + length <= first + len(raw):
                return raw[offset - first :][:length]
        return bytes(remote.read(offset, max(0, min(length, nbytes - offset))))

    try:
        directory = read_directory(read, nbytes, path)
        if directory.metadata_end() > _MAX_METADATA_BYTES:
            expected = (
                f"documents of at most {_MAX_METADATA_BYTES:,} bytes together, where a server sends them"
            )
            hint = "if you trust it, copy the file here, and open that"
            claimed = f"{directory.metadata_end():,}"
            raise FormatError(
                "metadata", path=path, kind="limits", expected=expected, found=claimed, hint=hint
            )
        known.append((0, read(0, directory.metadata_end())))
        return RemoteStore(remote, catalog_of(directory, read, path), options)
    except FormatError as error:
        if error.kind == "packed":
            error.hint = "copy it here, where it can be read as it is; or upload it unpacked"
        raise


class _Numbering:
    """Numbers of a store's chunks, in the order of its arrays, by which the slot cache knows them.

    Attributes:
        num_chunks: How many there are.
        places: Where those with slots lie, for the cache.
    """

    def __init__(self, layout: Layout) -> None:
        self._bases: dict[str, int] = {}
        places, base = [], 0
        for name, array in layout.arrays.items():
            self._bases[name] = base
            is_whole = not (array.meta.is_sharded or array.meta.is_ragged)
            count = 1 if is_whole else layout.num_samples
            if array.meta.is_sharded and array.entry:
                places.append(Places(base, count, array.offset, array.stride))
            base += count
        self.num_chunks, self.places = base, tuple(places)

    def of(self, chunk: Chunk) -> int:
        """The number of a chunk."""
        return self._bases[chunk.array] + (chunk.sample or 0)


def _copy(payload: memoryview, out: npt.NDArray[Any]) -> None:
    out.reshape(-1).view(np.uint8)[:] = np.frombuffer(payload, np.uint8)


@dataclass
class _Block:
    """Neighbouring chunks, by their first byte, and what takes them; fetched together."""

    reads: list[ChunkRead]
    _left: int = 0
    _memory: memoryview | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def first(self) -> int:
        """First byte."""
        return self.reads[0].chunk.first

    @property
    def nbytes(self) -> int:
        """Bytes from the first chunk to the end of the last."""
        return self.reads[-1].chunk.end - self.first

    def ranges(self) -> Iterator[tuple[_Block, int, int]]:
        """Cut it into the requests that it takes: first byte, and number of bytes."""
        firsts = range(self.first, self.first + self.nbytes, _REQUEST_BYTES)
        self._left = len(firsts)
        for first in firsts:
            yield self, first, min(_REQUEST_BYTES, self.first + self.nbytes - first)

    def add(self, first: int, raw: memoryview) -> memoryview | None:
        """Take a range; returns all bytes to whichever thread has brought the last of them."""
        if len(raw) == self.nbytes:
            return raw
        with self._lock:
            memory = self._memory = self._memory or np.empty(self.nbytes, np.uint8).data
        memory[first - self.first :][: len(raw)] = raw
        with self._lock:
            self._left -= 1
            if self._left:
                return None
            self._memory = None  # freed as soon as it is used, not with the last of the batch
            return memory


def _blocks(reads: Sequence[ChunkRead]) -> Iterator[_Block]:
    """Group neighbours of sorted chunks, up to the bytes of a request."""
    block: list[ChunkRead] = []
    for read in reads:
        is_far = block and read.chunk.first - block[-1].chunk.end > _MAX_GAP_BYTES
        if block and (is_far or read.chunk.end - block[0].chunk.first > _REQUEST_BYTES):
            yield _Block(block)
            block = []
        block.append(read)
    if block:
        yield _Block(block)
