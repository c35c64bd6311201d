"""Losses of the steps since the last look, summed on the device: no step waits for a number."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ups.errors import DivergedError


class LossMeter:
    """Sums of named losses, and the first step at which one of them wasn't finite."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._first_bad: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, losses: dict[str, Tensor], *, step: int) -> None:
        """Take in the losses of a batch of a step (counted from 1); doesn't wait for the device."""
        for name, loss in losses.items():
            value = loss.detach().float()
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(value)
                self._first_bad[name] = torch.zeros((), dtype=torch.int64, device=value.device)
            self._sums[name] = self._sums[name] + value
            self._counts[name] = self._counts.get(name, 0) + 1
            is_first = ~value.isfinite() & (self._first_bad[name] == 0)
            self._first_bad[name] = torch.where(is_first, step, self._first_bad[name])

    def read(self) -> dict[str, float]:
        """Means since the last call; waits for the device.

        Raises:
            DivergedError: If a loss wasn't finite.
        """
        bad = {name: int(step) for name, step in self._first_bad.items() if int(step)}
        if bad:
            raise diverged(*min(bad.items(), key=lambda item: item[1]))
        means = {name: (total / self._counts[name]).item() for name, total in self._sums.items()}
        for table in (self._sums, self._counts, self._first_bad):
            table.clear()
        return means


def diverged(loss_name: str, step: int) -> DivergedError:
    """The error for a loss that isn't finite."""
    error = DivergedError(
        f"step {step}: loss {loss_name!r} is not finite",
        hint="the last good checkpoint is kept; lower training.lr or set training.grad_clip",
    )
    error.step, error.loss_name = step, loss_name
    return error


class Stopwatch:
    """Seconds in total and waiting for data."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._start = time.perf_counter()
        self._waited = 0.0
        self._num_samples = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, training waits for data."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    def count(self, num_samples: int) -> None:
        """Samples that were trained on."""
        self._num_samples += num_samples

    def read(self) -> dict[str, float]:
        """Rates since the last call."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rates = {
            "training/samples_per_sec": self._num_samples / seconds,
            "training/data_wait_share": self._waited / seconds,
        }
        self._begin()
        return rates
