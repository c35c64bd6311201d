"""What is the matter with a file, and what of it can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.check.intact import (
    Intact,
    intact_by_chunks,
    intact_by_commits,
    intact_by_report,
    read_without_root,
)
from ups_store.errors import FormatError, VersionTooNewError
from ups_store.format.build_tail import TAIL_MAGIC, parse_tail_header
from ups_store.format.layout import PAGE_BYTES, consecutive_runs
from ups_store.read.catalog import Catalog, read_building, read_finished
from ups_store.read.gather import Samples
from ups_store.read.recovery import BUILDING_SUFFIX, read_commits, read_is_spool
from ups_store.read.store_file import read_at
from ups_store.read.verify import Report, verify_file
from ups_store.system import files
from ups_store.system.paths import check_one_file
from ups_store.system.urls import check_local

_MARK_BYTES = 1 << 16  # of both ends, in which a store's own words are looked for
_MARKS = (b'"ups_store"', TAIL_MAGIC)
_PACKED_MARK = b'"requires":["packed"'


class Status(Enum):
    """What a file is; the value says it to programs."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    IDENTITY_LOST = "identity_lost"
    METADATA_DAMAGED = "metadata_damaged"
    RESUMABLE = "resumable"
    FINISHED_NOT_RENAMED = "finished_not_renamed"
    TORN_TAIL = "torn_tail"
    TRUNCATED = "truncated"
    FOREIGN = "foreign"
    TOO_NEW = "too_new"
    PACKED = "packed"
    PACKED_DAMAGED = "packed_damaged"
    MISSING = "missing"

    @property
    def is_sound(self) -> bool:
        """Whether every byte of the file is as it should be."""
        return self in (Status.COMPLETE, Status.PACKED)

    @property
    def title(self) -> str:
        """The value for people."""
        return self.value.replace("_", " ")


ADVICE = {
    Status.COMPLETE: "nothing to do",
    Status.DAMAGED: "`verify --repair CONFIG` rebuilds the damage, or `doctor --salvage OUT` copies the rest",
    Status.IDENTITY_LOST: "`doctor --salvage OUT` copies the samples; what they were made from is lost",
    Status.METADATA_DAMAGED: "copy it again, or build it again; while its ZIP directory is whole, any ZIP "
    "tool extracts its arrays, which aren't compressed",
    Status.RESUMABLE: "run the build again to continue, or `doctor --salvage OUT` copies what is committed",
    Status.FINISHED_NOT_RENAMED: "run the build again, or rename it yourself",
    Status.TORN_TAIL: "`doctor --salvage OUT` copies what verifies; build the rest with --overwrite",
    Status.TRUNCATED: "copy it again from where it came, or `doctor --salvage OUT` copies what verifies",
    Status.FOREIGN: "check the path: it isn't a store",
    Status.TOO_NEW: "upgrade ups-store, or read it with any Zarr v3 reader",
    Status.PACKED: "`unpack` makes the mapped store of it",
    Status.PACKED_DAMAGED: "a packed file can't be repaired or salvaged: copy it again from where it came; "
    "if a build with `cache.codec` made it, remove it and run `ups-store build --config CONFIG` again, which "
    "makes what is missing; else pack its store again; as long as it can be opened, samples that aren't "
    "named here are read as before",
    Status.MISSING: "copy it again from where the others came, or make it again",
}


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `examine` found.

    Attributes:
        path: The file.
        status: What it is.
        problems: What is wrong, for people, in file order; what to do is the status's advice.
        catalog: Its metadata and geometry; None where they can't be read.
        intact: What of it verifies; None likewise.
        num_committed: Samples that are there, where how many there will be isn't known yet; else None.
    """

    path: Path
    status: Status
    problems: tuple[str, ...]
    catalog: Catalog | None = None
    intact: Intact | None = None
    num_committed: int | None = None

    @property
    def num_samples(self) -> int:
        """N; 0 where it can't be told."""
        if self.num_committed is not None:
            return self.num_committed
        return self.catalog.layout.num_samples if self.catalog else 0

    @property
    def savable(self) -> Samples:
        """Numbers of the samples that `salvage` would copy, sorted, int64."""
        return self.intact.complete if self.intact else np.zeros(0, np.int64)

    @property
    def lost_arrays(self) -> tuple[str, ...]:
        """Arrays and constants of which nothing verifies: `salvage` leaves them out."""
        if self.catalog is None or self.intact is None:
            return ()
        kept = {*self.intact.arrays, *self.intact.constants}
        arrays = (array.meta for array in self.catalog.layout.arrays.values())
        return tuple(meta.name for meta in arrays if meta.name not in kept and not meta.is_companion)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "path": str(self.path),
            "status": self.status.value,
            "num_samples": self.num_samples,
            "num_savable": len(self.savable),
            "savable": spans(self.savable),
            "lost_arrays": list(self.lost_arrays),
            "problems": list(self.problems),
            "advice": ADVICE[self.status],
        }


def missing(path: Path) -> Diagnosis:
    """Of one of several files, which isn't there."""
    return Diagnosis(path, Status.MISSING, ("no such file",))


def examine(path: Path, *, progress: Callable[[int], None] | None = None) -> Diagnosis:
    """Classify a file and check every sample of it; nothing is changed.

    Args:
        path: Any file.
        progress: Called with the number of bytes that were checked since the last call.
    Raises:
        StoreNotFoundError: If there is no file.
        SpecError: For a pattern, kind "partitions".
    """
    check_local(path)
    check_one_file(path)
    with files.opened(path) as fd:
        try:
            catalog = read_finished(fd, path)
        except VersionTooNewError as error:
            return Diagnosis(path, Status.TOO_NEW, (what_is_wrong(error),))
        except FormatError as error:
            if error.kind == "packed":
                return _examine_packed(fd, path, progress)
            return _examine_from_start(fd, path, what_is_wrong(error))
    try:
        report = verify_file(path, progress=progress)
    except VersionTooNewError as error:  # a newer minor version: it can be read
        return Diagnosis(path, Status.TOO_NEW, (what_is_wrong(error),), catalog)
    problems = tuple(map(str, report.problems))
    return Diagnosis(path, _status_of(report), problems, catalog, intact_by_report(catalog, report))


def _status_of(report: Report) -> Status:
    if not report.ok:
        return Status.DAMAGED
    return Status.FINISHED_NOT_RENAMED if report.path.name.endswith(BUILDING_SUFFIX) else Status.COMPLETE


def what_is_wrong(error: FormatError) -> str:
    """The error's sentence without what to do about it: the advice says that."""
    bare = copy.copy(error)
    bare.hint = None
    return str(bare)


def _examine_packed(fd: int, path: Path, progress: Callable[[int], None] | None) -> Diagnosis:
    from ups_store.packed.store import open_descriptor

    try:
        with open_descriptor(path, fd) as store:
            problems = tuple(map(str, store.verify(progress=progress).problems))
    except VersionTooNewError as error:
        return Diagnosis(path, Status.TOO_NEW, (what_is_wrong(error),))
    except FormatError as error:
        problems = (what_is_wrong(error),)
    return Diagnosis(path, Status.PACKED_DAMAGED if problems else Status.PACKED, problems)


def _examine_from_start(fd: int, path: Path, problem: str) -> Diagnosis:
    """A file that isn't a finished store, by its metadata entries alone (spec 6.5)."""
    try:
        catalog = read_building(fd, path)
    except VersionTooNewError as error:
        return Diagnosis(path, Status.TOO_NEW, (what_is_wrong(error),))
    except FormatError as error:
        if error.kind == "not_a_file":
            return Diagnosis(path, Status.FOREIGN, (problem,))
        if error.kind == "packed":
            return Diagnosis(path, Status.PACKED_DAMAGED, (problem,))
        return _examine_without_root(fd, path, tuple(dict.fromkeys((problem, what_is_wrong(error)))))
    layout, nbytes = catalog.layout, files.size(fd)
    if layout.num_samples > nbytes:  # spec 11.1: no memory in proportion to what a file claims
        return Diagnosis(path, Status.TRUNCATED, (problem,))
    if nbytes == layout.building_nbytes:
        try:
            header = parse_tail_header(read_at(fd, layout.tail_offset, PAGE_BYTES), layout, path=path)
        except FormatError as error:
            if read_is_spool(fd, layout):  # sparse, and none of its chunks has a checksum
                return Diagnosis(path, Status.TORN_TAIL, (what_is_wrong(error),))
            return Diagnosis(
                path, Status.TORN_TAIL, (what_is_wrong(error),), catalog, intact_by_chunks(fd, catalog)
            )
        num_committed = None
        if read_is_spool(fd, layout):
            num_committed = int(read_commits(fd, layout, header)[0].sum())
        intact = intact_by_commits(fd, catalog, header)
        return Diagnosis(path, Status.RESUMABLE, (), catalog, intact, num_committed)
    status = Status.DAMAGED if nbytes == layout.file_nbytes else Status.TRUNCATED
    status = Status.TORN_TAIL if nbytes > layout.file_nbytes else status
    return Diagnosis(path, status, (problem,), catalog, intact_by_chunks(fd, catalog))


def _examine_without_root(fd: int, path: Path, problems: tuple[str, ...]) -> Diagnosis:
    """A file whose metadata can't all be read: what is wrong may be the root's alone."""
    try:
        catalog = read_without_root(fd, path)
    except FormatError:
        return Diagnosis(path, _status_without_metadata(fd), problems)
    return Diagnosis(path, Status.IDENTITY_LOST, problems, catalog, intact_by_chunks(fd, catalog))


def _status_without_metadata(fd: int) -> Status:
    """What a file is by the words of ours that it has; a packed one has another in its root."""
    first, last = (read_at(fd, at, _MARK_BYTES) for at in (0, max(0, files.size(fd) - _MARK_BYTES)))
    if not any(mark in part for part in (first, last) for mark in _MARKS):
        return Status.FOREIGN
    return Status.PACKED_DAMAGED if _PACKED_MARK in first else Status.METADATA_DAMAGED


def spans(samples: Samples) -> list[list[int]]:
    """Sorted sample numbers as stretches `[first, past_last]`."""
    return [[first, first + num] for first, num in consecutive_runs(samples)]
