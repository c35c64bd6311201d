"""`DeviceStore`: samples of a store where a device reads them, gathered there.

`DeviceRows`: samples of one array, or windows of them, taken by one `index_select` on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.errors import ArrayNotFoundError, SampleIndexError, SpecError
from ups_store.format.layout import ArrayLayout
from ups_store.format.metadata import dtype_of
from ups_store.read.gather import (
    TIME_DIM,
    Indices,
    TimeWindow,
    batch_shape,
    check_indices,
    names_of,
    runs_of,
    window_of,
)
from ups_store.torch.memory import torch_dtype


class DeviceStore:
    """Samples of a store in memory that a device reads; `gather` runs on the device.

    `Store.preload` makes it, by mode "device" or "pinned". It doesn't need the store any more.

    Attributes:
        device: Where batches are.
        samples: Numbers of the samples that it holds, as they are counted in the store.
        nbytes: Bytes of the memory.
    """

    def __init__(
        self, arrays: Mapping[str, DeviceRows], device: torch.device, *, samples: range, path: Path
    ) -> None:
        self.device = device
        self.samples = samples
        self.nbytes = sum(rows.memory.nbytes for rows in arrays.values())
        self._arrays = dict(arrays)
        self._path = path

    def __len__(self) -> int:
        """Number of samples that it holds."""
        return len(self.samples)

    def __repr__(self) -> str:
        return f"<DeviceStore {self._path.name}: {self.samples} on {self.device}, {self.nbytes:,} bytes>"

    @property
    def names(self) -> list[str]:
        """The arrays with a sample axis."""
        return list(self._arrays)

    def gather(
        self,
        indices: Indices | Tensor,
        names: Sequence[str] | None = None,
        *,
        start: int | Indices | None = None,
        length: int | None = None,
        stride: int = 1,
    ) -> dict[str, Tensor]:
        """Copy samples, or windows of them, into new tensors on the device.

        The device may still be at it on return, as with every kernel on its current stream.

        Args:
            indices: Sample numbers of the store, shape (B,), in any order, repeats allowed. They are checked
                on the host: those of a tensor on the device are fetched first, which waits for the device.
            names: Arrays to take; all with a sample axis by default.
            start: First time step of the window, as for `Store.gather`.
            length: Number of time steps of the window.
            stride: Time steps from one to the next.
        Returns:
            Contiguous tensors of shape (B, ...) by name, on the device, which the caller owns.
        Raises:
            SampleIndexError: For a sample or window outside of what it holds.
            ArrayNotFoundError: Also a KeyError.
            SpecError: For a window without time steps, or one that no array has an axis for.
        """
        samples = self._checked(indices)
        chosen = {name: self._rows(name) for name in (self.names if names is None else names_of(names))}
        is_window = start is not None or length is not None or stride != 1
        if is_window and not any(TIME_DIM in rows.layout.meta.dims for rows in chosen.values()):
            expected = "an array with dimension 'time'"
            raise SpecError("window", kind="window", path=self._path, expected=expected)
        result = {}
        for name, rows in chosen.items():
            meta = rows.layout.meta
            window = window_of(meta, len(samples), start=start, length=length, stride=stride)
            result[name] = rows.gather(samples, window)
        return result

    def _rows(self, name: str) -> DeviceRows:
        try:
            return self._arrays[name]
        except KeyError:
            expected = f"one of {', '.join(self._arrays)}"
            raise ArrayNotFoundError(
                f"no array {name!r} of samples", path=self._path, expected=expected
            ) from None

    def _checked(self, indices: Indices | Tensor) -> npt.NDArray[np.int64]:
        raw = indices.cpu().numpy() if isinstance(indices, Tensor) else indices
        samples = check_indices(raw, self.samples.stop, path=self._path)
        if len(samples) and int(samples.min()) < self.samples.start:
            expected = f"{self.samples.start} <= index < {self.samples.stop}"
            found = int(samples.min())
            raise SampleIndexError("no such sample here", path=self._path, expected=expected, found=found)
        return samples


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

    def gather(self, samples: npt.NDArray[np.int64], window: TimeWindow | None) -> Tensor:
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
