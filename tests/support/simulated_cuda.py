"""What `DeviceFeed` uses of CUDA, without a device: a side stream whose copies a thread makes when it may.

No clock is involved. A test says how many copies the bus has had time for, so "fast enough" and "too slow"
mean the same on every machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from ups_store.torch import device

CUDA = torch.device("cuda")
LONG_S = 120.0  # in which anything that is under way is over, on a busy machine too

Copies = list[tuple[Tensor, Tensor]]  # targets and sources


class Event:
    """As `torch.cuda.Event`: comes when the copies before it are done."""

    def __init__(self, copies: Copies) -> None:
        self.copies, self.is_over = copies, threading.Event()


class SimulatedCuda:
    """Stands for `torch.cuda`; what is "on the device" is ordinary memory, zeros until the copy is made.

    Attributes:
        stalls: Of every wait of the loop's stream for a copy, whether that wasn't done yet.
        kept: Addresses of tensors of which the loop's stream has been noted as a user.
        num_pinned: Page-locked buffers that were asked for.
    """

    def __init__(self) -> None:
        self.stalls: list[bool] = []
        self.kept: set[int] = set()
        self.num_pinned = 0
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._may_copy, self._has_copied = threading.Semaphore(0), threading.Semaphore(0)
        self._on_stream = threading.local()
        self._copier = threading.Thread(target=self._run, name="simulated device")
        self._copier.start()

    def has_time_for_a_copy(self) -> None:
        """The next batch is copied, which has to be under way without the loop: it comes back afterwards."""
        self._may_copy.release()
        assert self._has_copied.acquire(timeout=LONG_S), "nothing was sent ahead"

    def close(self) -> None:
        """End the thread; copies that nothing waits for aren't made."""
        self._events.put(None)
        self._may_copy.release(100)  # more than any loader has under way
        self._copier.join()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            self._may_copy.acquire()
            for target, source in event.copies:
                target.copy_(source)
            event.copies.clear()
            event.is_over.set()
            self._has_copied.release()

    # --- the face of torch.cuda ---------------------------------------------------------------------------

    def is_available(self) -> bool:
        return True

    def Stream(self, device: torch.device) -> SimulatedCuda:  # noqa: N802
        return self  # there is one side stream; the loop's stream is the loop itself

    def current_stream(self, device: torch.device) -> SimulatedCuda:
        return self

    @contextmanager
    def stream(self, stream: SimulatedCuda) -> Iterator[None]:
        self._on_stream.copies = []
        yield
        del self._on_stream.copies

    def record_event(self) -> Event:
        event = Event(self._on_stream.copies)
        self._events.put(event)
        return event

    def wait_event(self, event: Event) -> None:
        self.stalls.append(not event.is_over.is_set())
        if self.stalls[-1]:
            self._may_copy.release()  # what a stall is: the bus has the time that it lacked
            assert event.is_over.wait(LONG_S)
            assert self._has_copied.acquire(timeout=LONG_S)

    def copy(self, source: Tensor) -> Tensor:
        """`source.to("cuda", non_blocking=True)` on the side stream."""
        target = torch.zeros(source.shape, dtype=source.dtype)
        self._on_stream.copies.append((target, source))
        return target


@contextmanager
def simulated_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    """Inside, `make_loader(..., device="cuda")` copies to a simulated device."""
    cuda = SimulatedCuda()
    plain_to, plain_empty = Tensor.to, torch.empty

    def to(tensor: Tensor, where: Any, **options: Any) -> Tensor:
        return cuda.copy(tensor) if where == CUDA else plain_to(tensor, where, **options)

    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        cuda.num_pinned += pin_memory
        return plain_empty(*shape, **options)

    record: Callable[[Tensor, Any], None] = lambda tensor, stream: cuda.kept.add(tensor.data_ptr())  # noqa: E731
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "record_stream", record)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(device.torch, "cuda", cuda)
    try:
        yield cuda
    finally:
        cuda.close()
