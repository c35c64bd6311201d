"""What is the matter with a file, in whatever state it is, and a new store of what of it can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Self

import numpy as np

from ups_store.check.intact import (
    Intact,
    intact_by_chunks,
    intact_by_commits,
    intact_by_report,
    is_identity_lost,
    lengths_of,
    read_intact,
    read_without_root,
)
from ups_store.errors import FormatError, IdentityMismatchError, VersionTooNewError, hinting
from ups_store.format.build_tail import TAIL_MAGIC, parse_tail_header
from ups_store.format.layout import PAGE_BYTES, consecutive_runs
from ups_store.format.metadata import ArraySpec
from ups_store.format.zip_records import END_BYTES, END_MAGIC
from ups_store.read.base import spec_of
from ups_store.read.catalog import Catalog, read_building, read_finished
from ups_store.read.gather import Samples
from ups_store.read.recovery import BUILDING_SUFFIX, read_commits, read_is_spool
from ups_store.read.store_file import read_at, read_constant
from ups_store.read.verify import verify_file
from ups_store.system import files
from ups_store.system.paths import check_local, check_one_file
from ups_store.writing.create import create

ORIGINAL_SAMPLE = "original_sample"

_MARK_BYTES = 1 << 16  # of both ends, in which a store's own words are looked for
_MARKS = (b'"ups_store"', TAIL_MAGIC)
_PACKED_MARK = b'"requires":["packed"'


class Status(Enum):
    """What a file is: the value says it to programs, `title` to people, `advice` what to do about it."""

    COMPLETE = "complete", "nothing to do"
    DAMAGED = (
        "damaged",
        "`verify --repair CONFIG` rebuilds the damage, or `doctor --salvage OUT` copies the rest",
    )
    IDENTITY_LOST = (
        "identity_lost",
        "`doctor --salvage OUT` copies the samples; what they were made from is lost",
    )
    METADATA_DAMAGED = (
        "metadata_damaged",
        "copy it again, or build it again; while its ZIP directory is whole, any ZIP tool extracts its "
        "arrays, which aren't compressed",
    )
    RESUMABLE = (
        "resumable",
        "run the build again to continue, or `doctor --salvage OUT` copies what is committed",
    )
    FINISHED_NOT_RENAMED = "finished_not_renamed", "run the build again, or rename it yourself"
    TORN_TAIL = (
        "torn_tail",
        "`doctor --salvage OUT` copies what verifies; build the rest with --overwrite",
    )
    TRUNCATED = (
        "truncated",
        "copy it again from where it came, or `doctor --salvage OUT` copies what verifies",
    )
    FOREIGN = "foreign", "check the path: it isn't a store"
    TOO_NEW = "too_new", "upgrade ups-store, or read it with any Zarr v3 reader"
    PACKED = "packed", "`unpack` makes the mapped store of it"
    PACKED_DAMAGED = (
        "packed_damaged",
        "a packed file can't be repaired or salvaged: copy it again from where it came; if a build with "
        "`cache.codec` made it, remove it and run `ups-store build --config CONFIG` again, which makes what "
        "is missing; else pack its store again; as long as it can be opened, samples that aren't named here "
        "are read as before",
    )
    MISSING = "missing", "copy it again from where the others came, or make it again"

    advice: str

    def __new__(cls, value: str, advice: str) -> Self:
        """Make the value the first of the two texts."""
        status = object.__new__(cls)
        status._value_, status.advice = value, advice
        return status

    @property
    def is_sound(self) -> bool:
        """Return whether every byte of the file is as it should be."""
        return self in (Status.COMPLETE, Status.PACKED)

    @property
    def title(self) -> str:
        """The value for people."""
        return str(self.value).replace("_", " ")


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `examine` found."""

    path: Path
    status: Status
    problems: tuple[str, ...] = ()  # for people, in file order; what to do is the status's advice
    catalog: Catalog | None = None  # None where metadata and geometry can't be read
    intact: Intact | None = None  # what of it verifies
    num_committed: int | None = None  # where how many samples there will be isn't known yet

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
        saved = {*self.intact.arrays, *self.intact.constants}
        arrays = (array.meta for array in self.catalog.layout.arrays.values())
        return tuple(meta.name for meta in arrays if meta.name not in saved and not meta.is_companion)

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return {
            "path": str(self.path),
            "status": self.status.value,
            "num_samples": self.num_samples,
            "num_savable": len(self.savable),
            "savable": spans(self.savable),
            "lost_arrays": list(self.lost_arrays),
            "problems": list(self.problems),
            "advice": self.status.advice,
        }


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
            return _examine(fd, path, progress)
        except VersionTooNewError as error:
            return Diagnosis(path, Status.TOO_NEW, (_sentence(error),))


def _examine(fd: int, path: Path, progress: Callable[[int], None] | None) -> Diagnosis:
    try:
        catalog = read_finished(fd, path)
    except VersionTooNewError:
        raise
    except FormatError as error:
        if error.kind == "packed":
            return _examine_packed(fd, path, progress)
        return _examine_from_start(fd, path, _sentence(error))
    report = verify_file(path, progress=progress)
    is_renamed = not path.name.endswith(BUILDING_SUFFIX)
    sound = Status.COMPLETE if is_renamed else Status.FINISHED_NOT_RENAMED
    problems = tuple(map(str, report.problems))
    status = sound if report.ok else Status.DAMAGED
    return Diagnosis(path, status, problems, catalog, intact_by_report(catalog, report))


def _examine_packed(fd: int, path: Path, progress: Callable[[int], None] | None) -> Diagnosis:
    from ups_store.packed.store import open_descriptor

    try:
        with open_descriptor(path, fd) as store:
            problems = tuple(map(str, store.verify(progress=progress).problems))
    except VersionTooNewError:
        raise
    except FormatError as error:
        problems = (_sentence(error),)
    return Diagnosis(path, Status.PACKED_DAMAGED if problems else Status.PACKED, problems)


def _examine_from_start(fd: int, path: Path, problem: str) -> Diagnosis:
    """Examine a file that isn't a finished store, by its metadata entries alone (spec 6.5)."""
    try:
        catalog = read_building(fd, path)
    except VersionTooNewError:
        raise
    except FormatError as error:
        if error.kind in ("not_a_file", "packed"):
            status = Status.FOREIGN if error.kind == "not_a_file" else Status.PACKED_DAMAGED
            return Diagnosis(path, status, (problem,))
        problems = tuple(dict.fromkeys((problem, _sentence(error))))
        try:
            catalog = read_without_root(fd, path)  # what is wrong may be the root's alone
        except FormatError:
            return Diagnosis(path, _status_without_metadata(fd), problems)
        return Diagnosis(path, Status.IDENTITY_LOST, problems, catalog, intact_by_chunks(fd, catalog))
    layout, nbytes = catalog.layout, files.size(fd)
    if layout.num_samples > nbytes:  # spec 11.1: no memory in proportion to what a file claims
        return Diagnosis(path, Status.TRUNCATED, (problem,))
    if nbytes == layout.building_nbytes:
        try:
            header = parse_tail_header(read_at(fd, layout.tail_offset, PAGE_BYTES), layout, path=path)
        except FormatError as error:
            torn = Diagnosis(path, Status.TORN_TAIL, (_sentence(error),))
            if read_is_spool(fd, layout):  # sparse, and none of its chunks has a checksum
                return torn
            return replace(torn, catalog=catalog, intact=intact_by_chunks(fd, catalog))
        num_committed = None
        if read_is_spool(fd, layout):
            num_committed = int(read_commits(fd, layout, header)[0].sum())
        intact = intact_by_commits(fd, catalog, header)
        return Diagnosis(path, Status.RESUMABLE, (), catalog, intact, num_committed)
    status = Status.TRUNCATED if nbytes < layout.file_nbytes else Status.DAMAGED
    if nbytes > layout.file_nbytes:  # finished once, if it ends where it should, or now, as stores do
        ends = (read_at(fd, end - END_BYTES, END_BYTES) for end in (layout.file_nbytes, nbytes))
        status = Status.DAMAGED if any(END_MAGIC in end for end in ends) else Status.TORN_TAIL
    return Diagnosis(path, status, (problem,), catalog, intact_by_chunks(fd, catalog))


def _status_without_metadata(fd: int) -> Status:
    """Tell what a file is by the words of ours that it has; a packed one has another in its root."""
    first, last = (read_at(fd, at, _MARK_BYTES) for at in (0, max(0, files.size(fd) - _MARK_BYTES)))
    if not any(mark in end for end in (first, last) for mark in _MARKS):
        return Status.FOREIGN
    return Status.PACKED_DAMAGED if _PACKED_MARK in first else Status.METADATA_DAMAGED


def _sentence(error: FormatError) -> str:
    """Return what is wrong without what to do about it: the advice says that."""
    bare = copy.copy(error)
    bare.hint = None
    return str(bare)


def spans(samples: Samples) -> list[list[int]]:
    """Return sorted sample numbers as stretches `[first, past_last]`."""
    return [[first, first + num] for first, num in consecutive_runs(samples)]


def salvage(diagnosis: Diagnosis, out: Path) -> Path:
    """Copy what verifies into a new store, whose path is returned; the examined file stays as it is.

    The new store has an int64 array `original_sample` with the old sample numbers, and its identity says what
    it was salvaged from, or `"identity": "lost"`.

    Args:
        diagnosis: Of the file.
        out: Where the new store goes; there must be nothing yet.
    Raises:
        FormatError: If nothing verifies.
        IdentityMismatchError: If an unfinished store of something else is at `out`.
        FileExistsError: If there is something at `out`.
        CorruptChunkError: If the file changed since it was examined.
    """
    path, catalog, intact, samples = diagnosis.path, diagnosis.catalog, diagnosis.intact, diagnosis.savable
    if catalog is None or intact is None or not len(samples):
        raise FormatError(
            "there is nothing to save",
            path=path,
            kind="nothing_to_salvage",
            expected="at least 1 sample that verifies",
            found=diagnosis.status.value,
            hint="copy it again, or build it again" if intact else diagnosis.status.advice,
        )
    if files.exists(out):
        raise FileExistsError(f"{out}: there is something already; give the new store another name")
    source: dict[str, Any] = {"identity": "lost"}
    if not is_identity_lost(catalog):
        content = catalog.root.identity.get("content")
        source = {"source_config_hash": catalog.root.config_hash, "source_content": content}
    identity = {"kind": "salvaged", **source, "samples": spans(samples)}
    identity["lost_arrays"] = list(diagnosis.lost_arrays)
    with files.opened(path) as fd:
        layout = catalog.layout
        number = ORIGINAL_SAMPLE
        while number in layout.arrays:  # a store that was salvaged before
            number = f"{number}_before" if number == ORIGINAL_SAMPLE else f"{number}_"
        specs = {name: spec_of(layout.arrays[name].meta, len(samples)) for name in intact.arrays}
        for name in specs.keys() & layout.ragged.keys():
            specs[name] = replace(specs[name], lengths=lengths_of(fd, layout.ragged[name], samples))
        specs[number] = ArraySpec((len(samples),), "int64", dims=("sample",))
        with hinting("give the new store another name", IdentityMismatchError, FormatError):
            writer = create(
                out,
                specs,
                constants={
                    name: read_constant(fd, layout.arrays[name], path=path) for name in intact.constants
                },
                dims={name: layout.arrays[name].meta.dims for name in intact.constants},
                identity=identity,
                attrs=catalog.root.attrs,
            )
        with writer:
            first = 0
            for batch, values in read_intact(fd, layout, intact.arrays, samples, path=path):
                writer.commit_many(np.arange(first, first + len(batch)), {**values, number: batch})
                first += len(batch)
            return writer.finish()
