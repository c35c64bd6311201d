"""Digests of source files, kept beside the stores so that the next run needn't read the sources."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import blake3
import h5py

from ups_store.build.outputs import replace_text
from ups_store.build.readers import Readers, inline_pool
from ups_store.errors import SourceError
from ups_store.ingest.hdf5 import open_hdf5, translated
from ups_store.ingest.reader_process import Reader, changed

DigestKind = Literal["full", "sampled"]
Progress = Callable[[int], None]

_READ_BYTES = 8 << 20
_NUM_BLOCKS = 64  # of a sampled digest
_BLOCK_BYTES = 64 << 10
_CACHE_NAME = ".source_digests.json"


@dataclass(frozen=True)
class FileSignature:
    """What changes when a file does, without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileSignature:
        """The signature of the file at a path; SourceError if there is none."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise SourceError(
                f"source can't be read ({error.strerror})", kind="missing_file", path=path
            ) from error
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class DigestRequest:
    """Read a file for its digest; see `DigestCache.digest`."""

    path: Path
    kind: DigestKind
    size: int
    subject = "the digest"
    first_sample = None

    def run(self, reader: Reader) -> str:
        """The digest; tells bytes as they are read."""
        reader.doing("digesting")
        if self.kind == "full":
            return _full(self.path, reader.progressed)
        return _sampled(self.path, self.size, reader.progressed)


class DigestCache:
    """Digests by real path, valid as long as the file's signature is the same.

    Args:
        folder: Folder of the stores; the cache is one small JSON file in it.
        rehash: Whether to ignore what is there.
        save: Whether to write what is found to the folder.
        readers: Who reads the files; by default this process.
    """

    def __init__(
        self, folder: Path, *, rehash: bool = False, save: bool = True, readers: Readers | None = None
    ) -> None:
        self._readers = readers
        self._path = folder / _CACHE_NAME
        self._is_saved = save
        self._known: dict[str, Any] = {} if rehash else _load(self._path)

    def digest(self, path: Path, kind: DigestKind, progress: Progress) -> str:
        """The digest of a source, from the cache if the file didn't change.

        Args:
            path: Source file.
            kind: "full" for blake3 of all bytes; "sampled" for blake3 of size, HDF5 structure and 64 evenly
                spaced blocks of 64 KiB.
            progress: Called with numbers of bytes as they are read.
        """
        key = f"{kind}:{os.path.realpath(path)}"
        signature = FileSignature.of(path)
        entry = self._known.get(key)
        if isinstance(entry, dict) and entry.get("signature") == vars(signature) and "digest" in entry:
            progress(signature.size)
            return str(entry["digest"])
        nbytes = signature.size if kind == "full" else 0
        pool = self._readers.for_opening([path], nbytes=nbytes) if self._readers else inline_pool()
        digest = str(pool.ask(DigestRequest(path, kind, signature.size), progress=progress))
        if FileSignature.of(path) != signature:
            raise changed(path)
        self._known[key] = {"signature": vars(signature), "digest": digest}
        self._save()
        return digest

    def _save(self) -> None:
        if not self._is_saved:
            return
        # Whoever can't write here, or has no room, takes the digests again next time.
        with contextlib.suppress(OSError):
            replace_text(self._path, json.dumps(self._known, indent=1, sort_keys=True))


def _load(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):  # unreadable or damaged: digests are taken again
        return {}
    return known if isinstance(known, dict) else {}


def _full(path: Path, progress: Progress) -> str:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    buffer = bytearray(_READ_BYTES)
    with _opened(path) as file:
        while nbytes := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:nbytes])
            progress(nbytes)
    return hasher.hexdigest()


def _sampled(path: Path, size: int, progress: Progress) -> str:
    hasher = blake3.blake3(f"{size}\n{_structure(path)}\n".encode())
    with _opened(path) as file:
        for i in range(_NUM_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * i // (_NUM_BLOCKS - 1))
            hasher.update(file.read(_BLOCK_BYTES))
            progress(size // _NUM_BLOCKS)
    return hasher.hexdigest()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise SourceError(f"source can't be read ({error.strerror})", kind="unreadable", path=path) from error


def _structure(path: Path) -> str:
    """Every dataset of an HDF5 file with shape, dtype and chunks, sorted."""
    lines: list[str] = []

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            lines.append(f"{name} {item.shape} {item.dtype.str} {item.chunks}")

    with open_hdf5(path) as file, translated("can't read the structure", path=path):
        file.visititems(note)
    return "\n".join(sorted(lines))
