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
from ups_store.errors import SourceError
from ups_store.ingest.hdf5 import open_hdf5, translated

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


class DigestCache:
    """Digests by real path, valid as long as the file's signature is the same.

    Args:
        folder: Folder of the stores; the cache is one small JSON file in it.
        rehash: Whether to ignore what is there.
    """

    def __init__(self, folder: Path, *, rehash: bool = False) -> None:
        self._path = folder / _CACHE_NAME
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
        digest = _full(path, progress) if kind == "full" else _sampled(path, signature.size, progress)
        if FileSignature.of(path) != signature:
            raise changed(path)
        self._known[key] = {"signature": vars(signature), "digest": digest}
        self._save()
        return digest

    def _save(self) -> None:
        # Whoever can't write here, or has no room, takes the digests again next time.
        with contextlib.suppress(OSError):
            replace_text(self._path, json.dumps(self._known, indent=1, sort_keys=True))


def changed(path: Path) -> SourceError:
    """The error for a source that isn't what it was when the build began."""
    return SourceError(
        "source changed during the build",
        kind="source_changed",
        path=path,
        hint="wait until nobody writes to it and run again; --overwrite if samples were committed",
    )


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
