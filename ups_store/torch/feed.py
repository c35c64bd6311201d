"""`DeviceFeed`: batches on their way to a CUDA device, on a stream of their own."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ups_store.torch.batch import Batch


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

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        """Start the copy; the event comes when it is done."""
        with torch.cuda.stream(self._stream):
            there = batch.to(self._device, non_blocking=True)
            return there, self._stream.record_event()

    def receive(self, batch: Batch, copied: torch.cuda.Event) -> Batch:
        """Have the current stream wait for the copy; the memory stays until that stream is done with it."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in batch.tensors():
            tensor.record_stream(current)
        return batch
