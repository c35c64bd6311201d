"""Batches of samples out of their sources, in the store's order and dtypes; deadlines of what follows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.building.config import CacheConfig
from ups_store.building.encode import DescribingEncoder
from ups_store.building.plan import StorePlan
from ups_store.building.readers import Readers, given_or_own
from ups_store.errors import SourceError, StoreError
from ups_store.format.metadata import MAX_ARRAYS
from ups_store.read.recovery import building_path
from ups_store.sources.contents import outer_state
from ups_store.sources.reader_pool import ReadBatch, Skipped
from ups_store.sources.reader_process import ALIGN, MAX_SAMPLES, ReadRequest
from ups_store.system.stalls import STALLED, DeadlineThread

BATCH_BYTES = 32 << 20  # read and committed together: then the two syncs of a batch cost little
MAX_CHUNKED_BYTES = 64 << 20  # of a batch that is larger in order to hold whole chunks
ENCODED_BATCHES = 32  # of a store of latents, at least: reading, encoding and committing overlap but for one
GROUPS_OF_BATCH = 4  # of samples that are encoded together, at least: commits are worth their syncs
FIRST_TIMES = 10.0  # longer for the first encode call, which compiles
_SHOWN = 8  # unread samples that an error names
# The errors that concern samples, of which another one of the same file may be sound.
_OF_SAMPLES = frozenset(
    ("read_failed", "not_finite", "grids_differ", "shapes_differ", "read_timeout", "reader_died", "no_memory")
)


class UnreadSamplesError(SourceError):
    """A build skipped samples that can't be read; the others are committed.

    Attributes:
        samples: Their numbers in the store, sorted.
    """

    kind = "samples_skipped"
    samples: tuple[int, ...] = ()


def split_batches(samples: npt.NDArray[np.int64], sample_nbytes: int) -> list[npt.NDArray[np.int64]]:
    """Cut sample numbers into batches of about `BATCH_BYTES`, at least one sample each."""
    size = _batch_size(sample_nbytes)
    return [samples[first : first + size] for first in range(0, len(samples), size)]


def _batch_size(sample_nbytes: int) -> int:
    return min(MAX_SAMPLES, max(1, BATCH_BYTES // max(1, sample_nbytes)))


def batch_size_of(plan: StorePlan) -> int:
    """Say how many samples a batch has where chunks have no say: whole groups of what is encoded together.

    With an encoder batches are smaller where the store is: the first one to be encoded is waited for.
    """
    size = plan.batch_size or _batch_size(plan.source_sample_nbytes)
    if plan.encoder and not plan.batch_size:
        size = min(size, max(plan.num_samples // ENCODED_BATCHES, GROUPS_OF_BATCH * plan.group_size))
    return min(MAX_SAMPLES, max(plan.group_size, size - size % plan.group_size))


def read_batches(
    plan: StorePlan,
    missing: npt.NDArray[np.int64],
    *,
    on_nan: str,
    readers: Readers | None = None,
    skipped: list[Skipped] | None = None,
    for_s: float | None = None,
) -> Generator[ReadBatch]:
    """Read missing samples with all their arrays, in the order of the store.

    Where the pool skips what can't be read, the samples of such a batch are asked for once more, one by one,
    after all others; nothing more is asked for of a file that is lost as a whole. With `for_s` no more
    batches are asked for so many seconds after the first one came.
    """
    skipped = skipped if skipped is not None else []
    requests = _requests(plan, missing, on_nan)
    infos = {info.path: info for info in plan.infos}
    longest = max((len(request.samples) for request in requests), default=0)
    lost: dict[Path, SourceError] = {}
    unanswered, first_s = deque[ReadRequest](), 0.0

    def asked_for(requests: Iterable[ReadRequest]) -> Iterator[ReadRequest]:
        for request in requests:
            if for_s and first_s and time.monotonic() > first_s + for_s:
                return
            if request.path in lost:
                skipped.append(Skipped(request.samples, lost[request.path]))
            else:
                unanswered.append(request)
                yield request

    with given_or_own(readers) as reading:
        pool = reading.for_samples(
            requests,
            nbytes=len(missing) * plan.source_sample_nbytes,
            stored_nbytes=len(missing) * plan.stored_sample_nbytes,
            # A little more than `BATCH_BYTES` unless a sample or a chunk is larger.
            slot_nbytes=max(BATCH_BYTES, longest * plan.source_sample_nbytes) + ALIGN * MAX_ARRAYS,
        )
        while requests:
            again: list[ReadRequest] = []
            for item in pool.read(asked_for(requests)):
                first_s = first_s or time.monotonic()
                request = unanswered.popleft()  # pools keep the order
                if not isinstance(item, Skipped):
                    parameters = infos[request.path].parameters.items()
                    whole = {name: np.full(len(item.samples), value) for name, value in parameters}
                    yield item._replace(arrays={**item.arrays, **whole})
                    continue
                if item.error.kind not in _OF_SAMPLES or str(item.error.found).startswith("opening"):
                    lost[request.path] = item.error
                elif len(item.samples) > 1:
                    for row in range(len(item.samples)):
                        one = slice(row, row + 1)
                        indices = request.indices[one]
                        again.append(replace(request, samples=request.samples[one], indices=indices))
                    continue
                skipped.append(item)
            requests = again


def _requests(plan: StorePlan, missing: npt.NDArray[np.int64], on_nan: str) -> list[ReadRequest]:
    """Ask for batches of samples, each of one file."""
    # `first`: the file's first sample in the numbers of the store, which may hold a partition of the split
    requests, first = [], -plan.selected.start
    for of_file, info, signature in zip(plan.parts, plan.infos, plan.signatures, strict=True):
        samples = missing[(missing >= first) & (missing < first + len(of_file.indices))]
        if len(samples) and on_nan == "fail":
            for name, value in info.parameters.items():
                if not np.isfinite(value):
                    raise SourceError(
                        "the parameter is not finite",
                        kind="not_finite",
                        path=info.path,
                        array=name,
                        found=value,
                        hint="mend the source, or data.on_nan=keep",
                    )
        dtypes = {name: str(plan.source_arrays[name].dtype) for name in info.arrays}
        indices = samples - first + of_file.indices.start
        units = (indices, info.samples_per_chunk)
        if info.samples_per_chunk == 1:  # no chunk is cut: then no group is
            units = (samples + plan.selected.start, plan.group_size)
        state = signature.state + outer_state(info.outer)
        for rows in _batches_of_units(*units, plan.source_sample_nbytes, batch_size_of(plan)):
            request = ReadRequest(
                of_file.path,
                plan.task,
                plan.selection,
                samples[rows],
                indices[rows],
                dtypes,
                check_finite=on_nan == "fail",
                follow=plan.follow,
                state=state,
            )
            requests.append(request)
        first += len(of_file.indices)
    return requests


def _batches_of_units(
    numbers: npt.NDArray[np.int64], samples_per_unit: int, sample_nbytes: int, size: int
) -> Iterator[slice]:
    """Cut samples, by sorted numbers, into batches that don't cut those of a chunk or an encoder's group.

    Only a unit that holds more than `MAX_CHUNKED_BYTES` of samples is cut, and so decoded or encoded for
    each of its batches.
    """
    is_bounded = samples_per_unit <= MAX_SAMPLES and samples_per_unit * sample_nbytes <= MAX_CHUNKED_BYTES
    unit = samples_per_unit if is_bounded else 1
    first = 0
    while first < len(numbers):
        end = min(first + size, len(numbers))
        if end < len(numbers):
            end_of_unit = max(numbers[end] // unit, numbers[first] // unit + 1) * unit
            end = int(np.searchsorted(numbers, end_of_unit))
        yield slice(first, end)
        first = end


def unread_error(plan: StorePlan, skipped: Sequence[Skipped]) -> UnreadSamplesError:
    """Return the error for samples that were skipped."""
    samples = np.sort(np.concatenate([item.samples for item in skipped]))
    first = ", ".join(map(str, samples[:_SHOWN])) + (", ..." if len(samples) > _SHOWN else "")
    return UnreadSamplesError(
        f"{plan.title}: {len(samples)} of {plan.num_samples} samples can't be read and were skipped: {first}",
        path=building_path(plan.path),
        hint="the others are committed: run the same command again to continue, or with --overwrite if "
        "sources were replaced",
        samples=tuple(int(sample) for sample in samples),
    )


class BuildDeadlines(DeadlineThread):
    """Ends the process with exit code 4 if encoding or committing a batch takes too long; a context manager.

    A reader is a process of its own, which can be replaced. An encoder or a disk that hangs holds a thread of
    this process, so here the process ends; what was committed stays, and the same command continues it. The
    stacks go beside the store, to `<name>.stalled.txt`.
    """

    def __init__(self, deadlines: CacheConfig, *, path: Path, encoder: object = None) -> None:
        self._encode_s, self._commit_s = deadlines.encode_timeout_s, deadlines.commit_timeout_s
        stacks = path.with_name(f"{path.name}.stalled.txt")
        super().__init__("build-deadlines", path=stacks, shortest_s=min(self._encode_s, self._commit_s))
        self._store, self._encoder, self._first_times = path, encoder, FIRST_TIMES

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """The block loads the encoder, or encodes one batch."""
        self.allow("encoding a batch", self._first_times * self._encode_s, slot="encode")
        try:
            yield
        finally:
            self.rest(slot="encode")

    def has_encoded(self) -> None:
        """The first batch is encoded: what is compiled then is compiled."""
        self._first_times = 1.0

    @contextmanager
    def committing(self) -> Iterator[None]:
        """The block commits one batch."""
        self.allow("committing a batch", self._commit_s, slot="commit")
        try:
            yield
        finally:
            self.rest(slot="commit")

    def _error(self, what: str, allowed_s: float) -> StoreError:
        key = "encode" if what.startswith("encoding") else "commit"
        return StoreError(
            f"the build stalled: {what} wasn't over in {allowed_s:g} s",
            kind="stalled",
            exit_code=STALLED,
            path=self._store,
            hint=f"{self.path} has the stacks of all threads; raise cache.{key}_timeout_s if it only was"
            " slow; the same command continues",
        )

    def _state(self) -> str:
        if not isinstance(self._encoder, DescribingEncoder):
            return ""
        return f"\n{self._encoder.device_state()}\n"
