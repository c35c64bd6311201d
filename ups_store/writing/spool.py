"""`Spool`: samples whose number, or whose numbers of rows, come out at the end only (spec 6.13).

The geometry of a store follows from these numbers, so the samples are committed into a building file that has
room for more than there are. It is sparse: it takes what its samples take. At the end they are copied, inside
the kernel, into the store, whose bytes are those that `create` makes where all is known beforehand. The spool
goes when the store has its name; until then the next call of the same identity continues it, and
`open(partial=True)` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import FormatError, IdentityMismatchError, SpecError, StoreNotFoundError, TruncatedError
from ups_store.format.build_tail import BUILDER_LOCK, HOW_TO_REPLACE, pack_records
from ups_store.format.checksum import crc32c
from ups_store.format.layout import Layout
from ups_store.format.metadata import ArraySpec, dtype_name, dtype_of
from ups_store.read.base import spec_of
from ups_store.read.gather import Samples
from ups_store.read.recovery import (
    State,
    building_path,
    read_building_file,
    read_commits,
    read_is_spool,
    read_records,
)
from ups_store.system import files, locks
from ups_store.writing.commit import BuildingFile, extent_of, failures_as_errors, take_back, write_entries
from ups_store.writing.create import create_building, create_spool, new_building, write_skeleton
from ups_store.writing.encode import sample_payload
from ups_store.writing.plan import plan_of
from ups_store.writing.samples import nbytes_of, with_counts
from ups_store.writing.target import new_file
from ups_store.writing.writer import BatchedCommits, StoreWriter

BUFFER_BYTES: int = 16 << 20  # with their types: the module is in a cycle for mypy
SAVE_EVERY_S: float = 60.0
_ROOM_SAMPLES, _ROOM_BYTES, _ROOM_ROWS_BYTES = 1 << 17, 64 << 30, 256 << 30  # of a new spool
_ROOM_ALL_ROWS_BYTES = 1 << 40  # of all ragged arrays
_GROWTHS = (16, 4, 2)  # times the room where that is full: the less often, the less is copied
_MAX_ROOM_BYTES = (1 << 44) - (1 << 12)  # ext4 has no longer files
NOTES_SUFFIX = ".notes"
_CRC_DIGITS = 8  # that a note begins with


class Spool:
    """Takes samples in their order, a buffer of which is committed at a time, and makes the store of them.

    Those that an interrupted call has committed are compared with what is added in their place; with
    `on_mismatch="restart"` others give way. N, and the lengths of ragged arrays, are None in `arrays`.

    Attributes:
        num_samples: Samples that were added, or passed over: to pass over some that were found, set it.
        num_found: Committed samples that an interrupted call left.
        note: JSON values to keep when samples are committed next; its "num_samples" says how many.
        notes: Those that were kept, also by that call, oldest first.
        nbytes_of_last: Bytes of the sample that was added last.
    """

    def __init__(
        self,
        target: Path,
        arrays: Mapping[str, ArraySpec],
        *,
        on_mismatch: str,
        buffer_bytes: int = BUFFER_BYTES,
        save_every_s: float = SAVE_EVERY_S,
        **content: Any,
    ) -> None:
        self.path, self._arrays, self._content = target, arrays, content
        self._restarts = on_mismatch == "restart"
        self._ragged = [name for name, spec in arrays.items() if spec.is_ragged]
        self._save_every_s, self._saved_s = save_every_s, time.monotonic()
        nbytes = _item_nbytes(arrays)
        old = spool_left(target)
        sample_nbytes = sum(nbytes[name] for name in arrays if name not in self._ragged)
        num = min(_ROOM_SAMPLES, max(1024, _ROOM_BYTES // max(1, sample_nbytes)))
        rows_bytes = min(_ROOM_ROWS_BYTES, _ROOM_ALL_ROWS_BYTES // max(1, len(self._ragged)))
        rows = {name: rows_bytes // max(1, nbytes[name]) for name in self._ragged}
        if old is not None and _item_nbytes(old.arrays) == nbytes:
            num, rows = old.num_samples, {name: old.num_rows.get(name, rows[name]) for name in rows}
        options: dict[str, Any] = {**content, "on_mismatch": on_mismatch}
        self.writer = create_spool(target, _with_room(arrays, num, rows), **options)
        try:
            self._notes_path = building_path(target).with_name(building_path(target).name + NOTES_SUFFIX)
            with failures_as_errors(building_path(target), 0, "what was committed was not taken up"):
                self._take_up()
            self._batch = BatchedCommits(
                self._layout,
                self._checked,
                self._commit,
                num_samples=1 << 62,
                buffer_bytes=buffer_bytes,
                save_every_s=save_every_s,
            )
        except BaseException:
            self.close()
            raise

    @property
    def _layout(self) -> Layout:
        return self.writer.building.layout

    def _take_up(self) -> None:
        """Find what an interrupted call has committed, up to the first gap: what lies behind it goes."""
        building = self.writer.building
        building.offsets = {name: offsets.copy() for name, offsets in building.offsets.items()}
        committed = self._committed()
        num_committed = int(np.argmin(np.append(committed, False)))
        self.note: dict[str, Any] | None = None
        self.notes, self.nbytes_of_last = list[dict[str, Any]](), 0
        self._notes_end = 0
        try:
            with files.opened(self._notes_path) as fd:
                lines = files.read_at(fd, 0, files.size(fd)).splitlines(keepends=True)
        except StoreNotFoundError:
            lines = []
        for line in lines:
            try:
                note = json.loads(line[_CRC_DIGITS:])
            except ValueError:
                break  # a kill cut it
            if _line_of(note) != line or note["num_samples"] > num_committed:
                break
            self.notes.append(note)
            self._notes_end += len(line)
        if self.notes:
            num_committed = self.notes[-1]["num_samples"]
        if not num_committed:
            self.notes, self._notes_end = [], 0
            files.remove(self._notes_path)
        if self.notes:
            with files.opened(self._notes_path, writable=True) as fd:
                files.truncate(fd, self._notes_end)
        self._take_back(num_committed, committed)
        self.num_samples, self.num_found = 0, num_committed

    def _take_back(self, first: int, committed: npt.NDArray[np.bool_]) -> None:
        """Have no sample from this one on be committed, nor have rows."""
        building = self.writer.building
        beyond = first + np.flatnonzero(committed[first:])
        if len(beyond):
            take_back(building, beyond)
        self.num_committed = first
        for name, ragged in self._layout.ragged.items():
            num_rows, offsets = ragged.rows.meta.shape[0], building.offsets[name]
            if (offsets[first + 1 :] != num_rows).any():
                offsets[first + 1 :] = num_rows
                raw = offsets.astype("<i8", copy=False).data.cast("B")
                files.write_at(building.fd, ragged.offsets.offset, raw)

    def _committed(self) -> npt.NDArray[np.bool_]:
        building = self.writer.building
        return read_commits(building.fd, building.layout, building.header)[0]

    def drop_found(self, first: int = 0) -> None:
        """Take back what an interrupted call has committed, from this sample on."""
        with failures_as_errors(building_path(self.path), 0, "what was committed was not taken back"):
            self._take_back(first, self._committed())
        self.num_found = first

    def add(self, sample: Mapping[str, Any]) -> None:
        """Take the next sample: every array by name, copied; of a ragged one with any number of rows."""
        try:
            self._batch.commit(self.num_samples, sample)
        except SpecError as error:
            error.sample = self.num_samples
            raise
        self.num_samples += 1
        self.nbytes_of_last = sum(map(nbytes_of, sample.values()))

    def flush(self) -> None:
        """Commit the samples that wait."""
        self._batch.flush()
        with failures_as_errors(self._notes_path, 0, "a note was not written"):
            self._write_note()

    def _write_note(self) -> None:
        if self.note is None:
            return
        fd, line = files.open_or_create(self._notes_path), _line_of(self.note)
        try:
            files.write_at(fd, self._notes_end, line)  # not at the end: a write that failed is repeated
        finally:
            files.close(fd)
        self.notes.append(self.note)
        self._notes_end += len(line)
        self.note = None

    def _checked(self, index: int, sample: Any) -> dict[str, Any]:
        """Make a batch of one sample."""
        metas = self.writer.metas
        if not isinstance(sample, Mapping) or sample.keys() != metas.keys():
            names = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
            problem = "all arrays of a sample are added together"
            raise SpecError(problem, kind="arrays", expected=sorted(metas), found=names)
        values = {name: sample_payload(sample[name], meta) for name, meta in metas.items()}
        return {name: [value] if metas[name].is_ragged else value[None] for name, value in values.items()}

    def _commit(self, samples: Samples, arrays: Mapping[str, Any]) -> None:
        """Commit consecutive samples; the first of them may be committed already, with the same values."""
        num_known = min(max(self.num_committed - int(samples[0]), 0), len(samples))
        if num_known:
            known = {name: values[:num_known] for name, values in arrays.items()}
            flaw = self._flaw_of(samples[:num_known], known)
            if flaw is not None:
                if not self._restarts:
                    raise self.not_repeated(flaw[0], "the sample that was committed", f"another {flaw[1]!r}")
                self._take_back(flaw[0], self._committed())
                self.num_found, num_known = flaw[0], flaw[0] - int(samples[0])
        fresh = samples[num_known:]
        if not len(fresh):
            return
        values = {name: rows[num_known:] for name, rows in arrays.items()}
        first, end = int(fresh[0]), int(fresh[-1]) + 1
        lengths = {name: [len(rows) for rows in values[name]] for name in self._ragged}
        path, problem = self.writer.building.building_path, "the samples were not committed"
        with failures_as_errors(path, self._needed_bytes(), problem):
            self._make_room(end, lengths)
            building = self.writer.building
            for name in self._ragged:
                offsets, ragged = building.offsets[name], self._layout.ragged[name]
                offsets[first + 1 : end + 1] = offsets[first] + np.cumsum(lengths[name])
                begin = ragged.offsets.offset + 8 * (first + 1)
                files.write_at(building.fd, begin, offsets[first + 1 : end + 1].astype("<i8").tobytes())
            self.writer.commit_many(fresh, values)
            self.num_committed = end
            self._write_note()
            if time.monotonic() - self._saved_s >= self._save_every_s:
                if self.notes:  # durable first, for samples that none covers are made again
                    with files.opened(self._notes_path, writable=True) as fd:
                        files.sync_data(fd)
                    files.sync_folder(self._notes_path.parent)
                files.sync_data(building.fd)
                self._saved_s = time.monotonic()
            if files.free_bytes(self.path.parent) < self._needed_bytes():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # now, not when all samples are made

    def _needed_bytes(self) -> int:
        """Count the bytes that the store takes beside its spool."""
        return files.allocated_bytes(building_path(self.path))

    def differing(self, number: int, sample: Mapping[str, Any]) -> str | None:
        """Name an array of which another sample was committed; None if it is the same."""
        flaw = self._flaw_of(np.array([number]), self._checked(number, sample))
        return flaw and flaw[1]

    def _flaw_of(self, samples: Samples, arrays: Mapping[str, Any]) -> tuple[int, str] | None:
        """Sample and array of the first of committed samples that is another one; None if none is."""
        first, num, flaw = int(samples[0]), len(samples), None
        for name in self._ragged:  # of other lengths, in which they can't be compared
            known = np.diff(self.writer.building.offsets[name][first : first + num + 1])
            differs = known != [len(rows) for rows in arrays[name][:num]]
            if differs.any():
                num = int(differs.argmax())
                flaw = first + num, name
        try:
            if num:
                batch = {name: values[:num] for name, values in arrays.items()}
                self.writer.commit_many(samples[:num], batch)
        except SpecError as error:
            if error.kind != "committed" or error.array is None or error.sample is None:
                raise
            return error.sample, error.array.removesuffix(".crc32c")
        return flaw

    def not_repeated(self, sample: int, expected: str, found: str) -> IdentityMismatchError:
        """Make the error for samples that aren't those of the call that this one continues."""
        return IdentityMismatchError(
            f"the samples don't begin as in the run that this one continues, at sample {sample}",
            kind="not_repeated",
            path=building_path(self.path),
            expected=expected,
            found=found,
            hint=f"give them in the same order, or say another identity; {HOW_TO_REPLACE} begins again there",
        )

    def _make_room(self, num_samples: int, lengths: Mapping[str, Sequence[int]]) -> None:
        """Put a larger spool in the place of one that is full; `lengths` are those of the last samples."""
        building, room = self.writer.building, self._layout.num_samples
        rows = {name: ragged.rows.meta.shape[0] for name, ragged in self._layout.ragged.items()}
        needed = {
            name: int(building.offsets[name][self.num_committed]) + sum(lengths[name])
            for name in self._ragged
        }
        if num_samples <= room and all(needed[name] < rows[name] for name in self._ragged):
            return
        for growth in _GROWTHS:
            num = max(room, num_samples) * (growth if num_samples > room else 1)
            num_rows = {
                name: num if needed[name] < num else max(num, needed[name]) * growth
                for name, num in rows.items()
            }
            plan = plan_of(_with_room(self._arrays, num, num_rows), **self._content)
            if plan.layout.building_nbytes <= _MAX_ROOM_BYTES:
                break
        committed = np.arange(self.num_committed)
        crcs = read_records(building.fd, self._layout, committed)[:, 1:-1]

        def fill(larger: BuildingFile) -> None:
            _copy_samples(building, larger, self.num_committed)
            for name, ragged in larger.layout.ragged.items():
                offsets = larger.offsets[name].copy()
                offsets[: self.num_committed + 1] = building.offsets[name][: self.num_committed + 1]
                files.write_at(larger.fd, ragged.offsets.offset, offsets.tobytes())
                larger.offsets = {**larger.offsets, name: offsets}
            records = pack_records(larger.header, committed, crcs)
            files.write_at(larger.fd, larger.layout.table_offset, records.tobytes())

        with building.gate(exclusive=True):
            larger = create_building(self.path, plan, is_lazy=True, replace=True, is_spool=True, fill=fill)
        self.writer.close()
        self.writer = StoreWriter(larger)

    def finish(self, *, attrs: Mapping[str, Any] | None = None) -> Path:
        """Make the store of all samples, and remove the spool; closes it.

        `attrs` are root attributes that are known only now. Fewer samples than an interrupted call has
        committed are an error; where these may give way, the others go.
        """
        self.flush()
        if self.num_samples < self.num_found:
            if not self._restarts:
                expected, end = f"{self.num_found} samples or more", f"the end after {self.num_samples}"
                raise self.not_repeated(self.num_samples, expected, end)
            self.drop_found(self.num_samples)
        building, num = self.writer.building, self.num_committed
        lengths = {name: np.diff(building.offsets[name][: num + 1]) for name in self._ragged}
        content = self._content if attrs is None else {**self._content, "attrs": attrs}
        plan = plan_of(with_counts(self._arrays, num, lengths), **content)
        with (
            failures_as_errors(building.building_path, 0, "the store was not made"),
            building.gate(exclusive=True),
        ):
            crcs = read_records(building.fd, self._layout, np.arange(num))[:, 1:-1]
            with new_file(self.path, force=True, needed_bytes=plan.layout.file_nbytes) as fd:
                files.allocate(fd, plan.layout.file_nbytes)
                store = new_building(self.path, plan, is_lazy=True)
                try:
                    store.fd = fd
                    write_skeleton(store, plan, has_tail=False)
                    _copy_samples(building, store, num)
                    write_entries(store, crcs)
                finally:
                    store.fd = -1  # it isn't this object that closes it
            with contextlib.suppress(OSError):  # the store is there; the next call removes them
                files.remove(self._notes_path)
                files.remove(building.building_path)
        self.close()
        return self.path

    def close(self) -> None:
        """Release the spool: what is committed stays, samples that wait don't."""
        self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Commit what waits, also after an error of the samples themselves, for the call that continues."""
        try:
            if self.writer.building.fd >= 0 and not self._batch.has_failed:
                self.flush()
        finally:
            self.close()


@dataclass(frozen=True)
class UnfinishedSpool:
    """A spool that an interrupted call left."""

    identity: Mapping[str, Any]
    arrays: Mapping[str, ArraySpec]  # N and the lengths of ragged ones are None
    num_samples: int  # that it has room for
    num_rows: Mapping[str, int]  # likewise, of each ragged array


def spool_left(target: Path) -> UnfinishedSpool | None:
    """Look for a spool of the store at a path; None too where it is damaged."""
    path = building_path(target)
    try:
        with files.opened(path) as fd:
            building = read_building_file(fd, path)
            if building.state is State.FINISHED or not read_is_spool(fd, building.catalog.layout):
                return None
    except (StoreNotFoundError, FormatError):
        return None
    layout = building.catalog.layout
    metas = [array.meta for array in layout.per_sample if not array.meta.is_companion]
    num_rows = {name: ragged.rows.meta.shape[0] for name, ragged in layout.ragged.items()}
    arrays = {meta.name: spec_of(meta, None) for meta in metas}
    return UnfinishedSpool(building.catalog.root.identity["content"], arrays, layout.num_samples, num_rows)


def remove_spool(target: Path) -> None:
    """Remove a spool and its notes, unless a process writes it."""
    path = building_path(target)
    with contextlib.suppress(StoreNotFoundError), files.opened(path, writable=True) as fd:
        if locks.try_lock(fd, BUILDER_LOCK) and files.is_file_at(fd, path):
            files.remove(path.with_name(path.name + NOTES_SUFFIX))
            files.remove(path)


def _item_nbytes(arrays: Mapping[str, ArraySpec]) -> dict[str, int]:
    """Count the bytes of a sample of each array, of a ragged one those of a row."""
    return {
        name: math.prod(n for n in spec.shape[1:] if n is not None)
        * dtype_of(dtype_name(spec.dtype)).itemsize
        for name, spec in arrays.items()
    }


def _with_room(
    arrays: Mapping[str, ArraySpec], num_samples: int, num_rows: Mapping[str, int]
) -> dict[str, ArraySpec]:
    """Make the arrays of a spool: until samples are there, the first one has all rows, and no other any."""
    lengths = {name: np.zeros(num_samples, np.int64) for name in num_rows}
    for name, num in num_rows.items():
        lengths[name][0] = num
    return with_counts(arrays, num_samples, lengths)


def _copy_samples(source: BuildingFile, target: BuildingFile, num_samples: int) -> None:
    """Copy the first samples from a spool, whose checksums are recorded."""
    for array in source.layout.per_sample if num_samples else ():
        first, end = extent_of(source, array, 0)[0], extent_of(source, array, num_samples - 1)[1]
        if array.entry is None or first == end:
            continue
        offset = target.layout.arrays[array.meta.name].offset
        copied = files.copy_range(source.fd, first, target.fd, offset, end - first)
        if copied < end - first:
            problem = "another program cut the unfinished file"
            raise TruncatedError(problem, path=source.building_path, expected=end - first, found=copied)


def _line_of(note: Mapping[str, Any]) -> bytes:
    text = json.dumps(note, sort_keys=True).encode()
    return b"%0*x %b\n" % (_CRC_DIGITS, crc32c(text), text)
