"""`RemoteStore`: a store in an object store or behind https, read in place by ranges."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ups_store.errors import FormatError, SpecError, StoreClosedError
from ups_store.read.base import AnyStore
from ups_store.read.catalog import Catalog, catalog_of, fingerprint_of, read_directory
from ups_store.read.chunked import ChunkedStore, Use
from ups_store.read.chunks import Chunk
from ups_store.read.preload import PreloadReport, Request
from ups_store.read.several import PartitionedStore
from ups_store.read.verify import Report, verify_catalog
from ups_store.remote.chunks import REQUESTS_IN_FLIGHT, ChunkReader, Numbering
from ups_store.remote.client import DEADLINE_S, RemoteObject
from ups_store.remote.slot_cache import SlotCache, limit_of
from ups_store.system.parallel import MAX_THREADS, for_each
from ups_store.system.paths import check_no_manifest
from ups_store.system.urls import Url

CACHE_DIR, CACHE_BYTES, DEADLINE = "UPS_STORE_CACHE_DIR", "UPS_STORE_CACHE_BYTES", "UPS_STORE_DEADLINE_S"

_END_BYTES = 64 << 10  # of the object: end records and directory, of all but stores of hundreds of arrays
_MAX_METADATA_BYTES = 32 << 20  # of a store; one document has at most half of it
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
        numbering = Numbering(catalog.layout)
        self.remote, self.cache = remote, _cache_of(catalog, numbering, options)
        self.network, self.nbytes = remote.url.scheme, catalog.layout.file_nbytes
        self._catalog, self._options = catalog, options
        self._chunks = ChunkReader(remote, self.cache, numbering, self.path)
        self._is_closed = False

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

    def _read_chunks(self, wanted: Sequence[tuple[Chunk, Use]], num_threads: int | None) -> None:
        self._chunks.read(wanted, num_threads=num_threads)

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
    """How stores are read from URLs.

    Attributes:
        cache_dir: Folder that keeps fetched chunks, shared by all stores and processes; None keeps none.
        cache_bytes: What that folder may take on its disk; None: half of what is free there.
        deadline_s: Seconds until a request with all its attempts is an error.
    """

    cache_dir: str | None = None
    cache_bytes: int | None = None
    deadline_s: float = DEADLINE_S

    @classmethod
    def of(
        cls,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: float | None = None,
        deadline_s: float | None = None,
    ) -> RemoteOptions:
        """Take what arguments say, else the environment, else the defaults."""
        folder = os.environ.get(CACHE_DIR, "") if cache_dir is None else os.fspath(cache_dir)
        nbytes = _number(cache_bytes, "cache_bytes", CACHE_BYTES)
        seconds = _number(deadline_s, "deadline_s", DEADLINE)
        return cls(
            str(Path(folder).absolute()) if folder else None,
            None if nbytes is None else int(nbytes),
            DEADLINE_S if seconds is None else seconds,
        )


def _number(given: float | None, name: str, variable: str) -> float | None:
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
    if match:
        stem, count, suffix = match.groups()
        urls = [url.beside(f"{stem}-{number:05d}-of-{count}{suffix}") for number in range(int(count))]
        return PartitionedStore(url.path, _open_all(urls, options))
    if "*" in url.path.name:
        hint, found = "name the URLs of its stores, in a list", url.path.name
        expected = "NAME-*-of-00016.zarr.zip, as nothing is listed at a URL"
        raise SpecError("pattern", kind="url", path=url.path, expected=expected, found=found, hint=hint)
    return _open_one(url, options)


def _open_one(url: Url, options: RemoteOptions) -> RemoteStore:
    """Open one store: reads its end with the directory, then the metadata, which pins its version."""
    remote = RemoteObject(url, deadline_s=options.deadline_s)
    try:
        catalog = _read_catalog(remote)
    except FormatError as error:
        if error.kind == "packed":
            error.hint = "copy it here, where it can be read as it is; or upload it unpacked"
        raise
    return RemoteStore(remote, catalog, options)


def _read_catalog(remote: RemoteObject) -> Catalog:
    """Read what the object holds and where, by two requests, one if it is small."""
    end = bytes(remote.read_end(_END_BYTES))
    nbytes, path = remote.version.nbytes, remote.url.path
    known = [(nbytes - len(end), end)]

    def read(offset: int, wanted: int) -> bytes:
        for first, raw in known:
            if first <= offset and offset + wanted <= first + len(raw):
                return raw[offset - first :][:wanted]
        num = max(0, min(wanted, nbytes - offset))
        return bytes(remote.read(offset, num))

    directory = read_directory(read, nbytes, path)
    if directory.metadata_end() > _MAX_METADATA_BYTES:
        expected = f"documents of at most {_MAX_METADATA_BYTES:,} bytes together, where a server sends them"
        hint = "if you trust it, copy the file here, and open that"
        found = f"{directory.metadata_end():,}"
        raise FormatError("metadata", path=path, kind="limits", expected=expected, found=found, hint=hint)
    known.append((0, read(0, directory.metadata_end())))
    return catalog_of(directory, read, path)


def _cache_of(catalog: Catalog, numbering: Numbering, options: RemoteOptions) -> SlotCache | None:
    if options.cache_dir is None:
        return None
    folder = Path(options.cache_dir)
    return SlotCache(
        folder,
        limit_of(options.cache_bytes, folder),
        fingerprint=fingerprint_of(catalog),
        file_nbytes=catalog.layout.file_nbytes,
        num_chunks=numbering.num_chunks,
        places=numbering.places,
    )


def _open_all(urls: Sequence[Url], options: RemoteOptions) -> list[RemoteStore]:
    """Open several stores, several at once."""
    opened: dict[int, RemoteStore] = {}

    def open_one(number: int) -> None:
        opened[number] = _open_one(urls[number], options)

    for_each(open_one, range(len(urls)), num_threads=MAX_THREADS)
    return [opened[number] for number in range(len(urls))]
