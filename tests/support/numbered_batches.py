"""Batches by their number: of training data or a stage; and a loader of batches that a test makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ups.data.batches import Loader, TrainingData, endless
from ups_store.torch import Step

_HERE = SimpleNamespace(training=SimpleNamespace(prefetch_factor=0, pin_memory=False))


def batch_of(data: Any, number: int) -> Any:
    """The batch of a number, made here and now; cheap when numbers go up."""
    loader = _loader_of(data)
    iterator, coming = vars(loader).pop("tested", (None, -1))
    if coming != number:
        iterator = endless(loader, number)
    batch = next(iterator)
    vars(loader)["tested"] = (iterator, number + 1)
    return batch


def end_batches(data: Any) -> None:
    """End what `batch_of` has begun: its loader's threads would outlive the test."""
    loader = _loader_of(data)
    vars(loader).pop("tested", None)
    loader.close()


def _loader_of(data: Any) -> Loader:
    if isinstance(data, Loader):
        return data
    if isinstance(data, TrainingData):
        if "tested" not in vars(data):
            vars(data)["tested"] = data.loader(_HERE, torch.device("cpu"))  # type: ignore[arg-type]
        found: Loader = vars(data)["tested"]
        return found
    return _loader_of(data.loader)


class _Numbers:
    """An order whose items are the numbers of batches."""

    global_batch_size = 1
    key = None

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.epoch, self.consumed = num_steps, 0, 0

    def steps(self, epoch: int | None = None) -> Iterator[Step]:
        which, first = (self.epoch, self.consumed) if epoch is None else (epoch, 0)
        for number in range(first, self.num_steps):
            yield Step(which, number, 0, np.array([which * self.num_steps + number]), 0, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.consumed = state["epoch"], state["consumed"]


class _Makes:
    """A source that calls a function with the number of a batch."""

    stores = ()
    num_tensors = 1

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def fetch(self, number: int, items: Any, *, epoch: int, allocate: Any) -> Any:
        return self._make(int(items[0]))


def numbered_loader(make: Callable[[int], Any], num_steps: int, *, ahead: int = 0) -> Loader:
    """A loader whose batches a function makes of their numbers, some of them ahead."""
    return Loader(
        _Makes(make),
        _Numbers(num_steps),
        num_workers=min(1, ahead),
        prefetch_factor=ahead or None,
        across_epochs=True,
    )
