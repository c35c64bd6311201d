"""How much memory 8 processes take that read the same samples: each page counts once, however many map it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import Peer

NUM_PROCESSES = 8
_WAIT_S = 120
_AT_ONCE = 8  # samples: a batch's own memory is every process's


def pss_over_payload(peer: Peer) -> float:
    """Memory that 8 processes add by opening and reading everything, over the samples' bytes.

    Proportional set size (proc(5)): what several processes share is divided among them. What a process had
    before it opened the samples is taken off.
    """
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(NUM_PROCESSES), context.Queue()
    readers = [context.Process(target=_read, args=(peer, barrier, found)) for _ in range(NUM_PROCESSES)]
    for reader in readers:
        reader.start()
    added = [found.get(timeout=_WAIT_S) for _ in readers]
    for reader in readers:
        reader.join()
    if None in added:
        raise RuntimeError("a reading process failed")
    return float(sum(added)) / peer.samples.nbytes


def _read(peer: Peer, barrier: Barrier, found: Any) -> None:
    added = None
    try:
        barrier.wait(_WAIT_S)  # all are there
        before = _pss_bytes()
        barrier.wait(_WAIT_S)  # no process has read anything yet
        peer.open()
        for first in range(0, peer.samples.num, _AT_ONCE):
            peer.batch(np.arange(first, min(first + _AT_ONCE, peer.samples.num)))
        barrier.wait(_WAIT_S)  # all hold everything
        added = _pss_bytes() - before
        barrier.wait(_WAIT_S)  # no process has let go
    finally:
        found.put(added)


def _pss_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
