"""`DeviceStore`: samples of a store where a device reads them, gathered by one `index_select` an array."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.errors import SampleIndexError, StoreClosedError
from ups_store.format.layout import ArrayLayout
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.read.base import AnyStore
from ups_store.read.catalog import fingerprint_of
from ups_store.read.gather import (
    Indices,
    Samples,
    TimeWindow,
    WindowArguments,
    batch_shape,
    runs_of,
    window_of,
)
from ups_store.read.preload import PreloadJob, PreloadReport, Request
from ups_store.read.ragged import Form
from ups_store.read.verify import Report
from ups_store.torch.memory import torch_dtype

# What rows are copied as: the widest word that divides them, so the device computes the fewest addresses.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_WIDEST_BYTES = 16


class DeviceStore(AnyStore):
    """Samples of a store in memory that a device reads; `gather` runs on the device.

    `Store.preload` makes it, by mode "device" or "pinned". It doesn't need the store any more. Samples have
    the numbers that they have in the store, also where it holds a part of them; negative ones count from the
    store's end. Constants are NumPy's arrays on the host.

    Args:
        job: What was preloaded.
        rows: The samples by array.
        device: Where batches are.
        samples: Numbers of the samples that it holds.

    Attributes:
        path: The file of the store that it was made of; likewise `identity`, `attrs`, `fingerprint`, ...
        device: Where batches are.
        samples: Numbers of the samples that it holds, as they are counted in the store.
        nbytes: Bytes of the memory.
    """

    access: Literal["device"] = "device"

    def __init__(
        self, job: PreloadJob, rows: Mapping[str, DeviceRows], device: torch.device, *, samples: range
    ) -> None:
        layout = job.catalog.layout
        metas = [array.meta for array in layout.arrays.values()]
        here = [meta if meta.is_constant else _part_of(meta, len(samples)) for meta in metas]
        super().__init__(job.file.path, job.catalog.root, here, layout.num_samples)
        self.device = device
        self.samples = samples
        self.nbytes = sum(rows.memory.nbytes for rows in rows.values())
        self._catalog = job.catalog
        self._rows: dict[str, DeviceRows] | None = dict(rows)
        constants = (array for array in layout.arrays.values() if array.meta.is_constant)
        self._constants = {array.meta.name: job.file.view(array).copy() for array in constants}

    @property
    def fingerprint(self) -> str:
        """That of the store that it was made of."""
        return fingerprint_of(self._catalog)

    def __len__(self) -> int:
        """Number of samples that it holds."""
        return len(self.samples)

    def _summary(self) -> list[str]:
        return [f"{self.samples} on {self.device}", f"{self.nbytes:,} bytes"]

    @property
    def names(self) -> list[str]:
        """The arrays with a sample axis."""
        return list(self._per_sample)

    def whole(self, name: str) -> npt.NDArray[Any]:
        """A constant, on the host.

        Raises:
            ArrayNotFoundError: Also a KeyError.
            SpecError: For an array with a sample axis, kind "unsupported": its slots lie apart.
        """
        meta = self._meta(name)
        self.check_open()
        if meta.is_constant:
            return self._constants[name]
        raise self._unsupported("its samples are no single tensor", "use gather or sample", array=name)

    def sample(self, index: int) -> dict[str, Tensor]:
        """All arrays of one sample by name: new tensors, shape () for a number."""
        return {name: values[0] for name, values in self.gather([index]).items()}

    def gather(
        self,
        indices: Indices | slice | Tensor,
        names: Sequence[str] | None = None,
        *,
        start: int | Indices | None = None,
        length: int | None = None,
        stride: int = 1,
        out: Mapping[str, Any] | None = None,
        num_threads: int | None = None,
        ragged: Form = "views",
    ) -> dict[str, Tensor]:
        """Copy samples, or windows of them, into new tensors on the device.

        The device may still be at it on return, as with every kernel on its current stream.

        The other arguments are those of `AnyStore.gather`.

        Args:
            indices: As of any store. They are checked on the host: those of a tensor on the device are
                fetched first, which waits for the device.
            out: None: batches are new tensors, for torch keeps memory by itself.
            num_threads: Without effect: the device copies.
        Returns:
            Contiguous tensors of shape (B, ...) by name, on the device, which the caller owns.
        Raises:
            SampleIndexError: For a sample or window outside of what it holds.
            ArrayNotFoundError: Also a KeyError.
            SpecError: For a window without time steps, or one that no array has an axis for; for an `out`,
                kind "unsupported".
        """
        if out is not None:
            raise self._unsupported("batches of a device store are new tensors", "leave out `out`")
        raw = indices.cpu().numpy() if isinstance(indices, Tensor) else indices
        return super().gather(raw, names, start=start, length=length, stride=stride, ragged=ragged)

    def _gather(
        self,
        samples: Samples,
        metas: list[ArrayMeta],
        window: WindowArguments,
        out: Mapping[str, Any] | None,
        num_threads: int | None,
    ) -> dict[str, Tensor]:
        self._check_held(samples)
        rows = self._open_rows()
        return {m.name: rows[m.name].gather(samples, window_of(m, len(samples), window)) for m in metas}

    def _check_held(self, samples: Samples) -> None:
        outside = np.flatnonzero((samples < self.samples.start) | (samples >= self.samples.stop))
        if outside.size:
            expected = f"{self.samples.start} <= index < {self.samples.stop}"
            found = int(samples[outside[0]])
            raise SampleIndexError("no such sample here", path=self.path, expected=expected, found=found)

    def _open_rows(self) -> dict[str, DeviceRows]:
        if self._rows is None:
            hint = "preload the store again"
            raise StoreClosedError("the device store is closed", path=self.path, hint=hint)
        return self._rows

    def _preload(self, request: Request) -> PreloadReport:
        """Nothing to do: the samples are where the device reads them. Another mode is refused."""
        if request not in (Request("auto"), Request("device")):
            raise self._unsupported("it is in a device's memory", "preload the store that it was made of")
        why = "the samples are in memory that the device reads"
        return PreloadReport(self.path, "device", why, self.nbytes, 0.0, self)

    def residency(self) -> float:
        """1.0: all of it is in memory."""
        self.check_open()
        return 1.0

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Refused: memory has no checksums."""
        raise self._unsupported("memory has no checksums to verify", "verify the store that it was made of")

    def check_open(self) -> None:
        """Fail after `close`, with `StoreClosedError`."""
        self._open_rows()

    def close(self) -> None:
        """Let go of the memory. Closing twice is allowed."""
        self._rows = None

    def __reduce__(self) -> tuple[Any, ...]:
        raise self._unsupported(
            "a device's memory can't be pickled", "pickle the store, and preload it there"
        )


def _part_of(meta: ArrayMeta, num_samples: int) -> ArrayMeta:
    return replace(meta, shape=(num_samples, *meta.sample_shape))


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
