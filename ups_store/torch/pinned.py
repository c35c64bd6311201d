"""Preload mode "pinned": a copy of the store in page-locked memory, which the device reads by itself."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from typing import Any

import torch
from torch import Tensor

from ups_store.errors import DeviceError
from ups_store.read.preload import Budget, PreloadJob, ram_budget
from ups_store.read.preload_copy import fill, refusal_as_error
from ups_store.system import mappings
from ups_store.torch.device import find_device
from ups_store.torch.device_store import DeviceRows, DeviceStore

_FLAGS = 1 | 2  # cudaHostRegisterPortable: for all devices; cudaHostRegisterMapped: kernels may read it


class PageLocked(mmap.mmap):
    """Memory that CUDA has page-locked, until nothing refers to it any more.

    Forked children share it: the kernel would copy private pages that are locked for a device at once.
    """

    registered_by: int = 0  # process; a forked child must leave the registration alone
    address: int = 0
    device: torch.device | None = None

    def register(self, device: torch.device, *, path: object) -> None:
        """Lock the pages for CUDA.

        Raises:
            DeviceError: With kind "pin", if it is refused.
        """
        self.address, self.device = mappings.address(self), device
        with torch.cuda.device(device):
            code = int(_runtime().cudaHostRegister(self.address, len(self), _FLAGS))
            if code == 0:
                self.registered_by = os.getpid()
                return
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)  # takes the error, which the next kernel would report else
        raise DeviceError(
            "CUDA refuses to page-lock the store",
            kind="pin",
            path=path,
            expected=f"{len(self):,} bytes",
            found=f"cudaHostRegister error {code}",
            hint='a container may limit locked memory (`ulimit -l`); or preload with mode="copy"',
        )

    def __del__(self) -> None:
        # Before the memory is unmapped, which a finalizer would come after.
        if self.registered_by == os.getpid() and not sys.is_finalizing():
            torch.cuda.synchronize(self.device)  # a kernel may still read it
            _runtime().cudaHostUnregister(self.address)
            self.registered_by = 0


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _DeviceView:
    """Tells torch where page-locked memory lies, and keeps it: host and device use one address."""

    def __init__(self, memory: PageLocked) -> None:
        self.memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        where = (self.memory.address, False)
        return {"shape": (len(self.memory),), "typestr": "|u1", "data": where, "strides": None, "version": 3}


def device_view(memory: PageLocked, device: torch.device, *, path: object) -> Tensor:
    """Page-locked memory as a tensor that the device reads, uint8, no copy.

    Raises:
        DeviceError: If the device can't read it.
    """
    tensor: Tensor = torch.as_tensor(_DeviceView(memory), device=device)
    if tensor.data_ptr() != memory.address:
        raise DeviceError("the device can't read the host's memory", kind="pin", path=path, found=device)
    return tensor


def budget(job: PreloadJob) -> Budget:
    """The file's length in RAM.

    Raises:
        DeviceError: If there is no CUDA device.
    """
    device = find_device(job)
    if device.type != "cuda":
        raise DeviceError("only CUDA reads page-locked memory", path=job.file.path, found=device)
    return ram_budget(job.file.nbytes, is_new=True)


def load(job: PreloadJob) -> DeviceStore:
    """Copy the store to page-locked memory; the store gathers from there too."""
    device, path = find_device(job), job.file.path
    with refusal_as_error(job):
        memory = mappings.new_memory(job.file.nbytes, shared=True, kind=PageLocked)
    fill(memory, job)
    memory.register(device, path=path)
    view = device_view(memory, device, path=path)
    layout = job.catalog.layout
    samples = range(layout.num_samples)
    arrays = {}
    for array in layout.per_sample:
        nbytes = array.stride * len(samples) if array.entry else 0
        arrays[array.meta.name] = DeviceRows(array, 0, view[array.offset : array.offset + nbytes])
    job.file.use_copy(memory)
    return DeviceStore(job, arrays, device, samples=samples)
