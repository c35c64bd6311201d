"""`DeviceRows`: samples of one array, or windows of them, taken by one `index_select` on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.format.layout import ArrayLayout
from ups_store.format.metadata import dtype_of
from ups_store.read.gather import Window, batch_shape, runs_of
from ups_store.torch.memory import torch_dtype

# What rows are copied as: the widest word that divides them, so the device computes the fewest addresses.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_WIDEST_BYTES = 16


@dataclass(frozen=True)
class DeviceRows:
    """Part of one array in memory that a device reads.

    Attributes:
        layout: The array's layout in the file; the memory has the same stride.
        first_sample: The sample that the memory begins with.
        memory: Slots of samples, uint8, shape (num_samples * stride,), 16-byte aligned.
    """

    layout: ArrayLayout
    first_sample: int
    memory: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The array's dtype."""
        return torch_dtype(dtype_of(self.layout.meta.dtype))

    def gather(self, samples: npt.NDArray[np.int64], window: Window | None) -> Tensor:
        """Copy samples, or one window of each; the plain twin is `gather_array`.

        Args:
            samples: Sample numbers, all in the memory, int64, shape (B,).
            window: Valid windows over time; None for whole samples.
        Returns:
            A new contiguous tensor on the memory's device, shape (B, ...).
        """
        shape = batch_shape(self.layout.meta, len(samples), window)
        if not math.prod(shape):
            return torch.empty(shape, dtype=self.dtype, device=self.memory.device)
        runs = runs_of(self.layout, samples - self.first_sample, window)
        # Every run begins at a multiple of what divides slots and time steps.
        steps = window.length if window is not None and window.stride == 1 else 1
        unit = math.gcd(self.layout.stride, 0 if window is None else runs.nbytes // steps)
        index = torch.from_numpy(runs.firsts // unit).to(self.memory.device, non_blocking=True)
        taken = torch.index_select(self._table(unit, runs.nbytes), 0, index)
        return taken.view(self.dtype).view(shape)

    def _table(self, unit: int, nbytes: int) -> Tensor:
        """Rows of `nbytes` that begin at every multiple of `unit`, and overlap: shape (rows, words)."""
        word = math.gcd(unit, nbytes, _WIDEST_BYTES)
        size = ((len(self.memory) - nbytes) // unit + 1, nbytes // word)
        return self.memory.view(_WORDS[word]).as_strided(size, (unit // word, 1))
