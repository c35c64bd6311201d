"""Preload mode "device": samples moved to a device's memory, and gathered there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ups_store.errors import DeviceError, MemoryLimitError
from ups_store.format.layout import ArrayLayout
from ups_store.read.preload import Budget, Job, ram_budget
from ups_store.torch.device_rows import DeviceRows
from ups_store.torch.device_store import DeviceStore
from ups_store.torch.staging import Staging

_DEFAULT = "cuda"


def find_device(job: Job) -> torch.device:
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


def budget(job: Job) -> Budget:
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


def load(job: Job) -> DeviceStore:
    """Move the samples to the device; slots lie there as they lie in the file."""
    device, samples = find_device(job), _samples(job)
    arrays = job.catalog.layout.per_sample
    staging = Staging(job, device, max((_nbytes(array, job) for array in arrays), default=0))
    there = {}
    for array in arrays:
        with _out_of_memory_named(job, device):
            memory = torch.empty(_nbytes(array, job), dtype=torch.uint8, device=device)
        staging.fill(memory, array.slot(samples.start)[0])
        there[array.meta.name] = DeviceRows(array, samples.start, memory)
    staging.finish()
    return DeviceStore(there, device, samples=samples, path=job.file.path)


def _samples(job: Job) -> range:
    return range(job.catalog.layout.num_samples) if job.request.samples is None else job.request.samples


def _nbytes(array: ArrayLayout, job: Job) -> int:
    return array.stride * len(_samples(job)) if array.entry else 0


def _no_device(job: Job, name: str, found: str) -> DeviceError:
    return DeviceError(
        "no such device to preload to",
        kind="no_device",
        path=job.file.path,
        expected=name,
        found=found,
        hint='look at `nvidia-smi` and the build of torch, or preload with mode="page-cache"',
    )


@contextmanager
def _out_of_memory_named(job: Job, device: torch.device) -> Iterator[None]:
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
