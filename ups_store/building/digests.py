"""Digests of source files, kept beside the stores so that the next run needn't read the sources."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ups_store.building.readers import Readers, given_or_own
from ups_store.errors import FormatError, SourceError
from ups_store.sources.contents import FileState, changed
from ups_store.sources.reader import DigestKind, digest_request
from ups_store.system.files import Progress, replace_text

__all__ = ["DIGEST_CHARACTERS", "DigestCache", "DigestKind", "Digests", "FileSignature"]


DIGEST_CHARACTERS = 64  # of blake3 in hexadecimal digits
_CACHE_NAME = ".source_digests.json"


class Digests(Protocol):
    """Something that knows the digests of sources."""

    def digest(self, path: Path, kind: DigestKind, progress: Progress) -> str:
        """The digest of a source; see `DigestCache.digest`."""


@dataclass(frozen=True)
class FileSignature:
    """What changes when a file does, without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def state(self) -> FileState:
        """The part of it that readers compare."""
        return self.device, self.inode, self.size, self.mtime_ns

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
        save: Whether to write what is found to the folder.
        readers: Read the files; by default one of its own for each.
    """

    def __init__(
        self, folder: Path, *, rehash: bool = False, save: bool = True, readers: Readers | None = None
    ) -> None:
        self._readers = readers
        self._path = folder / _CACHE_NAME
        self._is_saved = save
        self._known: dict[str, Any] = {} if rehash else _load(self._path)

    @property
    def known(self) -> dict[str, Any]:
        """Signatures and digests by kind and real path."""
        return self._known

    @property
    def paths(self) -> list[Path]:
        """Where the sources were that it knows, sorted; they may be gone."""
        return sorted({Path(key.partition(":")[2]) for key in self._known})

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
        request = digest_request(path, kind, signature.size)
        with given_or_own(self._readers) as readers:
            digest = str(readers.pool.ask(request, progress=progress))
        if FileSignature.of(path) != signature:
            raise changed(path)
        self._known[key] = {"signature": vars(signature), "digest": digest}
        self._save()
        return digest

    def _save(self) -> None:
        if not self._is_saved:
            return
        # Where it can't be written, the digests are taken again next time.
        with contextlib.suppress(OSError, FormatError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(self._known, indent=1, sort_keys=True))


def _load(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):  # unreadable or damaged: digests are taken again
        return {}
    return known if isinstance(known, dict) else {}
