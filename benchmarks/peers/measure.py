"""One peer at one size: every figure in a process of its own, so that one that fails leaves the others."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.inputs import Memory, check
from benchmarks.harness.measure import compare, timed
from benchmarks.peers.formats import PEERS, Peer, Samples
from benchmarks.peers.isolated import FailedError, isolated

PSS_SIZE = "100 KB"  # at the others it would say the same
WINDOW = 2  # frames
NUM_WINDOWS = 64
_PAIRS_S = 1.0  # of pairs with memcpy
_EPOCHS_S = 0.5
_PAGE_CACHE = Path("/proc/sys/vm/drop_caches")
NUM_PROCESSES = 8
_WAIT_S = 120
_AT_ONCE = 8  # samples: a batch's own memory is every process's


@dataclass(frozen=True)
class Figures:
    """Figures of one peer at one size; None where there is none, for the reason in `notes`."""

    write_mb_per_s: float | None = None  # payload over the time to write and sync it
    num_files: int | None = None
    size_over_payload: float | None = None  # bytes of them over the samples' bytes
    open_ms: float | None = None  # from the path to the first sample, everything in the page cache
    batch_over_memcpy: float | None = None  # time of a random batch over one memcpy of as many bytes
    windows_over_memcpy: float | None = None  # the same for 64 windows of 2 frames
    epoch: float | None = None  # samples a second of a shuffled epoch, everything in the page cache
    epoch_2_workers: float | None = None  # the same with a DataLoader's 2 worker processes, started before
    cold_epoch: float | None = None  # the same as `epoch`, from opening on, with nothing in the page cache
    pss_over_payload: float | None = (
        None  # memory of 8 processes that hold or map all, over the samples' bytes
    )
    preload_s: float | None = None  # seconds from a cold file to everything in memory
    notes: tuple[str, ...] = ()  # what was left out, and why


@dataclass(frozen=True)
class PeerResult:
    """A peer's row at one size; without figures it says why."""

    name: str
    size: str
    version: str
    figures: Figures | None
    reason: str = ""


def measure_peer(name: str, folder: Path, samples: Samples, timeout_s: float) -> PeerResult:
    """Everything about one peer at one size; imports it, so call it in a process that ends afterwards."""
    try:
        peer = PEERS[name](folder, samples)
        found = version(peer.package) if peer.package else ""
    except PackageNotFoundError as error:
        return PeerResult(name, samples.label, "", None, f"not installed: {error}")
    try:
        parts = [isolated(written, peer, timeout_s=timeout_s)]
        isolated(check_values, peer, timeout_s=timeout_s)
    except FailedError as error:
        return PeerResult(name, samples.label, found, None, str(error))
    for what, function in _phases(peer):
        try:
            parts.append(isolated(function, timeout_s=timeout_s))
        except FailedError as error:
            parts.append(Figures(notes=(f"{what}: {error}",)))
    return PeerResult(name, samples.label, found, merged(parts))


def _phases(peer: Peer) -> Iterator[tuple[str, Callable[[], Figures]]]:
    is_stored = any(peer.folder.iterdir())
    yield "epoch", lambda: Figures(epoch=epoch_rate(peer, num_workers=0))
    if is_stored:
        yield "2 workers", lambda: Figures(epoch_2_workers=epoch_rate(peer, num_workers=2))
    if peer.is_random:
        yield "batches", lambda: random_access(peer, is_stored=is_stored)
        if peer.samples.label == PSS_SIZE and is_stored:
            yield "8 processes", lambda: Figures(pss_over_payload=pss_over_payload(peer))
    if not is_stored:
        return
    if os.geteuid():
        yield "cold", lambda: drop_page_cache()  # which says that only root may
        return
    yield "cold epoch", lambda: Figures(cold_epoch=cold_epoch_rate(peer))
    if peer.has_preload:
        yield "preload", lambda: Figures(preload_s=preload_s(peer))


# --- figures ---------------------------------------------------------------------------------------


def written(peer: Peer) -> Figures:
    """Write the samples; what that took, and what it left."""
    samples = peer.samples
    values = samples.values(np.arange(samples.num))
    os.sync()
    began = time.perf_counter()
    peer.write(values)
    os.sync()
    seconds = time.perf_counter() - began
    files = [path for path in peer.folder.rglob("*") if path.is_file()]
    if not files:
        return Figures()
    nbytes = sum(path.stat().st_size for path in files)
    return Figures(samples.nbytes / seconds / 1e6, len(files), nbytes / samples.nbytes)


def check_values(peer: Peer) -> None:
    """Fail before anything wrong is timed."""
    peer.open()
    samples = peer.samples
    if not peer.is_random:  # the order is its own, so only which samples there are can be told
        batch = next(iter(peer.loader(0))).numpy()
        known = samples.values(np.arange(samples.num))
        firsts = {value.tobytes() for value in known[:, 0]}
        wrong = [row for row in batch if row[0].tobytes() not in firsts]
        check(np.array(len(wrong)), np.array(0))
        return
    rng = np.random.default_rng(3)
    indices = rng.choice(samples.num, samples.batch, replace=False)
    check(peer.batch(indices).numpy(), samples.values(indices))
    check(np.asarray(peer.sample(int(indices[0]))), samples.values(indices[:1])[0])
    starts = rng.integers(0, samples.frames - WINDOW + 1, len(indices))
    frames = starts[:, None] + np.arange(WINDOW)
    expected = samples.values(indices)[np.arange(len(indices))[:, None], frames]
    check(peer.windows(indices, starts, WINDOW).numpy(), expected)


def random_access(peer: Peer, *, is_stored: bool) -> Figures:
    """Batches and windows over memcpy, and opening; all is in the page cache, as check_values read it."""
    torch.set_num_threads(1)  # one memcpy is one thread too
    samples, rng = peer.samples, np.random.default_rng(0)
    batches = rng.integers(0, samples.num, (64, samples.batch))
    starts = rng.integers(0, samples.frames - WINDOW + 1, (64, NUM_WINDOWS))
    of_windows = rng.integers(0, samples.num, (64, NUM_WINDOWS))

    def over_memcpy(nbytes: int, function: Callable[[int], object]) -> float:
        call = timed(function)
        once = min(call(i) for i in range(2))
        pairs = max(3, min(101, int(_PAIRS_S / max(once, 1e-6))))
        memory = Memory(samples.nbytes, nbytes)
        return compare(call, timed(memory.copy), pairs=pairs, nbytes=nbytes).time_ratio

    def first_sample(_: int) -> None:  # which stands for lazy opening
        peer.open()
        peer.sample(0)

    peer.open()
    over = over_memcpy(samples.batch * samples.sample_bytes, lambda i: peer.batch(batches[i % 64]))
    of_frames = over_memcpy(
        NUM_WINDOWS * WINDOW * samples.width * 4,
        lambda i: peer.windows(of_windows[i % 64], starts[i % 64], WINDOW),
    )
    peer.close()
    seconds = []
    for i in range(3 if is_stored else 0):
        seconds.append(timed(first_sample)(i))
        peer.close()
    opening = 1e3 * float(np.median(seconds)) if seconds else None
    return Figures(open_ms=opening, batch_over_memcpy=over, windows_over_memcpy=of_frames)


def epoch_rate(peer: Peer, *, num_workers: int) -> float:
    """Samples a second after the first epoch, when workers have started and files are open."""
    loader = peer.loader(num_workers)
    _run(loader)
    num, seconds = 0, 0.0
    while seconds < _EPOCHS_S:  # one epoch of a fast peer takes milliseconds
        more, took = _run(loader)
        num, seconds = num + more, seconds + took
    return num * peer.samples.batch / seconds


def cold_epoch_rate(peer: Peer) -> float:
    """Samples a second in the first epoch of this process after the page cache was dropped."""
    drop_page_cache()
    began = time.perf_counter()
    num, _ = _run(peer.loader(0))
    return num * peer.samples.batch / (time.perf_counter() - began)


def preload_s(peer: Peer) -> float:
    """Seconds to open and preload, with nothing in the page cache."""
    drop_page_cache()
    began = time.perf_counter()
    peer.open()
    peer.preload()
    return time.perf_counter() - began


def drop_page_cache() -> Figures:
    """Drop what the page cache holds of any file; PermissionError unless root."""
    if os.geteuid():
        raise PermissionError("only root may drop the page cache")
    gc.collect()  # what is mapped stays
    os.sync()
    _PAGE_CACHE.write_text("3")
    return Figures()


def _run(loader: object) -> tuple[int, float]:
    began, num = time.perf_counter(), 0
    for batch in loader:  # type: ignore[attr-defined]
        assert isinstance(batch, Tensor)
        num += 1
    return num, time.perf_counter() - began


def merged(parts: list[Figures]) -> Figures:
    """One of several, each with other figures."""
    together = Figures(notes=tuple(note for part in parts for note in part.notes))
    for part in parts:
        known = {name: value for name, value in vars(part).items() if value is not None and name != "notes"}
        together = replace(together, **known)
    return together


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
