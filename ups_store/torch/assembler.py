"""`Assembler`: makes the batch of a step; what a loader's threads run.

It doesn't refer to the loader, so that dropping the loader ends its threads.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ups_store.read.order import DataOrder, Step
from ups_store.torch.batch import Batch
from ups_store.torch.dataset import StoreDataset
from ups_store.torch.feed import DeviceFeed
from ups_store.torch.memory import Allocate

_THREAD_USAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

Job = tuple[int, Step]


def jobs_of(order: DataOrder, *, goes_on: bool) -> Iterator[Job]:
    """The steps that have not been consumed, with their epoch; if it goes on, those of later epochs, too."""
    epoch, steps = order.epoch, order.steps()
    while True:
        for step in steps:
            yield epoch, step
        if not goes_on:
            return
        epoch += 1
        steps = order.steps(epoch)


@dataclass(frozen=True, slots=True)
class Made:
    """A batch and what it took; its copy to the device is done when `copied` says so."""

    step: Step
    batch: Batch
    seconds: float
    major_faults: int
    copied: torch.cuda.Event | None


class Assembler:
    """Makes batches; called by several threads at a time.

    Args:
        dataset: Where the samples come from.
        allocate: Where their memory comes from.
        feed: Copies them to a device, if they are wanted there.
    """

    def __init__(self, dataset: StoreDataset, *, allocate: Allocate, feed: DeviceFeed | None) -> None:
        self._dataset, self._allocate, self._feed = dataset, allocate, feed

    def __call__(self, job: Job) -> Made:
        """The batch of a step."""
        epoch, step = job
        began, faults = time.perf_counter(), resource.getrusage(_THREAD_USAGE).ru_majflt
        batch = self._dataset.fetch(step.source, step.items, epoch=epoch, allocate=self._allocate)
        if step.mask is not None:
            batch["valid"] = torch.from_numpy(step.mask)
        copied = None
        if self._feed is not None:
            batch, copied = self._feed.send(batch)
        faults = resource.getrusage(_THREAD_USAGE).ru_majflt - faults
        return Made(step, batch, time.perf_counter() - began, faults, copied)
