"""Many inputs, in this process or shared among several, with bounded time and memory."""

from __future__ import annotations

import json
import math
import multiprocessing
import resource
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Annotated, Any

import typer

import ups_store
from tools.fuzz.inputs import KINDS
from ups.errors import UpsError

MAX_SECONDS = 1.0  # of processor time, for one input: other work of the machine must not count
HANG_SECONDS = 60.0  # of wall time, for one input
MAX_MEMORY_BYTES = 1 << 30  # of address space beyond what a process has when it starts


@dataclass
class Outcome:
    """What the fuzzing did and found."""

    num_inputs: int = 0  # inputs that were read
    num_opened: int = 0  # inputs that opened
    num_sound: int = 0  # inputs that opened and verified
    max_seconds: float = 0.0  # the longest that one input took
    peak_memory_mib: float = 0.0  # largest resident memory of a process
    failures: dict[int, str] = field(default_factory=dict)  # what should not have happened, by input number
    kinds: Counter[str] = field(default_factory=Counter)  # refusals by kind of error
    seconds: float = 0.0  # how long it took

    def add(self, other: Outcome) -> None:
        """Count another process's inputs too."""
        self.num_inputs += other.num_inputs
        self.num_opened += other.num_opened
        self.num_sound += other.num_sound
        self.max_seconds = max(self.max_seconds, other.max_seconds)
        self.peak_memory_mib = max(self.peak_memory_mib, other.peak_memory_mib)
        self.failures |= other.failures
        self.kinds += other.kinds


def fuzz(
    folder: Path, numbers: range, *, seed: int, kind: str = "store", current: Synchronized[int] | None = None
) -> Outcome:
    """Try inputs in this process.

    Args:
        folder: An empty folder, for seeds.
        numbers: Numbers of the inputs.
        seed: Of all of them.
        kind: Of `KINDS`.
        current: Told the number of the input that is being tried, in case the process dies of it.
    """
    outcome = Outcome()
    with closing(KINDS[kind](folder)) as files:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        old = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, old[1]))  # more is a MemoryError
        try:
            for number in numbers:
                if current is not None:
                    current.value = number
                made, failure = files.make_input(seed, number), ""
                began = time.process_time()
                try:
                    outcome.num_sound += files.read(made)
                    outcome.num_opened += 1
                except (ups_store.StoreError, UpsError) as error:
                    outcome.kinds[error.kind] += 1
                    str(error)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    failure = f"{type(error).__name__}: {error}"[:300]
                seconds = time.process_time() - began
                if seconds > MAX_SECONDS:
                    failure = f"took {seconds:.2f} s"
                if failure:
                    outcome.failures[number] = failure
                outcome.max_seconds = max(outcome.max_seconds, seconds)
                outcome.num_inputs += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, old)
    outcome.peak_memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return outcome


def fuzz_in_processes(
    num_inputs: int, *, seed: int, num_processes: int, max_seconds: float, kind: str = "store"
) -> Outcome:
    """Share inputs among processes; one that dies of an input, or hangs, is a failure like any other."""
    context, outcome, started = multiprocessing.get_context("fork"), Outcome(), time.perf_counter()
    results: Any = context.SimpleQueue()
    block, first = KINDS[kind].block, 0
    while first < num_inputs and time.perf_counter() - started < max_seconds:
        workers = []
        for begin in range(first, first + num_processes * block, block):
            share, current = range(begin, min(begin + block, num_inputs)), context.Value("q", -1)
            worker = context.Process(target=_work, args=(share, seed, kind, current, results))
            worker.start()
            workers.append((worker, current))
        for worker, current in workers:
            while worker.exitcode is None:
                before = current.value
                worker.join(HANG_SECONDS)
                if worker.exitcode is None and before == current.value >= 0:  # before, it prepares
                    worker.kill()
                    worker.join()
                    outcome.failures[before] = f"took more than {HANG_SECONDS:g} s"
            if worker.exitcode:
                outcome.failures.setdefault(current.value, f"the process ended with {worker.exitcode}")
        while not results.empty():
            outcome.add(results.get())
        first += block * num_processes
        print(f"\r{outcome.num_inputs:,} inputs, {len(outcome.failures)} failures", end="", file=sys.stderr)
    print(file=sys.stderr)
    outcome.seconds = round(time.perf_counter() - started, 1)
    return outcome


def _work(share: range, seed: int, kind: str, current: Synchronized[int], results: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        results.put(fuzz(Path(folder), share, seed=seed, kind=kind, current=current))


def main(
    inputs: Annotated[int, typer.Option(help="how many inputs to try")] = 1_000_000,
    *,
    kind: Annotated[str, typer.Option(help=", ".join(KINDS))] = "store",
    seed: Annotated[int, typer.Option(help="another seed, other inputs")] = 0,
    processes: Annotated[int, typer.Option(help="processes")] = 2,
    max_seconds: Annotated[float, typer.Option(help="stop after so long, whatever was tried")] = math.inf,
    keep: Annotated[Path | None, typer.Option(help="folder for inputs that failed")] = None,
) -> None:
    """Fuzz a reader; exits with 1 if anything but a typed error or a right result came of an input."""
    outcome = fuzz_in_processes(
        inputs, seed=seed, num_processes=processes, max_seconds=max_seconds, kind=kind
    )
    if keep is not None and outcome.failures:
        keep.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder, closing(KINDS[kind](Path(folder))) as files:
            for number in outcome.failures:
                (keep / f"{kind}-{seed}-{number}").write_bytes(files.make_input(seed, number).content)
    print(json.dumps(vars(outcome), indent=2))
    raise typer.Exit(1 if outcome.failures else 0)
