"""A store that is cut before any one of the calls by which it is read, each time in a process of its own.

Run as a program, as a process that has threads can't be forked safely, and a signal has to be seen.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ups_store
from ups_store.read.verify import verify_file
from ups_store.system import files, memory

CALLS = {
    files: ("open_existing", "duplicate", "size", "mode", "read_at", "read_into", "is_file_at"),
    memory: ("map_private", "mapped_file_nbytes"),
}
Outcome = str  # "data", "StoreError", or what went wrong
WORKS: dict[str, Callable[[ups_store.Store], Any]] = {
    "gather": lambda store: store.gather([0, 3, 1]),
    "window": lambda store: store.gather([3, 0], ["fields"], start=1, length=2),
    "sample": lambda store: store.sample(3),
    "constants": lambda store: dict(store.constants),
}


def outcomes(path: Path, access: str, works: list[str], num_lengths: int) -> dict[str, Outcome]:
    """What comes of every work, cut before every call, to some lengths; the file is made whole each time."""
    content, found = path.read_bytes(), {}
    spread = np.linspace(0, len(content) - 1, num_lengths).astype(int).tolist()
    lengths = spread if num_lengths > 1 else [len(content) // 2]
    for work in works:
        for length in lengths:
            number, is_cut = 0, True
            while is_cut:
                path.write_bytes(content)
                outcome, is_cut = _in_child(path, access, work, number, length)
                if is_cut:
                    found[f"{work}, call {number}, cut to {length}"] = outcome
                number += 1
    return found


def _in_child(path: Path, access: str, work: str, number: int, length: int) -> tuple[Outcome, bool]:
    """What came of it, and whether there was a call of this number."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reads)
        os.write(writes, _outcome(path, access, work, number, length).encode()[:4000])
        os._exit(0)
    os.close(writes)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reads) as pipe:
        outcome = pipe.read()
    if os.WIFSIGNALED(status):
        outcome = signal.Signals(os.WTERMSIG(status)).name
    return outcome, path.stat().st_size == length


def _outcome(path: Path, access: str, work: str, number: int, length: int) -> Outcome:
    try:
        return _done(path, access, work, lambda: _cut_before(path, number, length))
    except ups_store.StoreError as error:
        return "StoreError" if str(error) else "no sentence"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _done(path: Path, access: str, work: str, begin: Callable[[], None]) -> Outcome:
    options: Any = {"access": access}
    if work in WORKS:
        with ups_store.open(path, **options) as store:
            expected = {name: np.array(value) for name, value in WORKS[work](store).items()}
            begin()
            found = WORKS[work](store)
            same = all(np.array(found[name]).tobytes() == expected[name].tobytes() for name in expected)
        return "data" if same and found.keys() == expected.keys() else "wrong data"
    if work == "open":
        begin()
        with ups_store.open(path, **options) as store:
            return "data" if len(store) == 4 else "wrong data"
    begin()
    report = verify_file(path, num_threads=1)
    return "data" if report.ok or path.stat().st_size < report.nbytes else "wrong report"


def _cut_before(path: Path, number: int, length: int) -> None:
    """Have the file cut before a call; it isn't the readers' descriptor that cuts it."""
    num_calls = 0

    def hooked(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        if num_calls == number:
            os.truncate(path, length)
        num_calls += 1
        return call(*arguments, **options)

    for module, names in CALLS.items():
        for name in names:
            setattr(module, name, functools.partial(hooked, getattr(module, name)))


if __name__ == "__main__":
    file, how, chosen, num = sys.argv[1:]
    print(json.dumps(outcomes(Path(file), how, chosen.split(","), int(num))))
