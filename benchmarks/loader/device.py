"""Batches to a device: what a loop waits for a simulated one; the rate to a real one, where there is one."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.inputs import NAME, check, values_of
from benchmarks.harness.measure import RATE, Comparison, tracked
from benchmarks.harness.scale import SCALE
from benchmarks.loader.loaders import BATCH, Epochs
from ups_store.torch import make_loader

SAMPLE_BYTES = 102_400
RATE_BYTES_S = 2e8  # so slow that the processor hardly works: it isn't what the loop waits for
COPY_S = BATCH * SAMPLE_BYTES / RATE_BYTES_S


class SlowDevice:
    """As `DeviceFeed`: a thread copies the batches, one after the other, at a rate that is given.

    Attributes:
        waited_s: What the loop waited for copies.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._sent: SimpleQueue[tuple[Any, threading.Event] | None] = SimpleQueue()
        self._copier = threading.Thread(target=self._run, daemon=True)
        self._copier.start()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def send(self, batch: Any) -> tuple[Any, threading.Event]:
        there, copied = batch.apply(torch.empty_like), threading.Event()
        self._sent.put(((there, batch), copied))
        return there, copied

    def receive(self, batch: Any, copied: threading.Event) -> None:
        began = time.perf_counter()
        copied.wait()
        self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        self._sent.put(None)
        self._copier.join()

    def _run(self) -> None:
        while (sent := self._sent.get()) is not None:
            (there, batch), copied = sent
            ends = time.perf_counter() + batch.nbytes / RATE_BYTES_S
            for target, source in zip(there.tensors(), batch.tensors(), strict=True):
                target.copy_(source)
            time.sleep(max(0.0, ends - time.perf_counter()))
            copied.set()


class SimulatedDevice(Epochs):
    """A loop whose steps take a number of copies' time; it sleeps, as one that waits for kernels does."""

    params = (1.5, 0.5)
    param_names = ("copies_a_step",)

    def setup(self, copies_a_step: float) -> None:
        self.prepare(SAMPLE_BYTES)
        self.device = SlowDevice()
        self.loader = make_loader(self.dataset, batch_size=BATCH, drop_last=True, shuffle=True)
        self.loader._feed = self.device  # type: ignore[assignment]
        for batch in self.loader:  # and the first batches of the next epoch lie ready
            check(batch[NAME].numpy(), values_of(batch["index"].numpy(), SAMPLE_BYTES))

    @tracked(
        "share of an epoch that a loop waits for batches that a simulated device copies at 0.2 GB/s",
        "%",
        at_most={1.5: 5.0},
    )
    def track_waiting(self, copies_a_step: float) -> float:
        self.device.waited_s = 0.0
        for _ in self.loader:
            time.sleep(copies_a_step * COPY_S)
        report = self.loader.report()
        return 100 * (report.waited_s + self.device.waited_s) / report.seconds


if torch.cuda.is_available():

    class RealDevice(Epochs):
        """An empty loop over batches on the device; the reference copies one page-locked batch as often."""

        params = (SAMPLE_BYTES,)
        param_names = ("sample_bytes",)

        def setup(self, sample_bytes: int) -> None:
            self.prepare(sample_bytes)
            options: dict[str, Any] = {"batch_size": BATCH, "drop_last": True, "shuffle": True}
            self.loader = make_loader(self.dataset, device="cuda", **options)
            batch = next(iter(self.loader))
            check(batch[NAME].cpu().numpy(), values_of(batch["index"].cpu().numpy(), sample_bytes))
            self.pinned = torch.empty_like(batch[NAME], device="cpu", pin_memory=True)

        def loaded(self, _: int) -> None:
            for _batch in self.loader:
                pass
            torch.cuda.synchronize()

        def copied(self, _: int) -> None:
            for _batch in range(len(self.loader)):
                self.pinned.to("cuda", non_blocking=True)
            torch.cuda.synchronize()

        @tracked("shuffled epoch of make_loader to the device, over copies of one pinned batch", RATE)
        def track_over_pinned_copy(self, sample_bytes: int) -> Comparison:
            return self.over(self.loaded, self.copied, pairs=SCALE.process_pairs)
