"""Opening what a URL names: a store by two requests, the parts of a set, the partitions of a split."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ups_store.errors import FormatError, SpecError
from ups_store.read.base import AnyStore, check_unpickled
from ups_store.read.catalog import Catalog, catalog_of, fingerprint_of
from ups_store.read.directory import read_directory
from ups_store.read.partitioned import PartitionedStore
from ups_store.remote.chunks import Numbering
from ups_store.remote.client import DEADLINE_S, RemoteObject
from ups_store.remote.slot_cache import SlotCache, limit_of
from ups_store.remote.store import RemoteStore
from ups_store.system.parallel import MAX_THREADS, for_each
from ups_store.system.paths import check_no_manifest
from ups_store.system.urls import Url

CACHE_DIR, CACHE_BYTES, DEADLINE = "UPS_STORE_CACHE_DIR", "UPS_STORE_CACHE_BYTES", "UPS_STORE_DEADLINE_S"

_END_BYTES = 64 << 10  # of the object: end records and directory, of all but stores of hundreds of arrays
_MAX_METADATA_BYTES = 32 << 20  # of a store; one document has at most half of it
_PARTITIONS = re.compile(r"(.+)-\*-of-(\d{5})(\.zarr\.zip)")


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
        """What arguments say, else the environment, else the defaults.

        Raises:
            SpecError: For a number that is none, or isn't positive; names the variable.
        """
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
    """Open a store, or the partitions of a split, `NAME-*-of-00016.zarr.zip`.

    Raises:
        StoreNotFoundError: If there is no such object; also a FileNotFoundError.
        FormatError: If it isn't a store, or is damaged; if it is packed, kind "packed".
        SpecError: For a URL of another scheme, kind "url".
        RemoteError: If the object store refuses, or doesn't answer before the deadline.
        MissingExtraError: Without obstore.
    """
    url = Url.of(path)
    check_no_manifest(url.path)
    match = _PARTITIONS.fullmatch(url.path.name)
    if match:
        numbers, (stem, count, suffix) = range(int(match[2])), match.groups()
        urls = [url.beside(f"{stem}-{number:05d}-of-{count}{suffix}") for number in numbers]
        return PartitionedStore(url.path, _open_all(urls, options))
    return open_remote(url, options)


def open_remote(url: Url, options: RemoteOptions) -> RemoteStore:
    """Open one store: reads its end with the directory, then the metadata, which pins its version."""
    remote = RemoteObject(url, deadline_s=options.deadline_s)
    try:
        catalog = _read_catalog(remote)
    except FormatError as error:
        if error.kind == "packed":
            error.hint = "copy it here, where it can be read as it is; or upload it unpacked"
        raise
    cache = _cache_of(catalog, options)
    return RemoteStore(remote, catalog, cache=cache, reopen=_reopen, options=asdict(options))


def _read_catalog(remote: RemoteObject) -> Catalog:
    """What the object holds and where, by two requests, one if it is small."""
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


def _cache_of(catalog: Catalog, options: RemoteOptions) -> SlotCache | None:
    if options.cache_dir is None:
        return None
    numbering, folder = Numbering(catalog.layout), Path(options.cache_dir)
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
        opened[number] = open_remote(urls[number], options)

    for_each(open_one, range(len(urls)), num_threads=MAX_THREADS)
    return [opened[number] for number in range(len(urls))]


def _reopen(url: str, fingerprint: str, options: dict[str, Any]) -> RemoteStore:
    """What a pickled store becomes."""
    store = open_remote(Url(url), RemoteOptions(**options))
    check_unpickled(store, fingerprint, store.fingerprint)
    return store
