"""What goes to a device: samples that are preloaded there (`budget`, `load`), and batches (`DeviceFeed`).

A file is staged through two buffers, one being filled while the other is copied; batches go on a stream of
their own.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from ups_store.errors import DeviceError, MemoryLimitError
from ups_store.format.layout import ArrayLayout
from ups_store.read.page_cache import STEP_BYTES, read_steps
from ups_store.read.preload import Budget, PreloadJob, ram_budget
from ups_store.torch.batch import map_tensors
from ups_store.torch.device_store import DeviceRows, DeviceStore

_DEFAULT = "cuda"


def find_device(job: PreloadJob) -> torch.device:
    """The device that was asked for, with its index.

    Raises:
        DeviceError: If it isn't there, or is neither a CUDA device nor the CPU.
    """
    name = job.request.device or _DEFAULT
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _no_device(job, name, "no device of torch") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        raise _no_device(job, name, "no CUDA here" if device.type == "cuda" else "not a CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise _no_device(job, name, f"{torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def budget(job: PreloadJob) -> Budget:
    """Bytes of the samples' slots, and what the device has left.

    Raises:
        DeviceError: If there is no such device.
    """
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
    staging = Staging(job, device, max((_nbytes(array, job) for array in arrays), default=0))
    there = {}
    for array in arrays:
        with _out_of_memory_as_error(job, device):
            memory = torch.empty(_nbytes(array, job), dtype=torch.uint8, device=device)
        staging.fill(memory, array.slot(samples.start)[0])
        there[array.meta.name] = DeviceRows(array, samples.start, memory)
    staging.finish()
    return DeviceStore(job, there, device, samples=samples)


def _samples(job: PreloadJob) -> range:
    return range(job.catalog.layout.num_samples) if job.request.samples is None else job.request.samples


def _nbytes(array: ArrayLayout, job: PreloadJob) -> int:
    return array.stride * len(_samples(job)) if array.entry else 0


def _no_device(job: PreloadJob, name: str, found: str) -> DeviceError:
    return DeviceError(
        "no such device to preload to",
        kind="no_device",
        path=job.file.path,
        expected=name,
        found=found,
        hint='look at `nvidia-smi` and the build of torch, or preload with mode="page-cache"',
    )


@contextmanager
def _out_of_memory_as_error(job: PreloadJob, device: torch.device) -> Iterator[None]:
    """Turn torch's error into ours: the budget can't know how the device's memory is fragmented."""
    try:
        yield
    except torch.OutOfMemoryError as error:
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


_NUM_BUFFERS = 2


class Staging:
    """Reads parts of a file to a device.

    Args:
        job: The file, and what takes progress.
        device: A CUDA device, which copies from page-locked memory meanwhile; or the CPU.
        nbytes: Length of the largest part.
    """

    def __init__(self, job: PreloadJob, device: torch.device, nbytes: int) -> None:
        self._job = job
        self._device = device
        size = min(nbytes, STEP_BYTES)
        self._buffers = [_buffer(size, device) for _ in range(_NUM_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def fill(self, memory: Tensor, first: int) -> None:
        """Read as many bytes as `memory` has, uint8, from byte `first` of the file on."""
        for offset in range(0, len(memory), STEP_BYTES):
            part = memory[offset : offset + STEP_BYTES]
            turn, self._turn = self._turn, (self._turn + 1) % _NUM_BUFFERS
            copied = self._copied[turn]
            if copied is not None:
                copied.synchronize()  # else it would be filled again before it is copied
            buffer = self._buffers[turn][: len(part)]
            self._read(buffer, first + offset)
            part.copy_(buffer, non_blocking=True)
            if self._device.type == "cuda":
                self._copied[turn] = torch.cuda.current_stream(self._device).record_event()

    def finish(self) -> None:
        """Wait for the last copies."""
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()

    def _read(self, buffer: Tensor, first: int) -> None:
        job = self._job
        steps = read_steps(
            job.fd,
            len(buffer),
            first=first,
            target=buffer.numpy().data,
            num_threads=job.num_threads,
            path=job.file.path,
        )
        with closing(steps):
            for length in steps:
                job.progress(length)


def _buffer(nbytes: int, device: torch.device) -> Tensor:
    """Page-locked memory; ordinary memory, from which copies take longer, where that is refused."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


class DeviceFeed:
    """Copies batches to a CUDA device while the device computes.

    `send` runs in the background thread, `receive` in the training loop. Page-locked memory comes from
    torch's own pool, which hands a block out again only after the copies from it are done.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._can_pin = True

    def __reduce__(self) -> tuple[type[DeviceFeed], tuple[torch.device]]:
        return DeviceFeed, (self._device,)  # a copy has a stream of its own

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised page-locked memory; ordinary memory where the system refuses to lock it."""
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
