"""Samples out of their sources, in the store's order and dtypes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.building.plan import StorePlan
from ups_store.building.readers import Readers, given_or_own
from ups_store.errors import SourceError
from ups_store.format.metadata import MAX_ARRAYS
from ups_store.read.recovery import building_path
from ups_store.sources.contents import SourceInfo, outer_state
from ups_store.sources.reader import ALIGN, MAX_SAMPLES, ReadRequest
from ups_store.sources.readers import ReadBatch, ReaderPool, Skipped

BATCH_BYTES = 32 << 20  # read and committed together: then the two syncs of a batch cost little
MAX_CHUNKED_BYTES = 64 << 20  # of a batch that is larger in order to hold whole chunks
ENCODED_BATCHES = 32  # of a store of latents, at least: reading, encoding and committing overlap but for one
GROUPS_OF_BATCH = 4  # of samples that are encoded together, at least: commits are worth their syncs
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
    """Samples of a batch where chunks have no say: whole groups of what is encoded together.

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
    after all others.
    """
    requests = _requests(plan, missing, on_nan)
    infos = {info.path: info for info in plan.infos}
    pending = _Pending(skipped if skipped is not None else [], for_s=for_s)
    with given_or_own(readers) as reading:
        pool = _pool(reading, requests, plan, len(missing))
        while requests:
            for item in pool.read(pending.hand_out(requests)):
                request = pending.take_back(item)
                if not isinstance(item, Skipped):
                    parameters = _parameters(infos[request.path], len(item.samples))
                    yield item._replace(arrays={**item.arrays, **parameters})
            requests = pending.once_more()


def _pool(readers: Readers, requests: Sequence[ReadRequest], plan: StorePlan, num_samples: int) -> ReaderPool:
    return readers.for_samples(
        requests,
        nbytes=num_samples * plan.source_sample_nbytes,
        stored_nbytes=num_samples * plan.stored_sample_nbytes,
        slot_nbytes=_slot_nbytes(requests, plan.source_sample_nbytes),
    )


class _Pending:
    """Requests that a pool has to answer, or may skip."""

    def __init__(self, skipped: list[Skipped], *, for_s: float | None) -> None:
        self._skipped = skipped
        self._for_s, self._first_s = for_s, 0.0
        self._unanswered: deque[ReadRequest] = deque()
        self._again: list[ReadRequest] = []
        self._lost: dict[Path, SourceError] = {}  # files of which nothing more is asked for

    def hand_out(self, requests: Iterable[ReadRequest]) -> Iterator[ReadRequest]:
        """The requests, except for those to files that are lost, while there is time."""
        for request in requests:
            if self._for_s and self._first_s and time.monotonic() > self._first_s + self._for_s:
                return
            if request.path in self._lost:
                self._skipped.append(Skipped(request.samples, self._lost[request.path]))
            else:
                self._unanswered.append(request)
                yield request

    def take_back(self, item: ReadBatch | Skipped) -> ReadRequest:
        """The request that an item answers: pools keep the order."""
        self._first_s = self._first_s or time.monotonic()
        request = self._unanswered.popleft()
        if isinstance(item, Skipped):
            self._take_skipped(request, item)
        return request

    def _take_skipped(self, request: ReadRequest, item: Skipped) -> None:
        if not _is_of_samples(item.error):
            self._lost[request.path] = item.error
        elif len(item.samples) > 1:
            self._again += [_of_one(request, row) for row in range(len(item.samples))]
            return
        self._skipped.append(item)

    def once_more(self) -> list[ReadRequest]:
        """Requests for single samples of the batches that were skipped."""
        again, self._again = self._again, []
        return again


def _of_one(request: ReadRequest, row: int) -> ReadRequest:
    one = slice(row, row + 1)
    return replace(request, samples=request.samples[one], indices=request.indices[one])


def _is_of_samples(error: SourceError) -> bool:
    return error.kind in _OF_SAMPLES and not str(error.found).startswith("opening")


def _requests(plan: StorePlan, missing: npt.NDArray[np.int64], on_nan: str) -> list[ReadRequest]:
    """Requests for batches of samples, each of one file."""
    # `first`: the part's first sample in the numbers of the store, which may hold a partition of the split
    requests, first = [], -plan.selected.start
    for part, info, signature in zip(plan.parts, plan.infos, plan.signatures, strict=True):
        wanted = missing[(missing >= first) & (missing < first + len(part.indices))]
        if len(wanted):
            _check_finite_parameters(info, on_nan)
        dtypes = {name: str(plan.source_arrays[name].dtype) for name in info.arrays}
        in_part = wanted - first + part.indices.start
        units = (in_part, info.samples_per_chunk)
        if info.samples_per_chunk == 1:  # no chunk is parted: then no group is
            units = (wanted + plan.selected.start, plan.group_size)
        for rows in _batches_of_units(*units, plan.source_sample_nbytes, batch_size_of(plan)):
            samples, in_file = wanted[rows], in_part[rows]
            requests.append(
                ReadRequest(
                    part.path,
                    plan.task,
                    plan.selection,
                    samples,
                    in_file,
                    dtypes,
                    check_finite=on_nan == "fail",
                    follow=plan.follow,
                    state=signature.state + outer_state(info.outer),
                )
            )
        first += len(part.indices)
    return requests


def _batches_of_units(
    numbers: npt.NDArray[np.int64], samples_per_unit: int, sample_nbytes: int, size: int
) -> Iterator[slice]:
    """Cut samples, by sorted numbers, into batches that don't part those of a chunk or an encoder's group.

    Only a unit that holds more than `MAX_CHUNKED_BYTES` of samples is parted, and so decoded or encoded for
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


def _slot_nbytes(requests: Sequence[ReadRequest], sample_nbytes: int) -> int:
    """Room for any batch; a little more than `BATCH_BYTES` unless a sample or a chunk is larger."""
    longest = max((len(request.samples) for request in requests), default=0)
    return max(BATCH_BYTES, longest * sample_nbytes) + ALIGN * MAX_ARRAYS


def _parameters(info: SourceInfo, num_samples: int) -> dict[str, npt.NDArray[Any]]:
    return {name: np.full(num_samples, value) for name, value in info.parameters.items()}


def _check_finite_parameters(info: SourceInfo, on_nan: str) -> None:
    for name, value in info.parameters.items():
        if on_nan == "fail" and not np.isfinite(value):
            raise SourceError(
                "the parameter is not finite",
                kind="not_finite",
                path=info.path,
                array=name,
                found=value,
                hint="mend the source, or data.on_nan=keep",
            )


def unread_error(plan: StorePlan, skipped: Sequence[Skipped]) -> UnreadSamplesError:
    """The error for samples that were skipped."""
    samples = np.sort(np.concatenate([item.samples for item in skipped]))
    shown = ", ".join(map(str, samples[:_SHOWN])) + (", ..." if len(samples) > _SHOWN else "")
    error = UnreadSamplesError(
        f"{plan.title}: {len(samples)} of {plan.num_samples} samples can't be read and were skipped: {shown}",
        path=building_path(plan.path),
        hint="the others are committed: run the same command again to continue, or with --overwrite if "
        "sources were replaced",
    )
    error.samples = tuple(int(sample) for sample in samples)
    return error
