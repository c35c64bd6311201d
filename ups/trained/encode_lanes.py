"""Lanes: micro-batches side by side, each in a thread of its own, on CUDA each with a stream of its own.

They are separate forwards of one shape and never a larger one, so how many run at a time changes no bit of
the latents. Threads of a processor compute with one core each: a forward on all cores at once waits for the
slowest of them at every operation, and readers and commits want the same cores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from ups.device import free_bytes
from ups.errors import ConfigError
from ups.log import logger

MAX_LANES = 8  # beyond that Python's lock is what they wait for
CUDA_LANES = 4  # one copies in, one copies out, and two keep the device busy
_FORWARD_FACTOR = 32  # memory of a forward over that of its input, at most
_LARGEST_MAPPED = 31 << 20  # bytes of a block after whose end glibc raises its thresholds the most

Result = TypeVar("Result")


def num_lanes(device: torch.device, *, micro_batch_nbytes: int) -> int:
    """How many micro-batches may run at a time, by the cores that PyTorch may use, and free memory."""
    if device.type == "cuda":
        return CUDA_LANES
    fitting = free_bytes(device) // (_FORWARD_FACTOR * max(1, micro_batch_nbytes))
    return max(1, min(torch.get_num_threads(), MAX_LANES, fitting))


class Lanes:
    """Runs jobs side by side; halves their number each time that the device's memory doesn't suffice.

    Attributes:
        num: How many jobs run at a time, at most.
    """

    def __init__(self, num: int, *, device: torch.device, micro_batch: int) -> None:
        self.num = num
        self._device, self._micro_batch = device, micro_batch
        self._num_running = 0
        self._changed = threading.Condition()
        self._room = threading.Semaphore(num + 1)  # one more is laid out, for the lane that is free next
        self._of_thread = threading.local()
        if device.type == "cpu":
            # Have glibc keep what a forward frees for the next one, instead of a page fault for every page of
            # it. Freeing a mapped block raises its thresholds for mapping and for trimming, up to 32 MiB and
            # twice that (mallopt(3), M_MMAP_THRESHOLD).
            torch.empty(_LARGEST_MAPPED, dtype=torch.uint8)
        # Threads share the cores; what PyTorch uses in other threads stays as it is.
        num_cores = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(num, "ups-encode", _compute_with, (max(1, num_cores // num),))
        all_there = threading.Barrier(num + 1)
        for _ in range(num):
            self._threads.submit(all_there.wait)
        all_there.wait()
        torch.set_num_threads(num_cores)  # also for threads to come

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run a job as soon as a lane is free; waits while as many as there are lanes wait for one.

        Args:
            job: Computes on the current stream; run again, alone, if memory didn't suffice. What it returns
                must not depend on work on the device that isn't done.
        """
        self._room.acquire()
        future = self._threads.submit(self._run, job)
        future.add_done_callback(lambda done: self._room.release())
        return future

    def _run(self, job: Callable[[], Result]) -> Result:
        stream: AbstractContextManager[object] = nullcontext()
        if self._device.type == "cuda":  # each thread has one of its own
            if not hasattr(self._of_thread, "stream"):
                self._of_thread.stream = torch.cuda.Stream(self._device)
            stream = torch.cuda.stream(self._of_thread.stream)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._num_running < self.num)
                self._num_running += 1
                num = self.num
            try:
                with stream:
                    return job()
            except (torch.OutOfMemoryError, MemoryError) as error:
                if num == 1:
                    raise ConfigError(
                        f"{self._device} has too little memory for one micro-batch",
                        kind="no_memory",
                        expected=f"room for {self._micro_batch} frames",
                        found=(str(error).splitlines() or [type(error).__name__])[0],
                        hint="choose a smaller latent.micro_batch, which makes another store, or another"
                        " latent.device",
                    ) from error
            finally:
                with self._changed:
                    self._num_running -= 1
                    self._changed.notify_all()
            # Here, where the error doesn't hold the memory of its forward any more.
            with self._changed:
                is_first = self.num == num  # else another job has seen to it
                self.num = num // 2 if is_first else self.num
            if is_first:
                logger.warning(
                    f"{self._device} ran out of memory with {num} micro-batches of {self._micro_batch}"
                    f" frames at a time; {num // 2} from now on, which changes no byte of the latents"
                )


def _compute_with(num_cores: int) -> None:
    torch.set_num_threads(num_cores)
    torch.get_num_threads()  # a thread's own number is fixed when it is first asked for
