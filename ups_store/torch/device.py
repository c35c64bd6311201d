"""What lies on a device: batches on their way (`DeviceFeed`), and preloaded samples (`DeviceStore`).

A file is staged through two buffers, one being filled while the other is copied; batches go on a stream of
their own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.errors import DeviceError, MemoryLimitError, SampleIndexError, StoreClosedError
from ups_store.format.layout import ArrayLayout
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.read.base import AnyStore
from ups_store.read.catalog import fingerprint_of
from ups_store.read.gather import (
    BatchArguments,
    Indices,
    Samples,
    TimeWindow,
    batch_shape,
    runs_of,
    window_of,
)
from ups_store.read.preload import STEP_BYTES, Budget, PreloadJob, PreloadReport, Request, ram_budget
from ups_store.read.verify import Report
from ups_store.torch.batch import map_tensors, torch_dtype

_NUM_BUFFERS = 2

# What rows are copied as: the widest word that divides them, so the device computes the fewest addresses.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_WIDEST_BYTES = 16


class DeviceFeed:
    """Copies batches to a CUDA device while the device computes.

    `send` runs in the background thread, `receive` in the training loop. Page-locked memory comes from
    torch's own pool, which hands a block out again only after the copies from it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._can_pin = True

    def __reduce__(self) -> tuple[type[DeviceFeed], tuple[torch.device]]:
        return DeviceFeed, (self._device,)  # a copy has a stream of its own

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make uninitialised page-locked memory; ordinary memory where the system refuses to lock it."""
        if self._can_pin:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                self._can_pin = False
                warnings.warn(f"no page-locked memory ({error}): copies wait for the device", stacklevel=2)
        return torch.empty(shape, dtype=dtype)

    def send(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """Start the copy of all tensors of a batch; the event comes when it is done."""
        with torch.cuda.stream(self._stream):
            there = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
            return there, self._stream.record_event()

    def receive(self, batch: Any, copied: torch.cuda.Event) -> None:
        """Have the current stream wait for the copy; the memory stays until that stream is done with it."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)

        def keep(tensor: Tensor) -> Tensor:
            tensor.record_stream(current)
            return tensor

        map_tensors(batch, keep)


class DeviceStore(AnyStore):
    """Samples of a store in memory that a device reads; `gather` runs on the device.

    `Store.preload` makes it, by mode "device". It doesn't need the store any more. Samples have
    the numbers that they have in the store, also where it holds a part of them; negative ones count from the
    store's end. Constants are NumPy's arrays on the host.

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
        metas = [
            array.meta
            if array.meta.is_constant
            else replace(array.meta, shape=(len(samples), *array.meta.sample_shape))
            for array in layout.arrays.values()
        ]
        super().__init__(job.file.path, job.catalog.root, metas, layout.num_samples)
        self.device, self.samples = device, samples
        self.nbytes = sum(part.memory.nbytes for part in rows.values())
        self._catalog = job.catalog
        self._rows: dict[str, DeviceRows] | None = dict(rows)
        constants = (array for array in layout.arrays.values() if array.meta.is_constant)
        self._constants = {array.meta.name: job.file.view(array).copy() for array in constants}

    @property
    def fingerprint(self) -> str:
        """That of the store that it was made of."""
        return fingerprint_of(self._catalog)

    def __len__(self) -> int:
        """Give the number of samples that it holds."""
        return len(self.samples)

    def _summary(self) -> list[str]:
        return [f"{self.samples} on {self.device}", f"{self.nbytes:,} bytes"]

    def whole(self, name: str) -> npt.NDArray[Any]:
        """Give a constant, on the host; slots of other arrays lie apart."""
        meta = self._meta(name)
        self.check_open()
        if meta.is_constant:
            return self._constants[name]
        raise self._unsupported("its samples are no single tensor", "use gather or sample", array=name)

    def sample(self, index: int) -> dict[str, Tensor]:
        """Give all arrays of one sample by name: new tensors, shape () for a number."""
        return {name: values[0] for name, values in self.gather([index]).items()}

    def gather(self, indices: Indices | slice | Tensor, *arguments: Any, **options: Any) -> dict[str, Tensor]:
        """Copy samples, or windows of them, into new tensors on the device; see `AnyStore.gather`.

        The device may still be at it on return, as with every kernel on its current stream; `num_threads` is
        without effect.

        Args:
            indices: As of any store. They are checked on the host: those of a tensor on the device are
                fetched first, which waits for the device.
            arguments: As of any store, but `out`: torch keeps memory by itself.
            options: Likewise.
        Returns:
            Contiguous tensors of shape (B, ...) by name, on the device, which the caller owns.
        Raises:
            SampleIndexError: For a sample or window outside of what it holds.
            SpecError: For an `out`, kind "unsupported"; else as `AnyStore.gather`.
        """
        raw = indices.cpu().numpy() if isinstance(indices, Tensor) else indices
        return super().gather(raw, *arguments, **options)

    def _gather(
        self, samples: Samples, metas: list[ArrayMeta], arguments: BatchArguments
    ) -> dict[str, Tensor]:
        if arguments.out is not None:
            raise self._unsupported("batches of a device store are new tensors", "leave out `out`")
        rows = self._open_rows()
        outside = np.flatnonzero((samples < self.samples.start) | (samples >= self.samples.stop))
        if outside.size:
            expected = f"{self.samples.start} <= index < {self.samples.stop}"
            actual = int(samples[outside[0]])
            raise SampleIndexError("no such sample here", path=self.path, expected=expected, found=actual)
        return {m.name: rows[m.name].gather(samples, window_of(m, len(samples), arguments)) for m in metas}

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


@dataclass(frozen=True)
class DeviceRows:
    """Part of one array in memory that a device reads."""

    layout: ArrayLayout
    first_sample: int
    memory: Tensor

    def gather(self, samples: npt.NDArray[np.int64], window: TimeWindow | None) -> Tensor:
        """Copy samples, or one window of each; the plain twin is `gather_array`."""
        dtype = torch_dtype(dtype_of(self.layout.meta.dtype))
        shape = batch_shape(self.layout.meta, len(samples), window)
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype, device=self.memory.device)
        runs = runs_of(self.layout, samples - self.first_sample, window)
        # Every run begins at a multiple of what divides slots and time steps.
        steps = window.length if window is not None and window.stride == 1 else 1
        unit = math.gcd(self.layout.stride, 0 if window is None else runs.nbytes // steps)
        # Rows of so many bytes that begin at every multiple of the unit, and overlap: shape (rows, words).
        word = math.gcd(unit, runs.nbytes, _WIDEST_BYTES)
        size = ((len(self.memory) - runs.nbytes) // unit + 1, runs.nbytes // word)
        rows = self.memory.view(_WORDS[word]).as_strided(size, (unit // word, 1))
        index = torch.from_numpy(runs.firsts // unit).to(self.memory.device, non_blocking=True)
        return torch.index_select(rows, 0, index).view(dtype).view(shape)


def find_device(job: PreloadJob) -> torch.device:
    """Find the device that was asked for, with its index."""
    name = job.request.device or "cuda"
    try:
        device = torch.device(name)
    except RuntimeError:
        problem = "no device of torch"
    else:
        if device.type == "cpu":
            return device
        if device.type != "cuda" or not torch.cuda.is_available():
            problem = "no CUDA here" if device.type == "cuda" else "not a CUDA device"
        else:
            index = torch.cuda.current_device() if device.index is None else device.index
            if index < torch.cuda.device_count():
                return torch.device("cuda", index)
            problem = f"{torch.cuda.device_count()} CUDA devices"
    raise DeviceError(
        "no such device to preload to",
        kind="no_device",
        path=job.file.path,
        expected=name,
        found=problem,
        hint='look at `nvidia-smi` and the build of torch, or preload with mode="page-cache"',
    )


def budget(job: PreloadJob) -> Budget:
    """Compute bytes of the samples' slots, and what the device has left."""
    device = find_device(job)
    needed = sum(_nbytes(array, job) for array in job.catalog.layout.per_sample)
    if device.type == "cpu":
        return ram_budget(needed, is_new=True)
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # of torch's own pool
    return Budget(needed, free + unused, f"{device} memory")


def load(job: PreloadJob) -> DeviceStore:
    """Move the samples to the device; slots lie there as they lie in the file."""
    device, samples = find_device(job), _samples(job)
    arrays = job.catalog.layout.per_sample
    largest = max((_nbytes(array, job) for array in arrays), default=0)
    buffers: list[Tensor] = []
    for _ in range(_NUM_BUFFERS):
        nbytes, is_cuda = min(largest, STEP_BYTES), device.type == "cuda"
        try:
            buffers.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_cuda))
        except RuntimeError:  # memory that isn't page-locked, from which copies take longer
            buffers.append(torch.empty(nbytes, dtype=torch.uint8))
    copied: dict[int, torch.cuda.Event] = {}
    rows, turn = {}, 0
    for array in arrays:
        try:
            memory = torch.empty(_nbytes(array, job), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:  # the budget can't know how the memory is fragmented
            needed = budget(job)
            raise MemoryLimitError(
                f"{device} refuses memory for the store",
                needed_bytes=needed.needed_bytes,
                available_bytes=needed.available_bytes,
                path=job.file.path,
                expected=f"{needed.needed_bytes:,} bytes",
                found=f"{needed.available_bytes:,} available, in pieces",
                hint="preload fewer `samples`, or use torch.cuda.empty_cache() first",
            ) from error
        for offset in range(0, len(memory), STEP_BYTES):
            part, turn = memory[offset : offset + STEP_BYTES], (turn + 1) % _NUM_BUFFERS
            if turn in copied:
                copied[turn].synchronize()  # else it would be filled again before it is copied
            buffer = buffers[turn][: len(part)]
            first = array.slot(samples.start)[0] + offset
            for _ in job.read(len(buffer), first=first, target=buffer.numpy().data):
                pass
            part.copy_(buffer, non_blocking=True)
            if device.type == "cuda":
                copied[turn] = torch.cuda.current_stream(device).record_event()
        rows[array.meta.name] = DeviceRows(array, samples.start, memory)
    for event in copied.values():
        event.synchronize()
    return DeviceStore(job, rows, device, samples=samples)


def _samples(job: PreloadJob) -> range:
    return range(job.catalog.layout.num_samples) if job.request.samples is None else job.request.samples


def _nbytes(array: ArrayLayout, job: PreloadJob) -> int:
    return array.stride * len(_samples(job)) if array.entry else 0
