"""The readers of a whole build: one pool, which grows once there is something to read.

There is at least one, also where `reading.num_workers` is 0: only a process of its own can be given up when
a read doesn't return.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ups_store.building.config import ReadingConfig
from ups_store.console import format_nbytes
from ups_store.errors import StoreError
from ups_store.sources.contents import EVERYTHING, Selection, SourceInfo
from ups_store.sources.reader_pool import Patience, ReaderPool, Skipped
from ups_store.sources.reader_process import ALIGN, MAX_SAMPLES, ReadRequest, describe_request
from ups_store.sources.source_files import BLOCK_BYTES, USUAL_SLOT_NBYTES, USUAL_SLOTS
from ups_store.sources.tasks import Task
from ups_store.system.memory import available_bytes, free_descriptors, num_cores

START_S = 0.4  # what it takes to start a reader
TINY_NBYTES = 32 << 20  # one reader reads that within the time that another takes to start
MAX_AUTO = 4  # readers beyond that wait for the one process that commits
FAST_BYTES_PER_S = 2e9  # of one reader: more than a process checksums, copies and commits
_BATCH_NBYTES = 32 << 20  # of samples of one file
_READER_NBYTES = 80 << 20  # Python, NumPy and HDF5
_READER_DESCRIPTORS = 4
_SPARE_DESCRIPTORS = 32  # for the store, its folder, and files of the system


@dataclass(frozen=True)
class Choice:
    """How many readers, and why, for people."""

    num_workers: int
    why: str

    def sentence(self) -> str:
        """Say what was chosen automatically."""
        by = describe_readers(self.num_workers)
        return f"reading {by}, chosen automatically ({self.why}; reading.num_workers sets it)"


def describe_readers(num_workers: int) -> str:
    """Say such as "with 2 reader processes", for people."""
    return f"with {num_workers} reader process" + ("es" if num_workers > 1 else "")


class Readers:
    """Processes that read sources for as long as a build takes, with deadlines; a context manager.

    Args:
        config: How many, and how long they may take.
        note: Given a sentence when a reader is replaced, and what was chosen; by default not shown.

    Attributes:
        pool: The pool; `resize`d here only.
        choice: The last choice.
        is_auto: Whether their number isn't configured.
        is_tuned: Whether the size of batches is to be tried out.
    """

    def __init__(self, config: ReadingConfig, *, note: Callable[[str], None] = lambda message: None) -> None:
        self.is_auto = config.num_workers == "auto"
        self.is_tuned = config.batch_size == "auto"
        num_workers = 1 if config.num_workers == "auto" else max(1, config.num_workers)
        self.choice = Choice(num_workers, "one opens the sources" if self.is_auto else "as configured")
        self._is_rate_known = False
        self._note = note
        self.pool = ReaderPool(
            num_workers,
            slot_nbytes=USUAL_SLOT_NBYTES,
            patience=Patience(
                timeout_s=config.timeout_s, open_timeout_s=config.open_timeout_s, retries=config.retries
            ),
            on_error="skip" if config.on_error == "skip" else "raise",
            note=note,
        )

    def for_samples(
        self, requests: Sequence[ReadRequest], *, nbytes: int, stored_nbytes: int, slot_nbytes: int
    ) -> ReaderPool:
        """Give the pool for reading samples, with as many readers as are worth their start.

        `nbytes` is how much is asked for, `stored_nbytes` how much that is in the files: more where they are
        reduced while they are read. `slot_nbytes` is the size of the largest batch.
        """
        pool = self.pool
        pool.resize(pool.num_workers, slot_nbytes=slot_nbytes)
        if self.is_auto and requests and not self._is_rate_known:
            most_nbytes = max(nbytes, stored_nbytes)
            if most_nbytes <= TINY_NBYTES:
                why = f"{format_nbytes(most_nbytes)} are read sooner than another one starts"
                self.choice = Choice(pool.num_workers, why)
            else:
                most = min(num_cores(), MAX_AUTO, len(requests))
                self._fit()
                # Bytes per second of one reader. The first reading opens the file, fills memory, and may have
                # to wait for another reader; it is enough where even then one is soon through.
                rate = None
                for _ in range(2):
                    started = time.perf_counter()
                    (item,) = pool.read(requests[:1])
                    if isinstance(item, Skipped):
                        rate = None
                        break
                    nbytes_read = sum(array.nbytes for array in item.arrays.values())
                    rate = nbytes_read / (time.perf_counter() - started)
                    if nbytes < 2 * START_S * rate:
                        break
                self._is_rate_known = True
                self.choice = Choice(most, "the first batch can't be read")
                if rate is not None:
                    self.choice = Choice(*chosen(nbytes, rate=rate, most=most))
                pool.resize(self.choice.num_workers, slot_nbytes=pool.slot_nbytes)
                if rate is not None and not self.is_tuned:  # else the trials note both choices
                    self._note(self.choice.sentence())
        self._fit()
        return pool

    def describe(
        self, path: Path, task: Task, selection: Selection = EVERYTHING, *, follow: Path | None = None
    ) -> SourceInfo:
        """Say what a file holds, as `open_source`; raises as `ReaderPool.ask`."""
        info: SourceInfo = self.pool.ask(describe_request(path, task, selection, follow))
        return info

    def read(
        self,
        info: SourceInfo,
        task: Task,
        selection: Selection,
        samples: range,
        *,
        follow: Path | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Read samples of one file into new memory, as `Source.read`; raises as `ReaderPool.read`."""
        arrays = {name: np.empty((len(samples), *a.shape), a.dtype) for name, a in info.arrays.items()}
        sample_nbytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in info.arrays.values())
        step = max(1, min(len(samples), MAX_SAMPLES, _BATCH_NBYTES // max(1, sample_nbytes)))
        self.pool.resize(self.pool.num_workers, slot_nbytes=step * sample_nbytes + ALIGN * len(arrays))
        dtypes = {name: array.dtype.name for name, array in arrays.items()}
        requests = []
        for first in range(0, len(samples), step):
            rows = np.arange(first, min(first + step, len(samples)))
            indices = rows + samples.start
            requests.append(ReadRequest(info.path, task, selection, rows, indices, dtypes, follow=follow))
        for batch in self.pool.read(requests):
            if isinstance(batch, Skipped):
                raise batch.error
            for name, values in batch.arrays.items():
                arrays[name][batch.samples] = values
        return arrays

    def _fit(self) -> None:
        """Have fewer readers, and then slots, than chosen if memory or descriptors don't suffice."""
        limit, slot_nbytes = self.pool.num_workers, self.pool.slot_nbytes
        if len(self.pool.status().readers) >= limit:
            return  # all of them run already
        room = {"memory": available_bytes(), "descriptors": free_descriptors()}
        num_workers, num_slots = fitting(limit, slot_nbytes=slot_nbytes, **room)
        if (num_workers, num_slots) != (limit, USUAL_SLOTS):
            readers = f"{num_workers} of {limit} readers with {num_slots} slots"
            self._note(f"{readers}: memory or descriptors are scarce")
            self.choice = Choice(num_workers, self.choice.why)
            self.pool.resize(num_workers, slot_nbytes=slot_nbytes, num_slots=num_slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()


@contextlib.contextmanager
def given_or_own(readers: Readers | None, config: ReadingConfig | None = None) -> Iterator[Readers]:
    """Give the readers of a caller, or new ones for the duration of a block."""
    if readers:
        yield readers
    else:
        with Readers(config or ReadingConfig()) as readers_of_block:
            yield readers_of_block


def chosen(nbytes: int, *, rate: float, most: int) -> tuple[int, str]:
    """Say how many readers are worth their start, and why.

    `rate` is what one reader was measured to give, in bytes per second, `most` how many there may be.
    """
    by_one = f"{format_nbytes(nbytes)} at {format_nbytes(int(rate))}/s by one reader"
    if rate >= FAST_BYTES_PER_S:
        return 1, f"{by_one}, faster than commits"
    # Another reader has to save more time than its start takes.
    worth = max(1, math.floor(nbytes / rate / START_S))
    if worth < most:
        return worth, f"{by_one}: another would take longer to start than it saves"
    return most, f"{by_one}, at most {most}"


def fitting(limit: int, *, slot_nbytes: int, memory: int, descriptors: int) -> tuple[int, int]:
    """Say for how many readers there is room, at most `limit`, and their number of slots.

    Reading takes memory beside the slots: what a reader is, and a block of the file.
    """
    num_workers = min(limit, (descriptors - _SPARE_DESCRIPTORS) // _READER_DESCRIPTORS)
    if num_workers < 1:
        raise StoreError(
            "too few file descriptors for a reader",
            kind="no_descriptors",
            expected=f"{_SPARE_DESCRIPTORS + _READER_DESCRIPTORS}",
            found=f"{descriptors} free",
            hint="raise `ulimit -n`",
        )
    for num_slots in range(USUAL_SLOTS, 0, -1):
        reader_nbytes = _READER_NBYTES + BLOCK_BYTES + num_slots * slot_nbytes
        possible = min(num_workers, memory // reader_nbytes)
        if possible >= 1:
            return possible, num_slots
    raise StoreError(
        "too little memory for a reader",
        kind="no_memory",
        expected=f"{reader_nbytes:,} bytes, with one slot of {slot_nbytes:,}",
        found=f"{memory:,} free",
        hint="free some, or raise the limit of the container",
    )
