"""Write stores in every way, in processes that are interrupted, killed, or whose disk fails.

    python tools/storm.py [--trouble interrupt|kill|fail|race] [--num 1000]

After each trouble: what was committed is still there, each committed sample holds its own values, what a new
store replaces is the old one or the new one. After some troubles in a row the same call has to end well, with
every sample once, and nothing beside the store. In a `race` several processes fill a store, and one of them
gets a signal: in the end they are byte for byte the undisturbed one. Only public names are used, and calls of
`os` fail: the storm doesn't know how a store is written. Results go to docs/results/reliability.md.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import numpy as np
import typer

import ups_store

N, OLD = 40, 7  # samples of the store, and of one that it replaces
IDENTITY = {"name": "storm"}
BUFFER_BYTES = 40_000  # of ten samples
Done = Callable[[list[int]], None]  # told which samples are committed
WAYS: dict[str, Callable[[Path, Done], Any]] = {}
TROUBLES = ("interrupt", "kill", "fail")
FILE_CHANGES = ["pwrite", "fsync", "fdatasync", "ftruncate", "posix_fallocate", "copy_file_range"]
CHANGES = [*FILE_CHANGES, "rename", "link", "unlink", "mkdir", "rmdir", "chmod"]
READS = ["pread", "preadv", "open", "fstat", "fstatvfs"]
MAX_IN_A_ROW = 3
FINISHED, INTERRUPTED, TYPED, OTHER = 0, 130, 3, 4  # exit codes


@dataclass
class Outcome:
    """What a storm did and found."""

    num_troubles: int = 0  # interrupts, kills or failing calls that ended a call
    num_samples_checked: int = 0  # committed samples that were compared after them
    num_stores_checked: int = 0  # stores that were finished in spite of them, each compared as a whole
    num_lost: int = 0  # samples, or stores that are to be replaced, that had been committed and were gone
    num_wrong: int = 0  # samples or stores with other values, or of another number of samples
    num_blocked: int = 0  # times that the same call, undisturbed, raised an error
    num_left: int = 0  # stores beside which a file was left
    num_untyped: int = 0  # troubles that ended in another error than one of ours, or were hidden by one
    # Of a race, by name of the signal; SIGINT is Ctrl-C.
    kills_by_signal: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what was found, with what `--only` takes to see it again

    def note(self, counter: str, where: str, sentence: str) -> None:
        """Count a finding."""
        setattr(self, counter, getattr(self, counter) + 1)
        self.notes.append(f"{where}: {counter}: {sentence}")


# --- ways of writing ----------------------------------------------------------------------------------


def sample_of(i: int) -> dict[str, Any]:
    """A sample, a function of its number."""
    return {"u": np.full((30, 30), i, "f4"), "r": np.full((i % 6 + 1, 3), i, "f8"), "t": "x" * (i % 9)}


def fixed_of(i: int) -> dict[str, Any]:
    """The same where no array is ragged."""
    return {"u": np.full((30, 30), i, "f4"), "n": np.int64(i)}


class Data:
    """A data set that is asked for samples by number."""

    def __init__(self, sample: Callable[[int], dict[str, Any]]) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self._sample(i)


def specs(*, ragged: bool) -> dict[str, ups_store.ArraySpec]:
    """Specs of the samples above."""
    spec = ups_store.ArraySpec
    arrays = {"u": spec((N, 30, 30), "float32")}
    if not ragged:
        return {**arrays, "n": spec((N,), "int64")}
    rows, text = [i % 6 + 1 for i in range(N)], [i % 9 for i in range(N)]
    r = spec((N, None, 3), "float64", lengths=rows)
    t = spec((N, None), "uint8", encoding="utf-8", lengths=text)
    return {**arrays, "r": r, "t": t}


def pattern_of(path: Path) -> Path:
    """What `append` makes stores of."""
    return path.with_name("x-*.zarr.zip")


def way(function: Callable[[Path, Done], Any]) -> Callable[..., Any]:
    """Register a way of writing: given a path, and what is told which samples are committed."""
    WAYS[function.__name__] = function
    return function


def write(path: Path, samples: Any = None, **options: Any) -> None:
    """`ups_store.write` with a small buffer."""
    options = {"identity": IDENTITY, "buffer_bytes": BUFFER_BYTES, "progress": False, **options}
    ups_store.write(path, samples, **options).close()


@way
def of_list(path: Path, done: Done) -> None:
    write(path, Data(sample_of))


@way
def of_iterable(path: Path, done: Done) -> None:
    write(path, map(sample_of, range(N)))


@way
def of_dataset(path: Path, done: Done) -> None:
    write(path, Data(fixed_of))


@way
def of_arrays(path: Path, done: Done) -> None:
    samples = [fixed_of(i) for i in range(N)]
    write(path, {name: np.stack([sample[name] for sample in samples]) for name in samples[0]})


def pair(i: int) -> Iterator[dict[str, Any]]:
    """What `write(map=...)` calls."""
    yield sample_of(2 * i)
    yield sample_of(2 * i + 1)


@way
def of_map(path: Path, done: Done) -> None:
    write(path, map=pair, inputs=range(N // 2), num_workers=0)


@way
def batched(path: Path, done: Done) -> None:
    with ups_store.create(path, specs(ragged=True), identity=IDENTITY) as writer:
        with writer.batched(buffer_bytes=BUFFER_BYTES, save_every_s=1e9) as batch:
            for i in writer.missing().tolist():
                done(batch.commit(i, sample_of(i)).tolist())
            done(batch.flush().tolist())
        writer.finish()


@way
def commits(path: Path, done: Done) -> None:
    with ups_store.create(path, specs(ragged=False), identity=IDENTITY) as writer:
        missing = writer.missing().tolist()
        for i in missing[::2]:
            writer.commit(i, fixed_of(i))
            done([i])
        for first in range(1, len(missing), 8):
            block = missing[first : first + 8 : 2]
            samples = [fixed_of(i) for i in block]
            writer.commit_many(block, {name: np.stack([s[name] for s in samples]) for name in samples[0]})
            done(block)
        writer.finish()


@way
def append(path: Path, done: Done) -> None:
    options: dict[str, Any] = {"identity": IDENTITY, "buffer_bytes": BUFFER_BYTES, "progress": False}
    for key, samples in (("first", range(N // 2)), ("second", range(N // 2, N))):
        ups_store.append(pattern_of(path), map(sample_of, samples), key=key, **options).close()


@way
def save(path: Path, done: Done) -> None:
    samples = [sample_of(i) for i in range(N)]
    ups_store.save(
        path, u=np.stack([s["u"] for s in samples]), r=[s["r"] for s in samples], t=[s["t"] for s in samples]
    )


@way
def cached(path: Path, done: Done) -> None:
    options = {"buffer_bytes": BUFFER_BYTES, "progress": False}
    ups_store.cached(path, IDENTITY, lambda: map(sample_of, range(N)), **options).close()


REPLACING = ("save", "cached")  # ways that replace a store


# --- trouble ------------------------------------------------------------------------------------------


class Hail:
    """Trouble at a moment of a call, in the process that makes it; counts the moments where it is never."""

    def __init__(self, trouble: str, moment: int, chance: random.Random) -> None:
        self.trouble, self.moment, self.chance, self.num = trouble, moment, chance, 0

    def begin(self) -> None:
        """From now on there may be trouble."""
        if self.trouble == "interrupt":
            sys.settrace(self._trace)
            return
        for name in CHANGES + (READS if self.trouble == "fail" else []):
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def end(self) -> None:
        """From now on there is none."""
        sys.settrace(None)
        self.moment = -1

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Raise what Python raises for Ctrl-C before a line of the package is run."""
        if "/ups_store/" not in frame.f_code.co_filename or frame.f_code.co_name == "__del__":
            return None  # what is raised in `__del__` is dropped by Python
        if event in ("line", "call"):
            self.num += 1
            if self.num == self.moment:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.moment < 0:
                return real(*args, **options)
            self.num += 1
            if self.num != self.moment:
                return real(*args, **options)
            if self.trouble == "fail":
                code = self.chance.choice([errno.EIO, errno.ENOSPC]) if name in CHANGES else errno.EIO
                raise OSError(code, os.strerror(code))
            torn = self.chance.random()
            if name == "pwrite" and torn < 0.5:
                real(args[0], args[1][: int(len(args[1]) * torn)], args[2])
            elif torn < 0.75:
                real(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        return call


Timer = tuple[Any, float]  # handler of SIGALRM, and seconds until it comes


def run_in_child(name: str, path: Path, hail: Hail | None, timer: Timer | None) -> tuple[int, str, list[int]]:
    """Write in another process; how it ended, what it said, and which samples it was told are committed."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        os._exit(_child(name, path, hail, timer, writing))
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().decode().splitlines(keepends=True)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    committed, said = list[int](), ""
    for line in lines:
        if line.startswith("[") and line.endswith("\n"):  # one that a kill cut was never acknowledged
            committed += json.loads(line)
        elif line.startswith("#"):
            said = line[1:].strip()
    return status, said, committed


def _child(name: str, path: Path, hail: Hail | None, timer: Timer | None, writing: int) -> int:
    real_write, code, said = os.write, FINISHED, ""

    def done(samples: list[int]) -> None:
        real_write(writing, f"{json.dumps(samples)}\n".encode())

    try:
        warnings.simplefilter("ignore")
        if timer:
            signal.signal(signal.SIGALRM, timer[0])
            signal.setitimer(signal.ITIMER_REAL, timer[1])
        if hail:
            hail.begin()
        WAYS[name](path, done)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except ups_store.StoreError as error:
        code, said = TYPED, f"{type(error).__name__} {error.kind}: {error}"
    except BaseException as error:
        code, said = OTHER, f"{type(error).__name__}: {error} {traceback.format_exc()[-1500:]!r}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    if hail:
        hail.end()
        if hail.moment == -1 and not said:
            said = str(hail.num)
    real_write(writing, ("#" + said.replace("\n", " ") + "\n").encode())
    return code


# --- checks -------------------------------------------------------------------------------------------


def numbers_of(store: Any, *, samples: list[int]) -> list[int]:
    """The numbers of the samples that a store holds, -1 for one that isn't any whole sample."""
    got = store.gather(samples)
    numbers = []
    for row in range(len(samples)):
        number = int(got["u"][row].flat[0])
        wanted = sample_of(number) if "t" in got else fixed_of(number)
        same = all(np.array_equal(np.asarray(got[key][row]), np.asarray(wanted[key])) for key in wanted)
        numbers.append(number if same else -1)
    return numbers


def check(name: str, path: Path, expected: set[int], outcome: Outcome, where: str) -> set[int]:
    """Compare what is left with what was committed before; the samples that are committed now."""
    there: list[tuple[int, int]] = []  # number that a sample should have, number that it has
    replaced, finished = False, sorted(path.parent.glob("x*.zarr.zip"))
    for place in finished:
        with ups_store.open(place) as store:
            replaced = store.attrs.get("old", False)
            if not replaced:
                there += enumerate(numbers_of(store, samples=list(range(len(store)))), len(there))
            elif [int(n) for n in store["old"]] != list(range(OLD)):
                outcome.note("num_wrong", where, "the store that is to be replaced has changed")
    if name in REPLACING and not finished:
        outcome.note("num_lost", where, "the store that is to be replaced is gone")
    for building in path.parent.glob("x*.building"):
        first = N // 2 if name == "append" and len(there) >= N // 2 else 0
        is_left = name == "append" and building.with_suffix("").exists()  # beside the store made of it
        with ups_store.open(building, partial=True) as store:
            committed = np.flatnonzero(store.committed).tolist()
            found = numbers_of(store, samples=committed)
            there += [] if is_left else zip([first + i for i in committed], found, strict=True)
    wrong = sorted({number for number, found in there if number != found})
    if wrong:
        outcome.note("num_wrong", where, f"samples {wrong} are others: {there}")
    committed = {number for number, _ in there}
    if name == "of_map" and not finished:  # samples behind the last note are made again
        committed &= set(range(num_noted(path)))
    lost = expected - committed
    if lost:
        outcome.note("num_lost", where, f"samples {sorted(lost)} are gone, {sorted(committed)} are there")
    outcome.num_samples_checked += len(there)
    return committed


def num_noted(path: Path) -> int:
    """Count the samples of inputs that the spool of a mapped call notes as done."""
    notes = path.with_name(f"{path.name}.building.notes")
    lines = notes.read_bytes().split(b"\n")[:-1] if notes.exists() else []  # a kill may have cut the last
    return max((int(re.findall(rb'"num_samples": ?(\d+)', line)[0]) for line in lines), default=0)


def check_end(name: str, path: Path, outcome: Outcome, where: str) -> None:
    """Compare the store that the same call, undisturbed, has made."""
    place = pattern_of(path) if name == "append" else path
    with ups_store.open(place) as store:
        found = numbers_of(store, samples=list(range(len(store)))) if "u" in store.metas else []
        if found != list(range(N)) or not store.verify().ok:
            outcome.note("num_wrong", where, f"the store holds {found}")
    outcome.num_stores_checked += 1
    made = {"x-00000.zarr.zip", "x-00001.zarr.zip"} if name == "append" else {path.name}
    left = {str(p.relative_to(path.parent)) for p in path.parent.rglob("*")} - made
    if left:
        outcome.note("num_left", where, f"{sorted(left)}")


def moments_of(folder: Path, name: str, trouble: str) -> int:
    """How many moments an undisturbed call has."""
    path = begin(folder, name)
    status, said, _ = run_in_child(name, path, Hail(trouble, 0, random.Random()), None)
    assert status == FINISHED, said
    return int(said)


def begin(folder: Path, name: str) -> Path:
    """A new folder, with a store that is to be replaced where the way replaces one."""
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).mkdir()
    path = folder / name / "x.zarr.zip"
    if name in REPLACING:
        ups_store.save(path, old=np.arange(OLD), attrs={"old": True})
    return path


def chain(
    folder: Path, name: str, trouble: str, number: int, seed: int, moments: int, outcome: Outcome
) -> None:
    """Troubles in a row on one store, and then the same call undisturbed."""
    chance, where = random.Random(f"{seed}/{trouble}/{name}/{number}"), f"{trouble}/{name}/{number}"
    path = begin(folder, name)
    committed = set[int]()
    for _ in range(chance.randint(1, MAX_IN_A_ROW)):
        hail, timer = Hail(trouble, chance.randint(1, moments), chance), None
        if trouble != "fail" and chance.random() < 0.3:
            handler = signal.default_int_handler if trouble == "interrupt" else signal.SIG_DFL
            hail, timer = None, (handler, chance.uniform(0.0005, 0.05))
        status, said, acknowledged = run_in_child(name, path, hail, timer)
        if status == FINISHED:
            break
        outcome.num_troubles += 1
        if status == OTHER or (trouble != "fail" and status == TYPED):
            outcome.note("num_untyped", where, said)
        committed = check(name, path, committed | set(acknowledged), outcome, where)
    status, said, _ = run_in_child(name, path, None, None)
    if status != FINISHED:
        outcome.note("num_blocked", where, said)
        return
    check_end(name, path, outcome, where)


def storm(
    folder: Path, *, trouble: str, num_troubles: int, seed: int, ways: list[str], state: Path | None = None
) -> tuple[int, Outcome]:
    """Make trouble `num_troubles` times, spread over the ways; seed and outcome.

    Goes on where the file `state` says that it was, with the seed that it had.
    """
    outcome, number = Outcome(), 0
    if state and state.exists():
        saved = json.loads(state.read_text())
        outcome, number, seed = Outcome(**saved["outcome"]), saved["number"], saved["seed"]
    for name in ways:  # once here, so that no child imports anything
        WAYS[name](begin(folder, name), lambda samples: None)
    moments = {name: moments_of(folder, name, trouble) for name in ways}
    done = f"from {outcome.num_troubles} of {num_troubles}"
    print(f"{trouble}: seed {seed}, {done}", file=sys.stderr, flush=True)
    while outcome.num_troubles < num_troubles:
        name = ways[number % len(ways)]
        chain(folder, name, trouble, number, seed, moments[name], outcome)
        number += 1
        if state:
            saved = {"outcome": asdict(outcome), "number": number, "seed": seed}
            state.with_suffix(".new").write_text(json.dumps(saved))
            state.with_suffix(".new").replace(state)  # in one step
    return seed, outcome


# --- several processes that commit to one store -------------------------------------------------------

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL)  # in turn
RACERS_ARRAYS = {
    "fields": ups_store.ArraySpec((N, 40, 512), "float32"),
    "label": ups_store.ArraySpec((N, 5), "int16"),
    "nu": ups_store.ArraySpec((N,), "float64"),
}
MAX_BATCH, MAX_BUFFER_BYTES = 6, 330_000  # of four samples
DELAYS = 1.5  # signals come at most so many times later than a build takes on this machine now
FORK = multiprocessing.get_context("fork")  # an imported interpreter: a round costs milliseconds


def batch_of(samples: list[int]) -> dict[str, np.ndarray]:
    """Arrays of samples with slots, a function of their numbers."""
    numbers, grid = np.asarray(samples), np.arange(40 * 512, dtype="float32").reshape(40, 512)
    return {
        "fields": (grid + 1000 * numbers[:, None, None]).astype("float32"),
        "label": (np.arange(5) + numbers[:, None]).astype("int16"),
        "nu": numbers * 0.5,
    }


def commit_missing(path: Path, rank: int, seed: float, acknowledge: Connection | None) -> None:
    """One process: commits random batches of what is missing; the first one also finishes."""
    chance, code = random.Random(seed), FINISHED
    opened = ups_store.create if rank == 0 else ups_store.join
    options: dict[str, Any] = {"identity": IDENTITY, **({"arrays": RACERS_ARRAYS} if rank == 0 else {})}
    done = acknowledge.send if acknowledge else lambda samples: None
    try:
        # A shell has its background jobs ignore Ctrl-C, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with opened(path, **options) as writer:
            missing = writer.missing().tolist()
            chance.shuffle(missing)
            while missing:
                size = chance.randint(1, MAX_BATCH)
                batch, missing = missing[:size], missing[size:]
                values = batch_of(batch)
                if chance.random() < 0.5:
                    writer.commit_many(batch, values)
                else:
                    with writer.batched(buffer_bytes=chance.randint(1, MAX_BUFFER_BYTES)) as one_at_a_time:
                        for i, sample in enumerate(batch):
                            arrays = {name: value[i] for name, value in values.items()}
                            done(one_at_a_time.commit(sample, arrays).tolist())
                done(batch)
            if rank == 0:
                writer.finish()
    except ups_store.StoreError:
        code = TYPED  # another process was first
    except KeyboardInterrupt:
        code = INTERRUPTED
    if acknowledge:
        os._exit(code)


def start_racers(path: Path, num: int, chance: random.Random) -> list[tuple[Any, Connection]]:
    """Start processes that commit to one store, each with the end of a pipe that says what it committed."""
    racers = []
    for rank in range(num):
        receiving, sending = FORK.Pipe(duplex=False)
        racer = FORK.Process(target=commit_missing, args=(path, rank, chance.random(), sending), daemon=True)
        racer.start()
        sending.close()
        racers.append((racer, receiving))
    return racers


def race(folder: Path, *, num_kills: int, num_committers: int, seed: int) -> Outcome:
    """Send signals to one of several committers until `num_kills` of them have ended one."""
    chance, outcome, committed = random.Random(seed), Outcome(), set[int]()
    expected, timed, path = (folder / f"{name}.zarr.zip" for name in ("expected", "timed", "race"))
    commit_missing(expected, 0, 0.5, None)
    began = time.monotonic()
    for racer, _ in start_racers(timed, num_committers, chance):
        racer.join()
    max_delay_s = DELAYS * (time.monotonic() - began)
    kills = Counter({number.name: 0 for number in SIGNALS})
    while outcome.num_troubles < num_kills:
        number = SIGNALS[outcome.num_troubles % len(SIGNALS)]
        racers = start_racers(path, num_committers, chance)
        time.sleep(chance.uniform(0, max_delay_s))
        victim = chance.choice(racers)[0]
        is_alive = victim.is_alive()
        if is_alive and victim.pid:  # not waited for before the join below, so the number is still its own
            os.kill(victim.pid, number)
        for racer, _ in racers:
            if racer is not victim:
                racer.join(timeout=chance.uniform(0, max_delay_s))
                racer.kill()
            racer.join()
        for _, pipe in racers:
            try:
                while True:
                    committed.update(pipe.recv())
            except (EOFError, OSError):  # a message cut by the kill was never acknowledged
                pipe.close()
        if is_alive and victim.exitcode in (-number, INTERRUPTED):  # it may have ended before the signal came
            kills[number.name] += 1
            outcome.num_troubles += 1
        check_race(path, expected, committed, outcome)
    commit_missing(path, 0, 0.5, None)
    check_race(path, expected, committed, outcome)
    outcome.kills_by_signal = dict(kills)
    return outcome


def check_race(path: Path, expected: Path, committed: set[int], outcome: Outcome) -> None:
    """Compare what is left with what was acknowledged; a finished store is removed to begin again."""
    building, where = path.with_name(path.name + ".building"), f"race {outcome.num_troubles}"
    if building.exists():
        with ups_store.open(building, partial=True) as store:
            samples = np.flatnonzero(store.committed).tolist()
            if lost := committed - set(samples):
                outcome.note("num_lost", where, f"samples {sorted(lost)} are gone")
            got, known = store.gather(samples), batch_of(samples)
            for i, sample in enumerate(samples):
                if any(got[name][i].tobytes() != known[name][i].tobytes() for name in known):
                    outcome.note("num_wrong", where, f"sample {sample} is another")
            outcome.num_samples_checked += len(samples)
        return
    if not path.exists() and committed:
        outcome.note("num_lost", where, f"samples {sorted(committed)} are gone")
    if path.exists():
        outcome.num_stores_checked += 1
        if path.read_bytes() != expected.read_bytes():
            outcome.note("num_wrong", where, "the finished store has other bytes")
        path.unlink()
    committed.clear()


def main(
    troubles: Annotated[
        list[str] | None, typer.Option("--trouble", help=f"{', '.join(TROUBLES)}, race")
    ] = None,
    num: Annotated[int, typer.Option(help="of each trouble")] = 1000,
    seed: Annotated[int | None, typer.Option(help="of the moments; any by default")] = None,
    ways: Annotated[list[str] | None, typer.Option("--way", help=f"some of {', '.join(WAYS)}; all")] = None,
    committers: Annotated[list[int] | None, typer.Option(help="processes of a race; 1 and 3")] = None,
    only: Annotated[str | None, typer.Option(help="TROUBLE/WAY/NUMBER of a note, to see it again")] = None,
    folder: Annotated[Path | None, typer.Option(help="where to write; a temporary folder by default")] = None,
    state: Annotated[Path | None, typer.Option(help="folder of what was done, to go on there")] = None,
) -> None:
    """Run the storm and print what it found as JSON; exit code 1 if anything was found."""
    warnings.simplefilter("ignore")
    results, seed = {}, random.SystemRandom().randrange(1 << 31) if seed is None else seed
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if only:
            trouble, name, number = only.split("/")
            results[only] = (seed, Outcome())
            WAYS[name](begin(Path(place), name), lambda samples: None)
            moments = moments_of(Path(place), name, trouble)
            chain(Path(place), name, trouble, int(number), seed, moments, results[only][1])
        for trouble in [] if only else troubles or [*TROUBLES, "race"]:
            if trouble == "race":
                for count in committers or [1, 3]:
                    inner = Path(place) / f"race-{count}"
                    inner.mkdir()
                    outcome = race(inner, num_kills=num, num_committers=count, seed=seed)
                    results[inner.name] = (seed, outcome)
                continue
            kept, chosen = state / f"{trouble}-{num}.json" if state else None, ways or list(WAYS)
            options: dict[str, Any] = {"num_troubles": num, "seed": seed, "ways": chosen, "state": kept}
            results[trouble] = storm(Path(place), trouble=trouble, **options)
    shown = {key: {"seed": used, **asdict(each)} for key, (used, each) in results.items()}
    print(json.dumps(shown, indent=2))
    raise typer.Exit(int(any(each.notes for _, each in results.values())))


if __name__ == "__main__":
    typer.run(main)
