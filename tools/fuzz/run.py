"""Many inputs, in this process or shared among several, with bounded time and memory."""

from __future__ import annotations

import functools
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from tools.fuzz.fuzzer import Fuzzer, Outcome
from tools.fuzz.inputs import KINDS, InputFuzzer
from tools.fuzz.stores import StoreFuzzer, make_input, make_seeds

HANG_SECONDS = 60.0  # of wall time, for one input
MAX_MEMORY_BYTES = 1 << 30  # of address space beyond what a process has when it starts
STORE = "store"
BLOCKS = {STORE: 2000}  # inputs that one process tries


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Have larger allocations fail with MemoryError, which counts as a failure."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def make_fuzzer(kind: str, folder: Path, seed: int) -> Fuzzer:
    """The fuzzer of stores, or of another kind of files."""
    if kind == STORE:
        return StoreFuzzer(folder, seed)
    return InputFuzzer(kind, folder, seed)


def input_maker(kind: str, folder: Path) -> Callable[[int, int], tuple[Any, ...]]:
    """Gives the bytes of an input, and more, by seed and number."""
    if kind == STORE:
        return functools.partial(make_input, make_seeds(folder))
    return KINDS[kind](folder).make_input


def fuzz(
    folder: Path, numbers: range, *, seed: int, kind: str = STORE, current: Synchronized[int] | None = None
) -> Outcome:
    """Try inputs in this process.

    Args:
        folder: An empty folder, for seeds.
        numbers: Numbers of the inputs.
        seed: Of all of them.
        kind: Which files: "store", or one of `inputs.KINDS`.
        current: Called with the number of the input that is being tried, in case the process dies of it.
    """
    fuzzer = make_fuzzer(kind, folder, seed)
    with bounded_memory():
        for number in numbers:
            if current is not None:
                current.value = number
            fuzzer.try_input(number)
    fuzzer.close()
    return fuzzer.outcome


def fuzz_in_processes(
    num_inputs: int, *, seed: int, num_processes: int, max_seconds: float, kind: str = STORE
) -> Outcome:
    """Share inputs among processes; one that dies of an input, or hangs, is a failure like any other."""
    context, outcome, started = multiprocessing.get_context("fork"), Outcome(), time.perf_counter()
    results: Any = context.SimpleQueue()
    block, ranks = BLOCKS.get(kind, 1000), range(num_processes)
    next_first = 0
    while next_first < num_inputs and time.perf_counter() - started < max_seconds:
        currents = [context.Value("q", -1) for _ in ranks]
        shares = [
            range(first, min(first + block, num_inputs))
            for first in (next_first + rank * block for rank in ranks)
        ]
        workers = [
            context.Process(target=_work, args=(share, seed, kind, current, results))
            for share, current in zip(shares, currents, strict=True)
        ]
        for worker in workers:
            worker.start()
        for worker, current in zip(workers, currents, strict=True):
            if problem := _end_of(worker, current):
                outcome.failures[current.value] = problem
        while not results.empty():
            outcome.add(results.get())
        next_first += block * num_processes
        print(f"\r{outcome.num_inputs:,} inputs, {len(outcome.failures)} failures", end="", file=sys.stderr)
    print(file=sys.stderr)
    outcome.seconds = round(time.perf_counter() - started, 1)
    return outcome


def _end_of(worker: BaseProcess, current: Synchronized[int]) -> str | None:
    """Wait for a process; what ended it, if that was an input. One that hangs is killed."""
    while True:
        before = current.value
        worker.join(HANG_SECONDS)
        if worker.exitcode is not None:
            return f"the process ended with {worker.exitcode}" if worker.exitcode else None
        has_begun = before >= 0  # until then it prepares
        if has_begun and current.value == before:
            worker.kill()
            worker.join()
            return f"took more than {HANG_SECONDS:g} s"


def _work(share: range, seed: int, kind: str, current: Synchronized[int], results: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        results.put(fuzz(Path(folder), share, seed=seed, kind=kind, current=current))
