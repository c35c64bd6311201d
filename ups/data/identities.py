"""What files are, as hashes: of checkpoints, stores, sources and reports. Nothing here needs torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import ups_store
from ups.config import RunConfig
from ups.data.stores import StoreError, place_of, store_path
from ups.errors import CheckpointError
from ups.trained.checkpoint import check_whole, read_document, stored_digest
from ups_store.sources import SourceFile, find_sources


def hash_of(values: Any) -> str:
    """sha256 of JSON values, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def checkpoint_identity(path: Path, *, kind: str) -> str | None:
    """Hash of an exported model's weights and specification; None if it can't be read, or is damaged."""
    try:
        status = path.stat()
        _check_once(path, kind, status.st_size, status.st_mtime_ns)
        return hash_of([stored_digest(path, kind=kind), read_document(path, kind=kind).get("spec")])
    except (CheckpointError, OSError):
        return None


@lru_cache(maxsize=64)
def _check_once(path: Path, kind: str, nbytes: int, mtime_ns: int) -> None:
    """`check_whole`, which reads all of a file, once for each that there is."""
    check_whole(path, kind=kind)


def file_identity(path: Path) -> str | None:
    """sha256 of a file; None if it isn't there."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def store_identities(config: RunConfig, folder: Path) -> dict[str, str | None]:
    """Fingerprints of the stores of a run's tasks and splits in a folder, by path; None if missing."""
    paths = (store_path(folder, task, split) for task in config.data.tasks for split in config.data.split)
    return {str(path): _store_identity(path) for path in paths}


def _store_identity(path: Path) -> str | None:
    if (place := place_of(path)) is None:
        return None
    try:
        with ups_store.open(place) as store:
            return store.fingerprint
    except StoreError:
        return None


def source_identity(config: RunConfig) -> str:
    """Hash of names, lengths and times of change of the files that stores are built from.

    Their content would take a pass through all of them. Files that are copied elsewhere have another time,
    and are another source: the build compares their content then.
    """
    files: set[Path] = set()
    for task in config.data.tasks:
        for split in config.data.split:
            try:
                files |= {found.path for found in _sources(config, task, split)}
            except StoreError:  # a build says what is missing
                continue
    if (outer := config.data.follow_external) is not None:
        files |= {path for path in outer.rglob("*") if path.is_file()}
    return hash_of(sorted(_signatures(files)))


def _sources(config: RunConfig, task: str, split: str) -> Iterable[SourceFile]:
    data = config.data
    return find_sources(data.root, task=config.build.get_task(task), split=split, files=data.files)


def _signatures(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    return [(str(path), status.st_size, status.st_mtime_ns) for path in files if (status := path.stat())]
