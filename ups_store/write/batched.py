"""Samples one at a time, committed many at a time: a pair of syncs for all that wait (spec 6.7)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.layout import Layout
from ups_store.format.metadata import dtype_of
from ups_store.read.gather import Samples
from ups_store.write.encode import Arrays

BUFFER_BYTES, SAVE_EVERY_S = 16 << 20, 1.0
MAX_WAITING = 16384  # tiny samples: what Python holds for each would be more than they are

_NONE = np.zeros(0, np.int64)


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
            found = f"buffer_bytes={buffer_bytes}, save_every_s={save_every_s}"
            raise SpecError("argument", kind="argument", expected="a byte or more; 0 s or more", found=found)
        self._check, self._commit_many = check, commit_many
        self._buffer_bytes, self._save_every_s = buffer_bytes, save_every_s
        users = [array.meta for array in layout.per_sample if not array.meta.is_companion]
        fixed = [meta for meta in users if not meta.is_ragged]
        self._num_samples, self._sample_nbytes = num_samples, sum(meta.sample_nbytes for meta in fixed)
        most = min(MAX_WAITING, num_samples, buffer_bytes // max(1, self._sample_nbytes))
        self._capacity = max(1, most)
        self._blocks = {
            meta.name: np.empty((self._capacity, *meta.sample_shape), dtype_of(meta.dtype)) for meta in fixed
        }
        self._ragged: dict[str, list[npt.NDArray[Any]]] = {meta.name: [] for meta in users if meta.is_ragged}
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
        if not self._is_usual(index, arrays):
            checked = self._check(index, arrays)
            index, arrays = int(index), {name: value[0] for name, value in checked.items()}
        if index not in self._waiting:
            self._add(index, arrays)
        else:
            self._check_same(index, arrays)
        is_full = len(self._waiting) >= self._capacity or self._nbytes >= self._buffer_bytes
        return self.flush() if is_full or time.monotonic() - self._began_s >= self._save_every_s else _NONE

    def _is_usual(self, index: int, arrays: Arrays) -> bool:
        """Whether there is nothing to check or to convert, which takes longer than to copy a small sample."""
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

    def _add(self, index: int, values: Mapping[str, Any]) -> None:
        if not self._waiting:
            self._began_s = time.monotonic()
        for name, block in self._blocks.items():
            block[len(self._waiting)] = values[name]
        for name, rows in self._ragged.items():
            del rows[len(self._waiting) :]  # of a call that was interrupted
            rows.append(values[name].copy())
            self._nbytes += rows[-1].nbytes
        self._nbytes += self._sample_nbytes
        self._waiting[index] = None

    def _check_same(self, index: int, values: Mapping[str, Any]) -> None:
        row = list(self._waiting).index(index)
        arrays: dict[str, Any] = {**self._blocks, **self._ragged}
        for name, rows in arrays.items():
            if rows[row].tobytes() != values[name].tobytes():
                hint = "hand a sample over once"
                problem = "it waits to be committed with other values"
                raise SpecError(problem, kind="committed", array=name, sample=index, hint=hint)

    def flush(self) -> Samples:
        """Commit the samples that wait; returns their numbers, int64. Raises as `commit`."""
        samples = np.array(list(self._waiting), np.int64)
        if not len(samples):
            return samples
        self.has_failed = True  # unless this returns
        arrays: dict[str, Any] = {**self._blocks, **self._ragged}
        self._commit_many(samples, {name: values[: len(samples)] for name, values in arrays.items()})
        self._waiting.clear()
        self.has_failed, self._nbytes = False, 0
        return samples

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.has_failed:
            self.flush()
