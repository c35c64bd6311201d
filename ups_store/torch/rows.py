"""Rows: what copies samples of one array, or windows of them, into a batch, by the map or by reading."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.permutation import Items
from ups_store.reader import Store
from ups_store.torch.memory import as_tensor, offset_in_base, torch_dtype

SCRATCH_BYTES = 1 << 20  # of rows before conversion: stays in the second-level cache


class Rows(Protocol):
    """Samples of one array, or windows of them.

    Attributes:
        dtype: Dtype of the array.
        shape: Shape of one copied sample, `(length, ...)` for windows.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def gather(self, samples: Items, starts: Items | None, out: Tensor) -> None:
        """Copy samples, or windows from time steps `starts` on.

        Args:
            samples: Sample numbers, all valid, int64, shape (B,).
            starts: First time step of each window, all valid, int64, shape (B,); None for whole samples.
            out: Contiguous output of B * prod(`shape`) elements; converted to if it has another dtype.
        """


def make_rows(store: Store, name: str, *, length: int | None = None, stride: int = 1) -> Rows:
    """Rows of an array: windows of `length` time steps `stride` apart, or whole samples.

    Only a mapped store whose checksums nobody asked for is copied from directly.
    """
    if store.access == "map" and not store.verify_on_touch:
        return MappedRows(store[name], length=length, stride=stride)
    return ReadRows(store, name, length=length, stride=stride)


class ReadRows:
    """Rows that the store reads, or checks, in Python: see `Store.gather`."""

    def __init__(self, store: Store, name: str, *, length: int | None, stride: int) -> None:
        spec = store.arrays[name]
        self._store, self._name, self._length, self._stride = store, name, length, stride
        self.dtype = torch_dtype(np.dtype(spec.dtype))
        self.shape = tuple(spec.shape[1:]) if length is None else (length, *spec.shape[2:])

    def gather(self, samples: Items, starts: Items | None, out: Tensor) -> None:
        """See `Rows`."""
        window: dict[str, Any] = {}
        if self._length is not None:
            window = {"start": starts, "length": self._length, "stride": self._stride}
        read = self._store.gather(samples, [self._name], **window)[self._name]
        out.view(len(samples), *self.shape).copy_(as_tensor(read))


class MappedRows:
    """Samples of one array, or windows of them, as rows that one `index_select` copies.

    Rows may begin at any multiple of a unit, the largest that divides the bytes of a slot and of a time step;
    so a window is one row too, and rows overlap. They are copied as words, which no dtype is excluded from.

    Args:
        view: An array of a store, shape (N, ...), or (N, T, ...) for windows.
        length: Time steps of a window; None for whole samples.
        stride: Time steps from one to the next.
    """

    def __init__(self, view: npt.NDArray[Any], *, length: int | None = None, stride: int = 1) -> None:
        self.dtype = torch_dtype(view.dtype)
        self.shape = view.shape[1:] if length is None else (length, *view.shape[2:])
        slot, sample = view.strides[0], math.prod(view.shape[1:]) * view.itemsize
        step = 0 if length is None else math.prod(view.shape[2:]) * view.itemsize
        steps_per_row = (length or 1) if stride == 1 else 1  # consecutive time steps are copied at once
        row = sample if length is None else steps_per_row * step
        unit = math.gcd(slot, step)  # of whole samples: the slot, so their rows are the samples
        self._per_sample, self._per_step = (slot // unit, step // unit) if unit else (0, 0)
        self._within = np.arange((length or 1) // steps_per_row) * stride * self._per_step
        self._words = _words(view, row, unit) if view.size else None

    def gather(self, samples: Items, starts: Items | None, out: Tensor) -> None:
        """See `Rows`."""
        if self._words is None or not len(samples):
            return
        rows = samples
        if starts is not None:
            rows = samples * self._per_sample + starts * self._per_step
            rows = (rows[:, None] + self._within).reshape(-1)
        index = torch.from_numpy(rows)
        target = out.view(len(index), -1)
        if out.dtype == self.dtype:
            torch.index_select(self._words, 0, index, out=target.view(self._words.dtype))
        else:
            self._convert(self._words, index, target)

    def _convert(self, words: Tensor, index: Tensor, target: Tensor) -> None:
        num = min(len(index), max(1, SCRATCH_BYTES // (target.shape[1] * self.dtype.itemsize)))
        scratch = torch.empty((num, target.shape[1]), dtype=self.dtype)
        for first in range(0, len(index), num):
            part = index[first : first + num]
            torch.index_select(words, 0, part, out=scratch[: len(part)].view(words.dtype))
            target[first : first + num].copy_(scratch[: len(part)])


def _words(view: npt.NDArray[Any], row_nbytes: int, unit: int) -> Tensor:
    """All rows that begin at a multiple of `unit` bytes, as words: shape (rows, words of a row)."""
    word = math.gcd(unit, row_nbytes, 8)
    last = (len(view) - 1) * view.strides[0] + math.prod(view.shape[1:]) * view.itemsize - row_nbytes
    shape = (last // unit + 1, row_nbytes // word)
    memory = np.ndarray(shape, f"i{word}", view.base, offset_in_base(view), (unit, word))
    return torch.from_numpy(memory)
