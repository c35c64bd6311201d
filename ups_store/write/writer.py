"""The writers: values in, commits out."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import CommitError, NotCommittedError, ReadError, SpecError, StoreClosedError
from ups_store.format.build_tail import HOW_TO_REPLACE
from ups_store.format.metadata import ArrayMeta
from ups_store.read.gather import Samples
from ups_store.read.recovery import read_commits
from ups_store.system import locks
from ups_store.system.files import Progress
from ups_store.write.batched import BUFFER_BYTES, SAVE_EVERY_S, BatchedCommits
from ups_store.write.building import BuildingFile, failures_as_errors
from ups_store.write.commit import commit_pieces, committed_among, finish, publish, recorded_crcs
from ups_store.write.encode import (
    DURABLE_PIECE_BYTES,
    LAZY_PIECE_BYTES,
    Arrays,
    Piece,
    Scratches,
    Values,
    as_payload,
    as_rows,
    check_unmasked,
    encode_piece,
    pieces_of,
)
from ups_store.write.recheck import Note, check_finished, describe_taken_back, take_back_damaged, warn


class Committer:
    """Commits samples into a building file; any number of processes of one machine, any threads.

    Attributes:
        path: Where the store will be published; of one in memory a path that other processes can open and
            join already, and the object that keeps the memory.
        building: The open building file.
    """

    def __init__(self, building: BuildingFile) -> None:
        self.path = building.path
        self.building = building
        self._mutex = threading.Lock()  # record locks belong to the open file, so they don't part threads
        self._failed = False
        self._scratches = Scratches()
        locks.close_on_fork(building)

    @property
    def num_samples(self) -> int:
        """N."""
        return self.building.layout.num_samples

    def missing(self) -> npt.NDArray[np.int64]:
        """Numbers of the samples that are not committed, sorted, int64."""
        building = self._usable()
        with building.reading():
            committed, _ = read_commits(building.fd, building.layout, building.header)
        return np.flatnonzero(~committed)

    def commit(self, index: int, arrays: Arrays) -> bool:
        """Commit one sample: all per-sample arrays together, copied before this returns.

        Args:
            index: Sample number, 0 <= index < N.
            arrays: Every per-sample array by name, each of its sample's shape and dtype; for a ragged array
                with as many rows as `create` was given, as text a `str`.
        Returns:
            True if it was written; False if the sample was committed before, with the same values.
        Raises:
            SpecError: If an array is missing, unknown, of another shape or dtype, or has masked elements; if
                the sample was committed with other values, kind "committed".
            CommitError: If it didn't become durable; the writer is of no use afterwards.
        """
        return bool(self.commit_many([index], _as_batch(arrays))[0])

    def commit_many(self, indices: Sequence[int] | Samples, arrays: Arrays) -> npt.NDArray[np.bool_]:
        """Commit samples with one pair of syncs; 4 MiB or more at a time make it fast.

        Args:
            indices: Distinct sample numbers, shape (M,), in any order.
            arrays: Every per-sample array by name, shape (M, ...) in the order of `indices`; for a ragged
                array a list of M arrays, as text of `str`.
        Returns:
            Which were written, bool, shape (M,); False where a sample was committed before.
        Raises:
            SpecError: As for `commit`; then none of them was written.
            CommitError: If they didn't become durable; the writer is of no use afterwards.
        """
        building = self._usable()
        samples = self._check_indices(indices)
        values = self._check_arrays(arrays, samples)
        order = np.argsort(samples)
        written = np.zeros(len(samples), bool)
        if not len(samples):
            return written
        nbytes = building.needed_bytes
        with (
            self._mutex,
            failures_as_errors(
                building.building_path, nbytes, "the samples were not committed", passing=(ReadError,)
            ),
            building.gate(exclusive=False),
            building.samples_locked(samples[order]),
        ):
            is_there = committed_among(building, samples[order])
            there, fresh = order[is_there], order[~is_there]
            if len(there):
                self._check_same(samples[there], there, values)
            if len(fresh):
                self._write(samples[fresh], fresh, values)
                written[fresh] = True
        return written

    def batched(
        self, *, buffer_bytes: int = BUFFER_BYTES, save_every_s: float = SAVE_EVERY_S
    ) -> BatchedCommits:
        """Take samples one at a time, and commit them together: group commit.

        Args:
            buffer_bytes: How many bytes of samples wait at most; as much memory is taken.
            save_every_s: When the first has waited so long, the next call commits all; no thread does it
                meanwhile.
        Returns:
            What takes them; use it in a `with` block, whose end commits those that still wait.
        Raises:
            SpecError: If one of the arguments is below 0, or the buffer holds nothing.
        """
        building = self._usable()
        return BatchedCommits(
            building.layout,
            self._checked,
            self.commit_many,
            num_samples=self.num_samples,
            buffer_bytes=buffer_bytes,
            save_every_s=save_every_s,
        )

    def _checked(self, index: int, arrays: Arrays) -> dict[str, Any]:
        """One sample as `commit_many` takes it, checked."""
        self._usable()
        return self._check_arrays(_as_batch(arrays), self._check_indices([index]))

    def _check_same(self, samples: Samples, rows: Samples, values: Values) -> None:
        """Refuse other values of committed samples: their checksums are recorded."""
        layout, recorded = self.building.layout, recorded_crcs(self.building, samples)
        for part in self._pieces(samples, rows, values, LAZY_PIECE_BYTES):
            with self._scratches.lent() as scratch:
                crcs = encode_piece(layout, samples[part], rows[part], values, scratch).crcs
            for number, column in np.argwhere(crcs != recorded[part])[:1].tolist():
                raise SpecError(
                    "it was committed with other values",
                    kind="committed",
                    path=self.path,
                    array=layout.per_sample[column].meta.name,
                    sample=int(samples[part][number]),
                    hint="a committed sample stays as it is: leave it out, or begin again with "
                    f"{HOW_TO_REPLACE}",
                )

    def _pieces(self, samples: Samples, rows: Samples, values: Values, piece_bytes: int) -> list[slice]:
        layout = self.building.layout
        rows_nbytes = sum(values[name][row].nbytes for name in layout.ragged for row in rows.tolist())
        return pieces_of(layout, len(samples), piece_bytes, rows_nbytes=rows_nbytes)

    def _write(self, samples: Samples, rows: Samples, values: Values) -> None:
        layout = self.building.layout
        piece_bytes = LAZY_PIECE_BYTES if self.building.is_lazy else DURABLE_PIECE_BYTES

        @contextlib.contextmanager
        def encoded(part: slice) -> Iterator[Piece]:
            with self._scratches.lent() as scratch:
                yield encode_piece(layout, samples[part], rows[part], values, scratch)

        pieces = self._pieces(samples, rows, values, piece_bytes)
        try:
            commit_pieces(self.building, samples, pieces, encoded)
        except BaseException:
            self._failed = True  # a second sync could report success for pages that the first one dropped
            raise

    def _check_indices(self, indices: Sequence[int] | Samples) -> Samples:
        raw = np.asarray(indices)
        is_valid = raw.ndim == 1 and (raw.dtype.kind in "iu" or not raw.size)
        ordered = np.sort(raw) if is_valid else raw
        if not is_valid or (ordered[1:] == ordered[:-1]).any():
            raise SpecError("indices", kind="index", expected="distinct integers, shape (M,)", found=indices)
        if len(raw) and (ordered[0] < 0 or ordered[-1] >= self.num_samples):
            expected = f"0 <= index < {self.num_samples}"
            found = int(raw[(raw < 0) | (raw >= self.num_samples)][0])
            raise SpecError("no such sample", kind="index", expected=expected, found=found)
        return raw.astype(np.int64)

    def _check_arrays(self, arrays: Arrays, samples: Samples) -> dict[str, Any]:
        metas = self.metas
        _check_mapping(arrays)
        if metas.keys() != arrays.keys():
            raise SpecError(
                "all per-sample arrays are committed together",
                kind="arrays",
                expected=sorted(metas),
                found=sorted(arrays),
            )
        return {name: self._payload(arrays[name], meta, samples) for name, meta in metas.items()}

    @functools.cached_property
    def metas(self) -> dict[str, ArrayMeta]:
        """The arrays that a sample has, by name."""
        per_sample = (array.meta for array in self.building.layout.per_sample)
        return {meta.name: meta for meta in per_sample if not meta.is_companion}

    def _payload(self, values: Any, meta: ArrayMeta, samples: Samples) -> Any:
        if not meta.is_ragged:
            return as_payload(values, meta, (len(samples), *meta.sample_shape))
        offsets = self.building.offsets[meta.name]
        return as_rows(values, meta, offsets[samples + 1] - offsets[samples])

    def _usable(self) -> BuildingFile:
        if self.building.fd < 0:
            raise StoreClosedError(
                "the writer is closed",
                path=self.path,
                hint="it was finished or closed, or this is a forked child, which opens its own with `join`",
            )
        if self._failed:
            raise CommitError(
                "an earlier commit or finish failed",
                path=self.path,
                hint="close it and create it again to continue",
            )
        return self.building

    def close(self) -> None:
        """Release the file; what was committed stays, and `create` continues it, unless it is in memory."""
        self.building.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StoreWriter(Committer):
    """The builder of a store: a committer that can also finish.

    Attributes:
        is_finished: Whether an earlier run completed the file and died before the rename.
    """

    def __init__(self, building: BuildingFile, *, is_finished: bool = False) -> None:
        super().__init__(building)
        self.is_finished = is_finished

    def missing(self) -> npt.NDArray[np.int64]:
        """Numbers of the samples that are not committed, sorted, int64."""
        return np.zeros(0, np.int64) if self.is_finished else super().missing()

    def commit_many(self, indices: Sequence[int] | Samples, arrays: Arrays) -> npt.NDArray[np.bool_]:
        """Commit samples with one pair of syncs; see `Committer.commit_many`."""
        if self.is_finished:
            self._usable()
            return np.zeros(len(self._check_indices(indices)), bool)
        return super().commit_many(indices, arrays)

    def check_committed(self, *, note: Note = warn, progress: Progress | None = None) -> Samples:
        """Read back what is committed: samples whose bytes have changed since then aren't committed any more.

        `create` does this where it continues an unfinished store, unless it is asked not to.

        Args:
            note: Given a sentence about such samples; by default a RuntimeWarning.
            progress: Called with the number of payload bytes that were read since the last call.
        Returns:
            Numbers of these samples, int64, sorted; `missing` has them, too.
        Raises:
            CorruptChunkError: If bytes of a finished file have changed, whose samples can't be written again.
            CommitError: If it couldn't be noted in the file; the writer is of no use afterwards.
        """
        building, progress = self._usable(), progress or (lambda nbytes: None)
        if self.is_finished:
            check_finished(building, progress)
            return np.zeros(0, np.int64)
        with self._mutex:
            try:
                damaged = take_back_damaged(building, progress)
            except CommitError:
                self._failed = True  # as after a failed commit
                raise
        if len(damaged):
            note(describe_taken_back(building, damaged))
        return damaged

    def __exit__(self, *error: object) -> None:
        """Close it; warn if it is left in order, with everything committed, and nothing published."""
        try:
            is_in_order = error[:1] == (None,) and self.building.fd >= 0 and not self._failed
            if is_in_order and not len(self.missing()):
                warnings.warn(
                    f"{self.path}: all {self.num_samples:,} samples are committed, but `finish` wasn't "
                    "called: nothing is there under this name; the same `create` continues it",
                    RuntimeWarning,
                    stacklevel=2,
                )
        finally:  # also where the warning is an error, or looking needs memory that isn't there
            super().__exit__(*error)

    def finish(self) -> Path:
        """Complete the file and publish it under its own name, atomically and durably; closes the writer.

        Returns:
            `path`. A store in memory lives as long as this object, or a store that this process opened by it.
        Raises:
            NotCommittedError: If samples are missing; the writer stays usable.
            CommitError: If it didn't become durable; the writer is of no use afterwards.
        """
        building = self._usable()
        nbytes = building.needed_bytes
        with (
            self._mutex,
            failures_as_errors(building.building_path, nbytes, "the store was not finished"),
            building.gate(exclusive=True),
        ):
            try:
                (publish if self.is_finished else finish)(building)
            except NotCommittedError:
                raise
            except BaseException:
                self._failed = True  # as after a failed commit
                raise
        self.close()
        return self.path


def _check_mapping(arrays: object) -> None:
    if not isinstance(arrays, Mapping):
        raise SpecError("arrays", kind="argument", expected="a mapping by name", found=type(arrays).__name__)


def _as_batch(arrays: Arrays) -> dict[str, Any]:
    """One sample as a batch of one."""
    _check_mapping(arrays)
    for name, value in arrays.items():
        check_unmasked(value, name)  # `asarray` drops masks
    return {name: _with_sample_axis(value) for name, value in arrays.items()}


def _with_sample_axis(value: Any) -> Any:
    return np.asarray(value)[None] if hasattr(value, "dtype") else [value]
