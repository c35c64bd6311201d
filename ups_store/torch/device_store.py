"""`DeviceStore`: samples of a store where a device reads them, gathered there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.errors import ArrayNotFoundError, SampleIndexError, SpecError
from ups_store.read.gather import TIME_DIM, Indices, check_indices, names_of, window_of
from ups_store.torch.device_rows import DeviceRows


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
