"""Change good files at random, read what comes out, and see that nothing but a typed error ever happens.

    python -m tools.fuzz --kind store --inputs 1000000

Stores are here; the other kinds (HDF5, YAML, `.pt`, safetensors) in `fuzz_inputs`.

Changes are blind (bits, cuts, splices), or know the format (fields of ZIP records, JSON documents, payloads,
with all checksums made right again, so that they get past them). Each input is a function of seed and number.
Blind changes must also be noticed: by opening, or by `verify`. Results go to docs/results/reliability.md.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import multiprocessing
import os
import random
import resource
import struct
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Annotated, Any

import typer

import ups_store
from tools.conformance import REFUSED, write_sample_store
from tools.conformance.archive import (
    Part,
    document_bytes,
    edit_identity,
    find_places,
    put_together,
    read_document,
    replace_data,
    take_apart,
)
from tools.conformance.sample_store import NUM_SAMPLES
from ups.errors import UpsError
from ups_store.check.doctor import examine
from ups_store.read.recovery import building_path

MAX_SECONDS = 1.0  # of processor time: other work of the machine must not count
HANG_SECONDS = 60.0  # of wall time, for one input
MAX_MEMORY_BYTES = 1 << 30  # of address space beyond what a process has when it starts
STORE = "store"
BLOCKS = {STORE: 2000}  # inputs that one process tries
NUMBERS = (
    0,
    1,
    2,
    3,
    0x7F,
    0xFF,
    0xFFFF,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 60,
    (1 << 63) - 1,
    1 << 63,
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 1.5, 1 << 53, 1 << 60, 1 << 64, math.inf, "", "sample", "x", "\ud800",
    "float64", "int8", [], [0], [1 << 40], [[]], {}, {"name": "bytes"},
)  # fmt: skip

Chance = random.Random
Change = Callable[[bytes, Chance], bytes]


@dataclass
class Outcome:
    """What the fuzzing did and found.

    Attributes:
        num_inputs: Inputs that were read.
        num_opened: Inputs that opened as a store.
        num_sound: Inputs that opened and verified.
        max_seconds: The longest that one input took.
        peak_memory_mib: Largest resident memory of a process.
        failures: What should not have happened, by input number.
        kinds: Refusals by kind of error.
        seconds: How long it took.
    """

    num_inputs: int = 0
    num_opened: int = 0
    num_sound: int = 0
    max_seconds: float = 0.0
    peak_memory_mib: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        """Count another process's inputs too."""
        self.num_inputs += other.num_inputs
        self.num_opened += other.num_opened
        self.num_sound += other.num_sound
        self.max_seconds = max(self.max_seconds, other.max_seconds)
        self.peak_memory_mib = max(self.peak_memory_mib, other.peak_memory_mib)
        self.failures |= other.failures
        self.kinds += other.kinds


# --- blind changes: every one of them must be noticed ---------------------------------------------------


def flip_bits(good: bytes, chance: Chance) -> bytes:
    changed = bytearray(good)
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def overwrite_number(good: bytes, chance: Chance) -> bytes:
    layout = chance.choice(("<B", "<H", "<I", "<Q"))
    nbytes = struct.calcsize(layout)
    at, number = chance.randrange(len(good) - nbytes), chance.choice(NUMBERS)
    return good[:at] + struct.pack(layout, number & ((1 << 8 * nbytes) - 1)) + good[at + nbytes :]


def cut(good: bytes, chance: Chance) -> bytes:
    first = chance.randrange(len(good))
    return good[:first] if chance.random() < 0.5 else good[first:]


def splice(good: bytes, chance: Chance) -> bytes:
    nbytes = int(2 ** chance.uniform(0, 13))
    source, target = chance.randrange(len(good)), chance.randrange(len(good))
    piece, kept = good[source : source + nbytes], chance.choice((0, nbytes))
    return good[:target] + piece + good[target + kept :]


def erase(good: bytes, chance: Chance) -> bytes:
    first, nbytes = chance.randrange(len(good)), int(2 ** chance.uniform(0, 13))
    middle = bytes(len(good[first : first + nbytes])) if chance.random() < 0.5 else b""
    return good[:first] + middle + good[first + nbytes :]


# --- changes that know the format -----------------------------------------------------------------------

_places_of = functools.lru_cache(maxsize=4)(find_places)


@functools.lru_cache(maxsize=4)
def _parts_of(good: bytes) -> tuple[Part, ...]:
    return tuple(take_apart(good))


def record_field(good: bytes, chance: Chance) -> bytes:
    """A number in a ZIP record or the end records."""
    places = _places_of(good)
    starts = [*places.local.values(), *places.central.values(), places.end64, places.locator, places.end]
    at = chance.choice(starts) + chance.randrange(80)
    layout = chance.choice(("<H", "<I", "<Q"))
    nbytes = struct.calcsize(layout)
    at = min(at, len(good) - nbytes)
    (old,) = struct.unpack_from(layout, good, at)
    number = chance.choice((*NUMBERS, old + 1, old - 1, old * 2, len(good)))
    return good[:at] + struct.pack(layout, number & ((1 << 8 * nbytes) - 1)) + good[at + nbytes :]


def json_value(good: bytes, chance: Chance) -> bytes:
    """A value of a metadata document; its entry's checksums are made right."""
    parts = _parts_of(good)
    part = chance.choice([part for part in parts if part.name.endswith("zarr.json")])
    document = read_document(parts, part.name)
    for _ in range(chance.choice((1, 1, 2, 5))):
        change_value(document, chance)
    return put_together(replace_data(parts, part.name, document_bytes(document)))


def identity_value(good: bytes, chance: Chance) -> bytes:
    """A value of the identity, with its hash made right."""
    return put_together(edit_identity(_parts_of(good), lambda identity: change_value(identity, chance)))


def entry_data(good: bytes, chance: Chance) -> bytes:
    """Bytes of one entry, by a blind change; its records are made right."""
    parts = _parts_of(good)
    part = chance.choice([part for part in parts if part.data])
    change = chance.choice((flip_bits, splice, erase)) if len(part.data) > 8 else flip_bits
    return put_together(replace_data(parts, part.name, change(part.data, chance)))


def entries(good: bytes, chance: Chance) -> bytes:
    """Entries left out, repeated, or in another order."""
    parts = list(_parts_of(good))
    first, second = chance.randrange(len(parts)), chance.randrange(len(parts))
    action = chance.randrange(3)
    if action == 0:
        del parts[first]
    elif action == 1:
        parts.insert(second, parts[first])
    else:
        parts[first], parts[second] = parts[second], parts[first]
    return put_together(parts)


def change_value(document: Any, chance: Chance) -> None:
    """Replace, remove or add one value somewhere in a JSON document."""
    places = list(_places_in(document))
    if not places:  # an earlier change took all of them away
        return
    holder, key = chance.choice(places)
    action = chance.random()
    if action < 0.15:
        del holder[key]
    elif action < 0.3 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(chance.choice(VALUES)))
    elif action < 0.5 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] = chance.choice((holder[key] + 1, holder[key] - 1, -holder[key], holder[key] << 32))
    elif action < 0.6:
        other, other_key = chance.choice(places)
        holder[key] = json.loads(json.dumps(other[other_key]))
    else:
        holder[key] = copy.deepcopy(chance.choice(VALUES))


def _places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places_in(inner)


BLIND: tuple[Change, ...] = (flip_bits, overwrite_number, cut, splice, erase)
AWARE: tuple[Change, ...] = (record_field, json_value, json_value, identity_value, entry_data, entries)


# --- reading --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seeds:
    """Good files to start from: finished stores, and one under construction."""

    finished: tuple[bytes, ...]
    building: bytes


def make_seeds(folder: Path) -> Seeds:
    """Write and read them: the sample store, malformed ones made from it, an unfinished one."""
    good = write_sample_store(folder / "seed.zarr.zip").read_bytes()
    with ups_store.open(folder / "seed.zarr.zip") as store:
        constants = store.constants
        with ups_store.create(
            folder / "half.zarr.zip",
            store.arrays,
            constants=constants,
            dims={name: store.dims[name] for name in constants},
            identity={"task": "half"},
        ) as writer:
            writer.commit_many([0, 2], store.gather([0, 2]))
    half = building_path(folder / "half.zarr.zip").read_bytes()
    return Seeds((good,), half)


def make_input(seeds: Seeds, seed: int, number: int) -> tuple[bytes, str]:
    """An input and what it is: "blind", "aware" or "building"."""
    chance = random.Random(f"{seed}/{number}")
    good = chance.choice(seeds.finished)
    roll = chance.random()
    if roll < 0.1:
        return chance.choice(BLIND)(seeds.building, chance), "building"
    if roll < 0.4:
        return chance.choice(BLIND)(good, chance), "blind"
    if roll < 0.45:  # a defect of the corpus, changed once more
        malformed = REFUSED[chance.choice(_SMALL_DEFECTS)].build(good)
        return (chance.choice(BLIND)(malformed, chance) if len(malformed) > 8 else malformed), "aware"
    changed = good
    for _ in range(chance.choice((1, 1, 2))):
        try:
            changed = chance.choice(AWARE)(changed, chance)
        except Exception:  # what was changed first can't be taken apart any more
            break
    return changed, "aware"


_SMALL_DEFECTS = sorted(
    name
    for name in REFUSED
    if not any(word in name for word in ("mib", "too_long", "arrays_4097", "depth", "deep", "digits"))
)


def read_everything(path: Path, number: int) -> bool:
    """Open a store and read all there is, in one of the ways there are; returns whether it verifies."""
    access, verify = (("map", None), ("pread", None), ("map", "touch"), ("pread", "touch"))[number % 4]
    with ups_store.open(path, access=access, verify=verify) as store:  # type: ignore[arg-type]
        _ = repr(store), store.attrs, store.fingerprint
        for work in (
            lambda: store.constants,
            lambda: store.sample(len(store) - 1) if len(store) else None,
            lambda: store.gather([0, min(len(store), NUM_SAMPLES) - 1]) if len(store) else None,
            lambda: store.gather([0], start=1, length=1) if len(store) else None,
            lambda: [store[name].tobytes() for name in store.arrays if store[name].size < 1 << 20],
        ):
            with suppress(ups_store.StoreError):
                work()
        return store.verify(num_threads=1).ok


class Fuzzer(ABC):
    """One process's share.

    Attributes:
        outcome: What was found so far.
    """

    def __init__(self) -> None:
        self.outcome = Outcome()

    def try_input(self, number: int) -> None:
        """Make one input and read it."""
        read = self.prepare(number)
        started = time.process_time()
        try:
            read()
        except (ups_store.StoreError, UpsError) as error:
            self.outcome.kinds[error.kind] += 1
            str(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.outcome.failures[number] = f"{type(error).__name__}: {error}"[:300]
        seconds = time.process_time() - started
        if seconds > MAX_SECONDS:
            self.outcome.failures[number] = f"took {seconds:.2f} s"
        self.outcome.max_seconds = max(self.outcome.max_seconds, seconds)
        self.outcome.num_inputs += 1

    @abstractmethod
    def prepare(self, number: int) -> Callable[[], None]:
        """Make an input; returns what reads it."""

    def close(self) -> None:
        """End what was begun, and note the largest memory."""
        self.outcome.peak_memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class StoreFuzzer(Fuzzer):
    """Stores, finished and under construction."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._seeds = make_seeds(folder)
        self._fd = os.memfd_create("fuzz")
        file = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        self._paths = {suffix: folder / f"input.zarr.zip{suffix}" for suffix in ("", ".building")}
        for link in self._paths.values():
            link.symlink_to(file)

    def prepare(self, number: int) -> Callable[[], None]:
        """Put an input into the file in memory."""
        content, what = make_input(self._seeds, self._seed, number)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, content, 0)
        return lambda: self._read(number, what, is_changed=content not in self._seeds.finished)

    def _read(self, number: int, what: str, *, is_changed: bool) -> None:
        if what == "building" or number % 16 == 0:
            examine(self._paths[".building" if what == "building" else ""])
        if what == "building":
            with ups_store.open(self._paths[".building"], partial=True, verify="touch") as store:
                self.outcome.num_opened += 1
                if store.committed[:1].any():
                    store.gather([0])
            return
        is_sound = read_everything(self._paths[""], number)
        self.outcome.num_opened += 1
        self.outcome.num_sound += is_sound
        if what == "blind" and is_sound and is_changed:
            raise AssertionError("a changed byte was not noticed")

    def close(self) -> None:
        """Close the file in memory."""
        super().close()
        for link in self._paths.values():
            link.unlink()
        os.close(self._fd)


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
    from tools.fuzz_inputs import InputFuzzer

    return InputFuzzer(kind, folder, seed)


def input_maker(kind: str, folder: Path) -> Callable[[int, int], tuple[Any, ...]]:
    """Gives the bytes of an input, and more, by seed and number."""
    if kind == STORE:
        return functools.partial(make_input, make_seeds(folder))
    from tools.fuzz_inputs import KINDS

    return KINDS[kind](folder).make_input


def fuzz(
    folder: Path, numbers: range, *, seed: int, kind: str = STORE, current: Synchronized[int] | None = None
) -> Outcome:
    """Try inputs in this process.

    Args:
        folder: An empty folder, for seeds.
        numbers: Numbers of the inputs.
        seed: Of all of them.
        kind: Which files: "store", or one of `fuzz_inputs.KINDS`.
        current: Told the number of the input that is being tried, in case the process dies of it.
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


def main(
    inputs: Annotated[int, typer.Option(help="how many inputs to try")] = 1_000_000,
    *,
    kind: Annotated[str, typer.Option(help="store, hdf5, yaml, pt or safetensors")] = STORE,
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
        with tempfile.TemporaryDirectory() as folder:
            make = input_maker(kind, Path(folder))
            for number in outcome.failures:
                (keep / f"{kind}-{seed}-{number}").write_bytes(make(seed, number)[0])
    print(json.dumps(vars(outcome), indent=2))
    raise typer.Exit(1 if outcome.failures else 0)


if __name__ == "__main__":
    typer.run(main)
