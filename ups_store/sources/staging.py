"""Requests that a reader process can be given about sources which don't lie here yet: look, list, stage.

Each may take as long as its side gets on, and is ended where it doesn't, as with samples that are read.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ups_store.errors import SourceError
from ups_store.sources.attempts import Attempts, persistently
from ups_store.sources.download import fetch
from ups_store.sources.origins import Folder, Listed, Origin, Version

if TYPE_CHECKING:
    from ups_store.sources.reader import Reader

_SUFFIXES = (".h5", ".hdf5")
_MAX_DEPTH = 5  # names of folders and of the file, as where a folder of this machine is looked through
_MAX_LISTED_BYTES = 150_000  # what an answer may hold
_KEY_DIGITS = 12


def folder_of_copy(stage_dir: Path, origin: Origin) -> Path:
    """Where the copy of an origin lies: in a folder of its own, named by where it comes from.

    So the copy can have the origin's own name, which identities of stores hold.
    """
    return stage_dir / hashlib.sha256(origin.key.encode("utf-8", "surrogateescape")).hexdigest()[:_KEY_DIGITS]


@dataclass(frozen=True)
class LookRequest:
    """Ask what is there.

    Attributes:
        origin: Where.
        attempts: How long and how often.
        is_guess: Whether nothing is known to be there: some servers say "forbidden" instead of "not found".
    """

    origin: Origin
    attempts: Attempts
    is_guess: bool = False
    subject = "its size"
    first_sample = None

    @property
    def path(self) -> str:
        """For messages."""
        return self.origin.location

    def run(self, reader: Reader) -> Version | None:
        """What is there; None if nothing is."""
        reader.doing("asking")

        def look() -> Version | None:
            return self.origin.look(stall_s=self.attempts.stall_s)

        try:
            return persistently(look, origin=self.origin.location, attempts=self.attempts)
        except SourceError as error:
            if self.is_guess and error.kind == "not_allowed":
                return None
            raise


@dataclass(frozen=True)
class ListRequest:
    """Ask for the files of a remote folder that may be sources."""

    folder: Folder
    attempts: Attempts
    subject = "its files"
    first_sample = None

    @property
    def path(self) -> str:
        """For messages."""
        return self.folder.location

    def run(self, reader: Reader) -> list[Listed]:
        """HDF5 files by their names, to four folders deep."""
        reader.doing("listing")

        def list_files() -> list[Listed]:
            return [each for each in self.folder.files(stall_s=self.attempts.stall_s) if _may_be_source(each)]

        found = persistently(list_files, origin=self.folder.location, attempts=self.attempts)
        if len(pickle.dumps(found)) > _MAX_LISTED_BYTES:
            raise SourceError(
                "too many files to look through",
                kind="too_many_files",
                path=self.folder.location,
                found=f"{len(found):,} files",
                hint="name a folder further below by data.root, or files by data.files",
            )
        return found


def _may_be_source(listed: Listed) -> bool:
    path = PurePosixPath(listed.path)
    return path.suffix in _SUFFIXES and len(path.parts) <= _MAX_DEPTH


@dataclass(frozen=True)
class StageRequest:
    """Copy or fetch a source into a folder of its own; see `download.fetch`."""

    origin: Origin
    version: Version
    folder: Path
    attempts: Attempts
    subject = "its copy"
    first_sample = None

    @property
    def path(self) -> str:
        """For messages."""
        return self.origin.location

    def run(self, reader: Reader) -> int:
        """Bytes that were fetched."""
        return fetch(self.origin, self.version, self.folder, attempts=self.attempts, reader=reader)
