"""Build real stores in processes that are killed at random moments, again and again, and check what is left.

After every kill: each sample whose commit had returned is committed, each committed sample holds its own
bytes, and a store that was published is byte for byte the undisturbed one. Results go to
docs/results/reliability.md.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

import ups_store

N = 48
IDENTITY = {"name": "kill storm"}
ARRAYS = {
    "fields": ups_store.ArraySpec((N, 40, 512), "float32"),
    "label": ups_store.ArraySpec((N, 5), "int16"),
    "nu": ups_store.ArraySpec((N,), "float64"),
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL)  # in turn
MAX_BATCH, MAX_BUFFER_BYTES = 6, 330_000  # of four samples
INTERRUPTED, TOO_LATE = 130, 3  # exit codes: by Ctrl-C; because another process was first
DELAYS = 1.5  # signals come at most so many times later than a build takes on this machine now

_CONTEXT = multiprocessing.get_context("fork")  # an imported interpreter: a round costs milliseconds


@dataclass
class Outcome:
    """What a storm did and found.

    Attributes:
        num_committers: Processes that commit at once; the first of them also finishes.
        num_kills: Processes that were ended by a signal while they worked.
        num_builds: Stores that were finished in spite of it, each compared byte for byte.
        num_samples_checked: Committed samples that were read and compared after kills.
        num_lost: Samples whose commit had returned and that were gone.
        num_wrong: Samples or files with a wrong byte.
        kills_by_signal: Kills by name of the signal; SIGINT is Ctrl-C.
        seconds: How long it took.
    """

    num_committers: int
    num_kills: int = 0
    num_builds: int = 0
    num_samples_checked: int = 0
    num_lost: int = 0
    num_wrong: int = 0
    kills_by_signal: dict[str, int] | None = None
    seconds: float = 0.0


def values_of(samples: list[int]) -> dict[str, np.ndarray]:
    """The arrays of samples, a function of their numbers."""
    numbers = np.asarray(samples)
    grid = np.arange(40 * 512, dtype="float32").reshape(40, 512)
    return {
        "fields": (grid[None] + 1000 * numbers[:, None, None]).astype("float32"),
        "label": (np.arange(5) + numbers[:, None]).astype("int16"),
        "nu": numbers * 0.5,
    }


def storm(folder: Path, *, num_kills: int, num_committers: int, seed: int) -> Outcome:
    """Kill builders `num_kills` times; see `Outcome`."""
    chance, outcome, started = random.Random(seed), Outcome(num_committers), time.monotonic()
    expected = _undisturbed(folder / "expected.zarr.zip")
    max_delay_s = DELAYS * _seconds_of_a_build(folder / "measured.zarr.zip", num_committers)
    path, acknowledged = folder / "storm.zarr.zip", set[int]()
    kills = Counter({number.name: 0 for number in SIGNALS})
    for i in track(range(num_kills), f"{num_committers} committing", disable=not sys.stderr.isatty()):
        number, was_ended = SIGNALS[i % len(SIGNALS)], False
        while not was_ended:  # the signal may come when all have ended
            was_ended = _round(path, num_committers, number, chance, acknowledged, max_delay_s)
            _check(path, expected, acknowledged, outcome)
        kills[number.name] += 1
    _work_undisturbed(path)
    _check(path, expected, acknowledged, outcome)
    outcome.num_kills, outcome.kills_by_signal = num_kills, dict(kills)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def _undisturbed(path: Path) -> bytes:
    with ups_store.create(path, ARRAYS, identity=IDENTITY) as writer:
        writer.commit_many(range(N), values_of(list(range(N))))
        writer.finish()
    return path.read_bytes()


def _seconds_of_a_build(path: Path, num_committers: int) -> float:
    started = time.monotonic()
    workers = [_start(path, rank, seed=0.5)[0] for rank in range(num_committers)]
    for worker in workers:
        worker.join()
    return time.monotonic() - started


def _work_undisturbed(path: Path) -> None:
    with ups_store.create(path, ARRAYS, identity=IDENTITY) as writer:
        missing = writer.missing().tolist()
        writer.commit_many(missing, values_of(missing))
        writer.finish()


def _start(path: Path, rank: int, *, seed: float) -> tuple[multiprocessing.Process, Connection]:
    receiving, sending = _CONTEXT.Pipe(duplex=False)
    worker = _CONTEXT.Process(target=_work, args=(path, rank, seed, sending), daemon=True)
    worker.start()
    sending.close()
    return worker, receiving


def _round(
    path: Path,
    num_committers: int,
    number: signal.Signals,
    chance: random.Random,
    acknowledged: set[int],
    max_delay_s: float,
) -> bool:
    """Start the committers, send one signal, end the rest; whether the signal is what ended somebody."""
    started = [_start(path, rank, seed=chance.random()) for rank in range(num_committers)]
    workers, pipes = [worker for worker, _ in started], [pipe for _, pipe in started]
    time.sleep(chance.uniform(0, max_delay_s))
    victim = chance.choice(workers)
    was_alive = victim.is_alive()
    if was_alive and victim.pid:  # not waited for before the join below, so the number is still its own
        os.kill(victim.pid, number)
    for worker in workers:
        if worker is not victim:
            worker.join(timeout=chance.uniform(0, max_delay_s))
            worker.kill()
        worker.join()
    for pipe in pipes:
        _drain(pipe, acknowledged)
    return was_alive and victim.exitcode in (-number, INTERRUPTED)


def _drain(pipe: Connection, acknowledged: set[int]) -> None:
    try:
        while True:
            acknowledged.update(pipe.recv())
    except (EOFError, OSError):  # a message cut by the kill was never acknowledged
        pipe.close()


def _work(path: Path, rank: int, seed: float, acknowledge: Connection) -> None:
    """One process: commits random batches of what is missing; the first one also finishes."""
    chance = random.Random(seed)
    try:
        # A shell has its background jobs ignore Ctrl-C, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if rank == 0:
            with ups_store.create(path, ARRAYS, identity=IDENTITY) as writer:
                _commit_missing(writer, chance, acknowledge)
                writer.finish()
        else:
            with ups_store.join(path, identity=IDENTITY) as committer:
                _commit_missing(committer, chance, acknowledge)
    except ups_store.StoreError:
        os._exit(TOO_LATE)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    os._exit(0)


def _commit_missing(writer: ups_store.Committer, chance: random.Random, acknowledge: Connection) -> None:
    missing = writer.missing().tolist()
    chance.shuffle(missing)
    while missing:
        size = chance.randint(1, MAX_BATCH)
        batch, missing = missing[:size], missing[size:]
        values = values_of(batch)
        if chance.random() < 0.5:
            writer.commit_many(batch, values)
            acknowledge.send(batch)
            continue
        with writer.batched(buffer_bytes=chance.randint(1, MAX_BUFFER_BYTES)) as one_at_a_time:
            for i, sample in enumerate(batch):
                arrays = {name: value[i] for name, value in values.items()}
                acknowledge.send(one_at_a_time.commit(sample, arrays).tolist())
        acknowledge.send(batch)


def _check(path: Path, expected: bytes, acknowledged: set[int], outcome: Outcome) -> None:
    """Compare what is left with what was acknowledged; a finished store is removed to begin again."""
    building = path.with_name(path.name + ".building")
    if not building.exists():
        if path.exists():
            outcome.num_builds += 1
            outcome.num_wrong += path.read_bytes() != expected
            path.unlink()
        else:
            outcome.num_lost += len(acknowledged)
        acknowledged.clear()
        return
    with ups_store.open(building, partial=True) as store:
        there = np.flatnonzero(store.committed).tolist()
        outcome.num_lost += len(acknowledged - set(there))
        found, wanted = store.gather(there), values_of(there)
        for i in range(len(there)):
            outcome.num_wrong += any(found[name][i].tobytes() != wanted[name][i].tobytes() for name in wanted)
        outcome.num_samples_checked += len(there)


def main(
    kills: Annotated[int, typer.Option(help="kills per number of committers")] = 1000,
    committers: Annotated[list[int] | None, typer.Option(help="numbers of committing processes")] = None,
    seed: Annotated[int, typer.Option(help="of the moments and signals")] = 0,
    folder: Annotated[Path | None, typer.Option(help="where to build; a temporary folder by default")] = None,
) -> None:
    """Run the storm and print what it found as JSON; exit code 1 if anything was lost or wrong."""
    results = []
    for num in committers or [1, 3]:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            results.append(storm(Path(place), num_kills=kills, num_committers=num, seed=seed))
    print(json.dumps([asdict(result) for result in results], indent=2))
    raise typer.Exit(int(any(result.num_lost or result.num_wrong for result in results)))


if __name__ == "__main__":
    typer.run(main)
