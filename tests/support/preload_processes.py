"""Processes that preload and read stores; spawned ones import their functions from here."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import resource
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import ups_store
from ups_store import StoreError
from ups_store.read import preload
from ups_store.system import files

MIB = 1 << 20
_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")  # of a mapping in smaps, where fields end in a colon


def digest(store: ups_store.Store) -> str:
    """Digest of every byte of the array "fields", of which nothing is copied."""
    found = hashlib.sha256()
    for sample in store["fields"]:
        found.update(sample.data)
    return found.hexdigest()


def mapped_bytes(name: str, field: str) -> int:
    """Sum of a field of /proc/self/smaps, such as "Pss", over the mappings whose line holds `name`."""
    total, is_meant = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if _HEADER.match(line):
            is_meant = name in line
        elif is_meant and line.startswith(f"{field}:"):
            total += int(line.split()[1]) * 1024
    return total


def address_space_bytes() -> int:
    """Address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def read_all(path: Path, barrier: Barrier, answers: Connection) -> None:
    """Read everything, wait until the others have, and tell this process's share of the mapping's pages."""
    with ups_store.open(path) as store:
        read = digest(store)
        barrier.wait()
        answers.send((read, mapped_bytes(path.name, "Pss"), mapped_bytes(path.name, "Private_Dirty")))
        barrier.wait()  # nobody leaves before all were counted


def own_copy(path: Path, answers: Connection) -> None:
    """Make a shared copy, hand it over, and wait to be killed."""
    store = ups_store.open(path)
    store.preload("copy", shared=True)
    answers.send((pickle.dumps(store), store._file.copy_path))
    answers.recv()


def use_copy(pickled: bytes, requests: Connection) -> None:
    """Read everything from a store that was handed over, whenever asked."""
    store = pickle.loads(pickled)
    while True:
        requests.send((store._file.is_copy, digest(store), pickle.dumps(store)))
        requests.recv()


def under_limit(
    path: Path, limit: Callable[[], None], requests: list[dict[str, Any]], answers: Connection
) -> None:
    """Open a store, take on a limit, and tell what each request to preload comes to."""
    with ups_store.open(path) as store:
        limit()
        answers.send([_attempt(store, request) for request in requests])


def _attempt(store: ups_store.Store, request: dict[str, Any]) -> tuple[Any, ...]:
    try:
        report = store.preload(**request)
    except StoreError as error:
        return type(error).__name__, error.kind, vars(error).get("needed_bytes"), str(error)
    return report.mode, report.why, digest(store)


def limit_address_space(extra_bytes: int) -> None:
    """As `ulimit -v`: so much more than now."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + extra_bytes, resource.RLIM_INFINITY))


def limit_data(extra_bytes: int) -> None:
    """As `ulimit -d`: so much more private memory than now."""
    data = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + extra_bytes, resource.RLIM_INFINITY))


def join_group(members: Path, path: Path) -> None:
    """Enter a control group by its list of members; pages of the store come into its account again."""
    members.write_text(str(os.getpid()))
    evict(path)


def evict(path: Path) -> None:
    """Have the kernel drop the file's pages that nobody maps."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_slowly(path: Path, answers: Connection) -> None:
    """Preload, each call taking long; tell when the first step is there and what Ctrl-C does then."""
    read_into = files.read_into

    def slow(fd: int, offset: int, target: memoryview) -> int:
        time.sleep(0.2)
        return read_into(fd, offset, target)

    preload.STEP_BYTES = preload.PIECE_BYTES = 4096
    files.read_into = slow
    with ups_store.open(path) as store:
        try:
            store.preload("copy", num_threads=2, progress=lambda nbytes: answers.send("a step"))
        except KeyboardInterrupt:
            answers.send("interrupted")
        answers.send((store._file.is_copy, threading.active_count(), digest(store)))
