"""`Assembler`: makes the batch of a step; what a loader's threads run.

It doesn't refer to the loader, so that dropping the loader ends its threads.

`EpochReport`: what an epoch moved, and what the training loop waited for.
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
from ups_store.torch.device import DeviceFeed
from ups_store.torch.memory import Allocate

_THREAD_USAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

EpochStep = tuple[int, Step]


def jobs_of(order: DataOrder, *, goes_on: bool) -> Iterator[EpochStep]:
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

    def __call__(self, job: EpochStep) -> Made:
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


WAIT_SHARE = 0.05  # a loop that waits less than this is not held up by its data

FAULTS_PER_S = 100.0  # major page faults, each a read from the disk


@dataclass(frozen=True)
class EpochReport:
    """One epoch of a loader, or what there has been of it so far.

    Attributes:
        epoch: Its number.
        num_steps: Batches that the loop was given.
        num_samples: Samples in them on this rank, those that only fill up the last batch included.
        nbytes: Bytes of them.
        seconds: From the first `next` on.
        waited_s: Of those, what the loop waited for batches.
        assembled_s: What the background threads spent on making them, added up.
        major_faults: Page faults of those threads that read from the disk.
        resident: Share of the stores that lay in RAM at the end, 0 to 1.
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
        """What a faster epoch needs: "model", "storage" or "cpu" (copying batches)."""
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
        )
