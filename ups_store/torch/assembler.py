"""`Assembler`: makes the batches of steps; what a loader's threads run. `EpochReport`: what an epoch took.

The assembler doesn't refer to the loader, so that dropping the loader ends its threads.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from ups_store.errors import BatchTimeoutError
from ups_store.read.order import Step
from ups_store.torch.batch import Batch, BatchRows
from ups_store.torch.dataset import BatchSource
from ups_store.torch.deadline import Where, late
from ups_store.torch.device import DeviceFeed
from ups_store.torch.memory import Allocate

_THREAD_USAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

WAIT_SHARE = 0.05  # a loop that waits less than this is not held up by its data

FAULTS_PER_S = 100.0  # major page faults, each a read from the disk

HAND_OVER_S = 1e-3  # of work at a time: handing it from thread to thread takes up to a tenth of that

GROUP_BYTES = 1 << 20  # that a batch keeps in memory at most, as batches of a group share it

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
    """The steps that have not been consumed; if it goes on, those of later epochs, too."""
    epoch, steps = order.epoch, order.steps()
    while True:
        yield from steps
        if not goes_on:
            return
        epoch += 1
        steps = order.steps(epoch)


class Groups(Iterator[list[Step]]):
    """Steps in groups, each made by one thread at a time; at first a step each.

    Args:
        steps: One after the other.

    Attributes:
        size: Most steps of the next group.
    """

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
            if not _are_alike(group[0], step):
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


def _are_alike(one: Step, other: Step) -> bool:
    return (one.source, one.epoch, len(one.items)) == (other.source, other.epoch, len(other.items))


@dataclass(frozen=True, slots=True)
class Made:
    """A batch and what it took; its copy to the device is done when `copied` says so."""

    step: Step
    batch: Any
    nbytes: int
    seconds: float
    major_faults: int
    copied: torch.cuda.Event | None


class Assembler:
    """Makes batches; called by several threads at a time.

    Several small ones are gathered by one call: neither Python nor the hand-over takes longer than the copy.

    Args:
        dataset: Where the samples come from.
        groups: Which steps are made together: as many as are worth a hand-over by the time that they take.
        allocate: Where their memory comes from.
        feed: Copies them to a device, if they are wanted there.
        collate: Makes a batch of samples, as torch's `collate_fn`; None takes the gathered batch as it is.
        batch_transform: Called with every batch and its step.
    """

    def __init__(
        self,
        dataset: BatchSource,
        groups: Groups,
        *,
        allocate: Allocate,
        feed: DeviceFeed | None,
        collate: Collate | None = None,
        batch_transform: BatchTransform | None = None,
    ) -> None:
        self._dataset, self._allocate, self._feed = dataset, allocate, feed
        self._transform = getattr(dataset, "transform", None)
        self._collate, self._batch_transform = collate, batch_transform
        self._nbytes: dict[tuple[int, int], int] = {}
        self._is_ragged = any(getattr(source, "ragged", ()) for source in getattr(dataset, "sources", ()))
        self._groups = groups
        self._in_hand: dict[int, list[Step]] = {}  # by the thread that makes them
        changes = (self._transform, collate, batch_transform, feed)
        self._may_group = not self._is_ragged and all(change is None for change in changes)

    def __call__(self, steps: list[Step]) -> list[Made | BaseException]:
        """The batches of steps, up to the first that can't be made, of which there is the error."""
        thread = threading.get_ident()
        self._in_hand[thread] = steps
        try:
            if len(steps) > 1:
                with contextlib.suppress(Exception):  # of one of them; which, is found one by one
                    return list(self._made_together(steps))
            return self._made_one_by_one(steps)
        finally:
            del self._in_hand[thread]

    def late(self, timeout_s: float) -> BatchTimeoutError:
        """The error of the batch that the loop waits for, of which it has waited so long."""
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

    def _made_together(self, steps: list[Step]) -> Iterator[Made]:
        first, num = steps[0], len(steps)
        began, faults = time.perf_counter(), resource.getrusage(_THREAD_USAGE).ru_majflt
        items = np.concatenate([step.items for step in steps])
        whole = self._dataset.fetch(first.source, items, epoch=first.epoch, allocate=self._allocate)
        nbytes = self._nbytes_of(whole, first.source, len(items))
        faults = resource.getrusage(_THREAD_USAGE).ru_majflt - faults
        seconds = time.perf_counter() - began
        self._adapt(seconds / num, nbytes // num)
        for number, (step, batch) in enumerate(zip(steps, whole.split(num), strict=True)):
            if step.mask is not None:
                batch["valid"] = torch.from_numpy(step.mask)
            yield Made(step, batch, nbytes // num, seconds / num, 0 if number else faults, None)

    def _adapt(self, seconds: float, nbytes: int) -> None:
        """Have the next groups be worth a hand-over, by what a batch took."""
        fit = min(HAND_OVER_S / max(seconds, 1e-9), GROUP_BYTES / max(nbytes, 1))
        self._groups.size = max(1, min(int(fit), 2 * self._groups.size))

    def _made(self, step: Step) -> Made:
        began, faults = time.perf_counter(), resource.getrusage(_THREAD_USAGE).ru_majflt
        batch = self._dataset.fetch(step.source, step.items, epoch=step.epoch, allocate=self._allocate)
        if step.mask is not None and isinstance(batch, Batch):
            batch["valid"] = torch.from_numpy(step.mask)
        nbytes = self._nbytes_of(batch, step.source, len(step.items))
        if self._may_group and isinstance(batch, Batch):
            self._adapt(time.perf_counter() - began, nbytes)
        if self._transform is not None or self._collate is not None:
            batch = self._collated(batch)
        if self._batch_transform is not None:
            batch = self._batch_transform(batch, step)
        copied = None
        if self._feed is not None:
            batch, copied = self._feed.send(batch)
        faults = resource.getrusage(_THREAD_USAGE).ru_majflt - faults
        return Made(step, batch, nbytes, time.perf_counter() - began, faults, copied)

    def _collated(self, batch: Batch) -> Any:
        rows: Any = BatchRows(batch)
        if self._transform is not None:
            rows = rows.transformed(self._transform)
        return (self._collate or default_collate)(rows)

    def _nbytes_of(self, batch: Any, source: int, num_items: int) -> int:
        """Bytes of a batch; counted once, as batches of a source and a length are alike, unless ragged."""
        alike = source, num_items
        nbytes = None if self._is_ragged else self._nbytes.get(alike)
        if nbytes is None:
            nbytes = self._nbytes[alike] = batch.nbytes
        return nbytes


@dataclass(frozen=True)
class EpochReport:
    """One epoch of a loader, or what there has been of it so far.

    Attributes:
        epoch: Its number.
        num_steps: Batches that the loop was given.
        num_samples: Samples in them on this rank, those that only fill up the last batch included.
        nbytes: Bytes that were gathered for them.
        seconds: From the first `next` on.
        waited_s: Of those, what the loop waited for batches.
        assembled_s: What the background threads spent on making them, added up.
        major_faults: Page faults of those threads that read from the disk.
        resident: Share of the stores that lay in RAM at the end, 0 to 1.
        access: How samples were got, as `Store.access`: "decode" of packed stores; "mixed".
    """

    epoch: int
    num_steps: int
    num_samples: int
    nbytes: int
    seconds: float
    waited_s: float
    assembled_s: float
    major_faults: int
    resident: float
    access: str = "map"

    @property
    def wait_share(self) -> float:
        """Share of the time that the loop waited, 0 to 1."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second on this rank."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def bound(self) -> str:
        """What a faster epoch needs: "model", "storage" or "cpu" (copying, or decoding)."""
        if self.wait_share < WAIT_SHARE:
            return "model"
        reads_disk = self.assembled_s > 0 and self.major_faults / self.assembled_s > FAULTS_PER_S
        return "storage" if reads_disk else "cpu"

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: {self.num_steps} steps, {self.num_samples} samples, "
            f"{self.nbytes / 1e6:,.1f} MB in {self.seconds:.2f} s ({self.samples_per_s:,.0f} samples/s); "
            f"waited {self.wait_share:.1%} of it, {self.bound}-bound; "
            f"{self.major_faults} major page faults, {self.resident:.0%} resident"
            + (", decoded" if self.access == "decode" else "")
        )
