"""`Maker`: makes the batches of steps, several small ones together; what a loader's threads run."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ups_store.errors import BatchTimeoutError, SpecError
from ups_store.format.ragged import LENGTHS
from ups_store.read.items import Where, split
from ups_store.read.order import Step
from ups_store.read.prefetch import late

HAND_OVER_S = 1e-3  # of work at a time: handing it from thread to thread takes up to a tenth of that

GROUP_BYTES = 4 << 20  # that a batch keeps in memory at most, as batches of a group share it

CALLER_S = 2e-4  # a batch that takes less is made by the loop's thread: about what a hand-over costs both

CALLER_BYTES = 128 << 10  # of a group that it makes; above, the copy takes the time, which threads share

_THREAD_USAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

Collate = Callable[[Sequence[Any]], Any]

BatchTransform = Callable[[Any, Step], Any]


class Order(Protocol):
    """Which samples each step takes: a `DataOrder`, or one that depends on what there is.

    Attributes:
        epoch: Number of the current epoch.
        consumed: Samples of it that the training loop has been given: steps times `global_batch_size`.
        num_steps: Steps of an epoch, equal on all ranks.
        global_batch_size: Samples of a whole step over all ranks.
    """

    epoch: int
    consumed: int
    num_steps: int
    global_batch_size: int

    @property
    def key(self) -> object:
        """What the steps of all epochs depend on: batches that were made before it changed are stale."""

    def steps(self, epoch: int | None = None) -> Iterator[Step]:
        """The steps of the current epoch that haven't been consumed; all of `epoch`."""

    def state_dict(self) -> dict[str, Any]:
        """What continues from here."""

    def load_state_dict(self, state: Any) -> None:
        """Continue where `state_dict` was called."""


def jobs_of(order: Order, *, goes_on: bool) -> Iterator[Step]:
    """Give the steps that have not been consumed; if it goes on, those of later epochs, too."""
    epoch, steps = order.epoch, order.steps()
    while True:
        yield from steps
        if not goes_on:
            return
        epoch += 1
        steps = order.steps(epoch)


class Groups(Iterator[list[Step]]):
    """Steps in groups, each made by one thread at a time; at first a step each."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self.size = 1
        self._steps = steps
        self._late: list[Step | BaseException] = []  # what was taken from `steps` and is for the next group

    def __next__(self) -> list[Step]:
        group = [self._take()]
        while len(group) < self.size:
            try:
                step = self._take()
            except BaseException as error:  # the end too: the next group's
                self._late.append(error)
                break
            first = group[0]
            if (step.source, step.epoch, len(step.items)) != (first.source, first.epoch, len(first.items)):
                self._late.append(step)
                break
            group.append(step)
        return group

    def end(self) -> None:
        """Have no more groups."""
        self._steps, self._late = iter(()), []

    def _take(self) -> Step:
        step = self._late.pop() if self._late else next(self._steps)
        if isinstance(step, BaseException):
            raise step
        return step


@dataclass(slots=True)
class Made:
    """A batch and what it took; `copied` is the event of its copy to a device."""

    step: Step
    batch: Any
    nbytes: int
    seconds: float
    major_faults: int
    copied: Any = None


class Maker:
    """Makes the batches of groups of steps; called by several threads at a time.

    Several small ones are gathered by one call: neither Python nor the hand-over takes longer than the copy.
    It doesn't refer to the loader, so that dropping that ends its threads.
    """

    kind: type[dict[str, Any]] = dict  # of batches that can be split and marked

    def __init__(
        self,
        dataset: Any,
        groups: Groups,
        allocate: Callable[..., Any],
        collate: Collate | None = None,
        batch_transform: BatchTransform | None = None,
    ) -> None:
        self._dataset, self._allocate, self._groups = dataset, allocate, groups
        self._transform = getattr(dataset, "transform", None)
        self._collate, self._batch_transform = collate, batch_transform
        self._nbytes: dict[tuple[int, int], int] = {}
        self._is_ragged = any(getattr(source, "ragged", ()) for source in getattr(dataset, "sources", ()))
        self._in_hand: dict[int, list[Step]] = {}  # by the thread that makes them
        changes = (self._transform, collate, batch_transform)
        self.may_group = not self._is_ragged and all(change is None for change in changes)
        self.is_quick = False

    def __call__(self, steps: list[Step]) -> list[Made | BaseException]:
        """Make the batches of steps, up to the first that can't be made, of which there is the error."""
        thread = threading.get_ident()
        self._in_hand[thread] = steps
        try:
            if len(steps) > 1:
                with contextlib.suppress(Exception):  # of one of them; which, is found one by one
                    return self._made_together(steps)
            return self._made_one_by_one(steps)
        finally:
            del self._in_hand[thread]

    def late(self, timeout_s: float) -> BatchTimeoutError:
        """Make the error of the batch that the loop waits for, of which it has waited so long."""
        in_hand = self._in_hand.copy()
        if not in_hand:  # the order doesn't say which samples are next
            return late((None, ()), timeout_s=timeout_s, thread=None)
        first = min(in_hand, key=lambda thread: (in_hand[thread][0].epoch, in_hand[thread][0].number))
        return late(self._where(in_hand[first]), timeout_s=timeout_s, thread=first)

    def _where(self, steps: list[Step]) -> Where:
        items = np.concatenate([step.items for step in steps])
        where: Callable[..., Where] | None = getattr(self._dataset, "where", None)
        if where is None:
            return None, items.tolist()
        return where(steps[0].source, items, epoch=steps[0].epoch)

    def _made_one_by_one(self, steps: list[Step]) -> list[Made | BaseException]:
        made = list[Made | BaseException]()
        for step in steps:
            try:
                made.append(self._made(step))
            except BaseException as error:
                if not made:
                    raise
                self._groups.end()
                return [*made, error]
        return made

    def _made_together(self, steps: list[Step]) -> list[Made | BaseException]:
        first, num = steps[0], len(steps)
        began, faults = time.perf_counter(), _major_faults()
        items = np.concatenate([step.items for step in steps])
        whole = self._dataset.fetch(first.source, items, epoch=first.epoch, allocate=self._allocate)
        nbytes = self._nbytes_of(whole, first.source, len(items)) // num
        batches = self.split(whole, num)
        faults = _major_faults() - faults
        seconds = (time.perf_counter() - began) / num
        self._adapt(seconds, nbytes)
        made = list[Made | BaseException]()
        for step, batch in zip(steps, batches, strict=True):
            if step.mask is not None:
                self.mark(batch, step.mask)
            made.append(Made(step, batch, nbytes, seconds, 0 if made else faults))
        return made

    def _made(self, step: Step) -> Made:
        began, faults = time.perf_counter(), _major_faults()
        batch = self._dataset.fetch(step.source, step.items, epoch=step.epoch, allocate=self._allocate)
        if step.mask is not None and isinstance(batch, self.kind):
            self.mark(batch, step.mask)
        nbytes = self._nbytes_of(batch, step.source, len(step.items))
        if self.may_group and isinstance(batch, self.kind):
            self._adapt(time.perf_counter() - began, nbytes)
        if self._transform is not None or self._collate is not None:
            batch = self.collated(batch, step)
        if self._batch_transform is not None:
            batch = self._batch_transform(batch, step)
        batch, copied = self.sent(batch)
        faults = _major_faults() - faults
        return Made(step, batch, nbytes, time.perf_counter() - began, faults, copied)

    def _adapt(self, seconds: float, nbytes: int) -> None:
        """Have the next groups be worth a hand-over, or be made without one, by what a batch took."""
        self.is_quick = seconds < CALLER_S and nbytes <= CALLER_BYTES
        limit = CALLER_BYTES if self.is_quick else GROUP_BYTES
        fit = min(HAND_OVER_S / max(seconds, 1e-9), limit / max(nbytes, 1))
        self._groups.size = max(1, min(int(fit), 2 * self._groups.size))

    def _nbytes_of(self, batch: Any, source: int, num_items: int) -> int:
        """Count a batch's bytes once, as batches of a source and a length are alike, unless ragged."""
        alike = source, num_items
        nbytes = None if self._is_ragged else self._nbytes.get(alike)
        if nbytes is None:
            nbytes = self._nbytes[alike] = self.count(batch)
        return nbytes

    def count(self, batch: Any) -> int:
        """Count the bytes of a batch's arrays."""
        return _nbytes(batch)

    def split(self, batch: Any, num: int) -> Sequence[Any]:
        """Cut a batch into so many."""
        return split(batch, num)

    def mark(self, batch: dict[str, Any], mask: npt.NDArray[np.bool_]) -> None:
        """Say which rows only fill up the last batch."""
        batch["valid"] = mask

    def collated(self, batch: Any, step: Step) -> Any:
        """Make a batch of a batch's samples, transformed where there is a transform."""
        padded = self._dataset.sources[step.source].padded
        samples: list[Any] = list(samples_of(batch, padded))
        if self._transform is not None:
            samples = [self._transform(sample) for sample in samples]
        return stacked(samples, padded) if self._collate is None else self._collate(samples)

    def sent(self, batch: Any) -> tuple[Any, Any]:
        """Give the batch, and the event of its copy to a device."""
        return batch, None


def _major_faults() -> int:
    return resource.getrusage(_THREAD_USAGE).ru_majflt


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict | list):
        return sum(map(_nbytes, value.values() if isinstance(value, dict) else value))
    return 0


def samples_of(batch: Mapping[str, Any], padded: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Give the samples of a batch, as views; what a ragged array was padded with is left out."""
    for row in range(len(batch["index"])):
        sample = {key: _row(value, row) for key, value in batch.items()}
        for name in padded:
            sample[name] = sample[name][: int(sample[name + LENGTHS])]
        yield sample


def _row(value: Any, row: int) -> Any:
    if isinstance(value, dict):
        return {key: _row(item, row) for key, item in value.items()}
    return value[row, ...] if isinstance(value, np.ndarray) else value[row]


def stacked(samples: Sequence[Any], padded: Sequence[str] = ()) -> Any:
    """Make a batch of samples: arrays and numbers are stacked, other values are lists."""
    first = samples[0]
    if isinstance(first, Mapping):
        if any(not isinstance(sample, Mapping) or sample.keys() != first.keys() for sample in samples):
            problem = "samples with different arrays don't make a batch"
            raise SpecError(problem, kind="mixed", expected=sorted(first))
        batch = {}
        for key in first:
            column = [sample[key] for sample in samples]
            if key in padded and key + LENGTHS in first:
                longest = max(map(len, column))
                column = [_longer(array, longest) for array in column]
            batch[key] = stacked(column)
        return batch
    if not isinstance(first, np.ndarray | np.generic | bool | int | float | complex):
        return list(samples)
    try:
        return np.stack([np.asarray(sample) for sample in samples])
    except ValueError as error:
        shapes = sorted({np.shape(sample) for sample in samples})
        hint = "give a `collate_fn`, or have the transform give arrays of one shape"
        raise SpecError("arrays of other shapes", kind="mixed", found=shapes, hint=hint) from error


def _longer(array: Any, num_rows: int) -> Any:
    rows = np.asarray(array)
    return np.concatenate([rows, np.zeros((num_rows - len(rows), *rows.shape[1:]), rows.dtype)])
