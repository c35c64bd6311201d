"""The writers: values in, commits out; of many samples at a time, or one by one, committed together."""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import CommitError, NotCommittedError, ReadError, SpecError, StoreClosedError
from ups_store.format.build_tail import HOW_TO_REPLACE
from ups_store.format.layout import Layout, consecutive_runs
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.read.gather import Samples
from ups_store.read.recovery import (
    intact_parts,
    is_read_to_count,
    read_commits,
    read_committed,
    read_records,
)
from ups_store.read.verify import verify_file
from ups_store.system import locks
from ups_store.system.files import Progress
from ups_store.system.memory import num_cores
from ups_store.writing.commit import (
    BuildingFile,
    commit_samples,
    failures_as_errors,
    finish,
    publish,
    take_back,
)
from ups_store.writing.encode import (
    Arrays,
    Scratches,
    Values,
    as_payload,
    as_rows,
    blocks_of,
    check_unmasked,
    encode_block,
)

BUFFER_BYTES, SAVE_EVERY_S = 16 << 20, 1.0
MAX_WAITING = 16384  # tiny samples: what Python holds for each would be more than they are

Note = Callable[[str], object]  # takes one sentence

_NONE = np.zeros(0, np.int64)
_MAX_SHOWN = 8


def warn(sentence: str) -> None:
    """Be a `Note` that warns."""
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)


class Committer:
    """Commits samples into a building file; any number of processes of one machine, any threads.

    Attributes:
        path: Where the store will be published; of one in memory a path that other processes can open and
            join already, and the object that keeps the memory.
        building: The open building file.
    """

    is_finished = False

    def __init__(self, building: BuildingFile) -> None:
        self.path = building.path
        self.building = building
        self._mutex = threading.Lock()  # record locks belong to the open file, so they don't part threads
        self._failed = False  # a second sync could report success for pages that the first one dropped
        self._scratches = Scratches()
        locks.close_on_fork(building)

    @property
    def num_samples(self) -> int:
        """N."""
        return self.building.layout.num_samples

    def missing(self) -> npt.NDArray[np.int64]:
        """Numbers of the samples that are not committed, sorted, int64."""
        if self.is_finished:
            return _NONE
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
        written = np.zeros(len(samples), bool)
        if self.is_finished:
            return written
        values = self._check_arrays(arrays, samples)
        if not len(samples):
            return written
        order, problem = np.argsort(samples), "the samples were not committed"
        with (
            self._mutex,
            failures_as_errors(building.building_path, building.needed_bytes, problem, passing=(ReadError,)),
            building.gate(exclusive=False),
            building.samples_locked(samples[order]),
        ):
            with building.reading():
                committed = read_committed(building.fd, building.layout, building.header, samples[order])
            known, fresh = order[committed], order[~committed]
            if len(known):
                self._check_same(samples[known], known, values)
            if len(fresh):
                try:
                    commit_samples(building, samples[fresh], fresh, values, self._scratches)
                except BaseException:
                    self._failed = True
                    raise
                written[fresh] = True
        return written

    def _check_same(self, samples: Samples, rows: Samples, values: Values) -> None:
        """Refuse other values of committed samples: their checksums are recorded."""
        fd, layout = self.building.fd, self.building.layout
        records = [read_records(fd, layout, np.arange(n, n + num)) for n, num in consecutive_runs(samples)]
        recorded = np.concatenate(records)[:, 1:-1]
        for block in blocks_of(layout, rows, values):
            with self._scratches.lent() as scratch:
                _, crcs = encode_block(layout, rows[block], values, scratch)
            for number, column in np.argwhere(crcs != recorded[block])[:1].tolist():
                raise SpecError(
                    "it was committed with other values",
                    kind="committed",
                    path=self.path,
                    array=layout.per_sample[column].meta.name,
                    sample=int(samples[block][number]),
                    hint="a committed sample stays as it is: leave it out, or begin again with "
                    f"{HOW_TO_REPLACE}",
                )

    def batched(
        self, *, buffer_bytes: int = BUFFER_BYTES, save_every_s: float = SAVE_EVERY_S
    ) -> BatchedCommits:
        """Take samples one at a time, and commit them together: group commit.

        Args:
            buffer_bytes: How many bytes of samples wait at most; as much memory is taken.
            save_every_s: When the first has waited so long, the next call commits all; no thread does it
                meanwhile.
        Returns:
            The buffer; use it in a `with` block, whose end commits those that still wait.
        Raises:
            SpecError: If one of the arguments is below 0, or the buffer holds nothing.
        """

        def check(index: int, arrays: Arrays) -> dict[str, Any]:
            self._usable()
            return self._check_arrays(_as_batch(arrays), self._check_indices([index]))

        return BatchedCommits(
            self._usable().layout,
            check,
            self.commit_many,
            num_samples=self.num_samples,
            buffer_bytes=buffer_bytes,
            save_every_s=save_every_s,
        )

    def _check_indices(self, indices: Sequence[int] | Samples) -> Samples:
        raw = np.asarray(indices)
        is_valid = raw.ndim == 1 and (raw.dtype.kind in "iu" or not raw.size)
        ordered = np.sort(raw) if is_valid else raw
        if not is_valid or (ordered[1:] == ordered[:-1]).any():
            raise SpecError("indices", kind="index", expected="distinct integers, shape (M,)", found=indices)
        if len(raw) and (ordered[0] < 0 or ordered[-1] >= self.num_samples):
            expected = f"0 <= index < {self.num_samples}"
            outside = int(raw[(raw < 0) | (raw >= self.num_samples)][0])
            raise SpecError("no such sample", kind="index", expected=expected, found=outside)
        return raw.astype(np.int64)

    def _check_arrays(self, arrays: Arrays, samples: Samples) -> dict[str, Any]:
        """Every array of a batch as bytes of the declared dtype; of a ragged one a list of such."""
        _check_mapping(arrays)
        if self.metas.keys() != arrays.keys():
            problem, expected = "all per-sample arrays are committed together", sorted(self.metas)
            raise SpecError(problem, kind="arrays", expected=expected, found=sorted(arrays))
        values: dict[str, Any] = {}
        for name, meta in self.metas.items():
            if meta.is_ragged:
                offsets = self.building.offsets[name]
                values[name] = as_rows(arrays[name], meta, offsets[samples + 1] - offsets[samples])
            else:
                values[name] = as_payload(arrays[name], meta, (len(samples), *meta.sample_shape))
        return values

    @functools.cached_property
    def metas(self) -> dict[str, ArrayMeta]:
        """The arrays that a sample has, by name."""
        per_sample = (array.meta for array in self.building.layout.per_sample)
        return {meta.name: meta for meta in per_sample if not meta.is_companion}

    def _usable(self) -> BuildingFile:
        if self.building.fd < 0:
            hint = "it was finished or closed, or this is a forked child, which opens its own with `join`"
            raise StoreClosedError("the writer is closed", path=self.path, hint=hint)
        if self._failed:
            hint = "close it and create it again to continue"
            raise CommitError("an earlier commit or finish failed", path=self.path, hint=hint)
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

    def check_committed(self, *, note: Note = warn, progress: Progress | None = None) -> Samples:
        """Read back what is committed: samples whose bytes have changed since then aren't committed any more.

        `create` does this where it continues an unfinished store, unless it is asked not to (spec 6.9).

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
        path = building.building_path
        if self.is_finished:  # its commit records are gone
            hint = f"build it again with {HOW_TO_REPLACE}"
            verify_file(path, progress=progress).check("damaged since it was finished", hint=hint)
            return _NONE
        if is_read_to_count(building.header):  # no commit counts whose sample doesn't check
            return _NONE
        with self._mutex:
            with building.reading():  # without locks: committed samples are never written again
                fd, layout = building.fd, building.layout
                committed, crcs = read_commits(fd, layout, building.header)
                samples, num_threads = np.flatnonzero(committed), num_cores()
                intact = intact_parts(
                    fd, layout, samples, crcs[committed], num_threads=num_threads, progress=progress
                )
            damaged = samples[~intact.all(axis=1)]
            if len(damaged):
                try:
                    take_back(building, damaged)
                except CommitError:
                    self._failed = True
                    raise
        if len(damaged):
            numbers = shown(map(str, damaged.tolist()))
            named = f"sample {numbers}" if len(damaged) == 1 else f"{len(damaged):,} samples ({numbers})"
            note(f"{path}: {named} had changed since an earlier run's commit, and will be written again; "
                 "check the disk")  # fmt: skip
        return damaged

    def finish(self) -> Path:
        """Complete the file and publish it under its own name, atomically and durably; closes the writer.

        Returns:
            `path`. A store in memory lives as long as this object, or a store that this process opened by it.
        Raises:
            NotCommittedError: If samples are missing; the writer stays usable.
            CommitError: If it didn't become durable; the writer is of no use afterwards.
        """
        building = self._usable()
        nbytes, problem = building.needed_bytes, "the store was not finished"
        with (
            self._mutex,
            failures_as_errors(building.building_path, nbytes, problem),
            building.gate(exclusive=True),
        ):
            try:
                (publish if self.is_finished else finish)(building)
            except NotCommittedError:
                raise
            except BaseException:
                self._failed = True
                raise
        self.close()
        return self.path

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


class BatchedCommits:
    """Takes samples one at a time and commits them together; made by `Committer.batched`, for one thread.

    A sample is acknowledged by the call that returns its number; until then the end of the process, or a
    power loss, may lose it, as if it had never been handed over. The end of a `with` block commits what
    waits, after an error in the block, too, but not after a commit has failed.

    Attributes:
        num_waiting: Samples that were handed over and aren't acknowledged.
    """

    def __init__(
        self,
        layout: Layout,
        check: Callable[[int, Arrays], dict[str, Any]],
        commit_many: Callable[[Samples, Arrays], object],
        *,
        num_samples: int,
        buffer_bytes: int,
        save_every_s: float,
    ) -> None:
        if buffer_bytes < 1 or not save_every_s >= 0:
            limits = f"buffer_bytes={buffer_bytes}, save_every_s={save_every_s}"
            raise SpecError("argument", kind="argument", expected="a byte or more; 0 s or more", found=limits)
        self._check, self._commit_many = check, commit_many
        self._buffer_bytes, self._save_every_s = buffer_bytes, save_every_s
        metas = [array.meta for array in layout.per_sample if not array.meta.is_companion]
        fixed = [meta for meta in metas if not meta.is_ragged]
        self._num_samples, self._sample_nbytes = num_samples, sum(meta.sample_nbytes for meta in fixed)
        self._capacity = max(1, min(MAX_WAITING, num_samples, buffer_bytes // max(1, self._sample_nbytes)))
        self._blocks = {
            meta.name: np.empty((self._capacity, *meta.sample_shape), dtype_of(meta.dtype)) for meta in fixed
        }
        self._ragged: dict[str, list[npt.NDArray[Any]]] = {meta.name: [] for meta in metas if meta.is_ragged}
        self._waiting: dict[int, None] = {}
        self._nbytes, self._began_s, self.has_failed = 0, 0.0, False

    @property
    def num_waiting(self) -> int:
        """Samples that were handed over and aren't acknowledged."""
        return len(self._waiting)

    def commit(self, index: int, arrays: Arrays) -> Samples:
        """Hand over a sample, copied before this returns; commit all that wait once they are many or old.

        Args:
            index: Sample number, 0 <= index < N.
            arrays: As for `Committer.commit`.
        Returns:
            Numbers of the samples that are committed since the last call, int64; usually none.
        Raises:
            SpecError: If an array is missing, unknown, or of another shape or dtype; if the sample waits with
                other values, kind "committed". The others still wait.
            CommitError: If those that wait didn't become durable; the writer is of no use afterwards.
        """
        values: Mapping[str, Any] = arrays
        if not self._is_usual(index, arrays):
            batch = self._check(index, arrays)
            index, values = int(index), {name: samples[0] for name, samples in batch.items()}
        if index in self._waiting:
            row = list(self._waiting).index(index)
            for name, samples in self._arrays().items():
                if samples[row].tobytes() != values[name].tobytes():
                    problem, hint = "it waits to be committed with other values", "hand a sample over once"
                    raise SpecError(problem, kind="committed", array=name, sample=index, hint=hint)
        else:
            num = len(self._waiting)
            if not num:
                self._began_s = time.monotonic()
            for name, block in self._blocks.items():
                block[num] = values[name]
            for name, rows in self._ragged.items():
                del rows[num:]  # of a call that was interrupted
                rows.append(values[name].copy())
                self._nbytes += rows[-1].nbytes
            self._nbytes += self._sample_nbytes
            self._waiting[index] = None
        is_full = len(self._waiting) >= self._capacity or self._nbytes >= self._buffer_bytes
        return self.flush() if is_full or time.monotonic() - self._began_s >= self._save_every_s else _NONE

    def _is_usual(self, index: int, arrays: Arrays) -> bool:
        """Tell that nothing has to be checked, which takes longer than to copy a small sample."""
        return (
            type(index) is int
            and 0 <= index < self._num_samples
            and isinstance(arrays, dict)
            and arrays.keys() == self._blocks.keys()
            and not self._ragged
            and all(
                type(value) is np.ndarray
                and value.dtype == self._blocks[name].dtype
                and value.shape == self._blocks[name].shape[1:]
                for name, value in arrays.items()
            )
        )

    def _arrays(self) -> dict[str, Any]:
        return {**self._blocks, **self._ragged}

    def flush(self) -> Samples:
        """Commit the samples that wait; returns their numbers, int64. Raises as `commit`."""
        samples = np.array(list(self._waiting), np.int64)
        if not len(samples):
            return samples
        self.has_failed = True  # unless this returns
        self._commit_many(samples, {name: rows[: len(samples)] for name, rows in self._arrays().items()})
        self._waiting.clear()
        self.has_failed, self._nbytes = False, 0
        return samples

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.has_failed:
            self.flush()


def shown(words: Iterable[str]) -> str:
    """List the first few words, for messages."""
    words = list(words)
    more = len(words) - _MAX_SHOWN
    return ", ".join(words[:_MAX_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _check_mapping(arrays: object) -> None:
    if not isinstance(arrays, Mapping):
        raise SpecError("arrays", kind="argument", expected="a mapping by name", found=type(arrays).__name__)


def _as_batch(arrays: Arrays) -> dict[str, Any]:
    """One sample as a batch of one."""
    _check_mapping(arrays)
    for name, value in arrays.items():
        check_unmasked(value, name)  # `asarray` drops masks
    return {
        name: np.asarray(value)[None] if hasattr(value, "dtype") else [value]
        for name, value in arrays.items()
    }
