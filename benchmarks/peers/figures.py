"""What is measured of one peer at one size, in a process of its own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from benchmarks.harness.inputs import Memory, check
from benchmarks.harness.measure import compare, timed
from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Samples

WINDOW = 2  # frames
NUM_WINDOWS = 64
_PAIRS_S = 1.0  # of pairs with memcpy
_EPOCHS_S = 0.5
_PAGE_CACHE = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Figures:
    """Figures of one peer at one size; None where there is none, for the reason in `notes`.

    Attributes:
        write_mb_per_s: Payload over the time to write and sync it.
        num_files: Files it takes.
        size_over_payload: Bytes of them over the samples' bytes.
        open_ms: From the path to the first sample, everything in the page cache.
        batch_over_memcpy: Time of a random batch over one memcpy of as many bytes.
        windows_over_memcpy: The same for 64 windows of 2 frames.
        epoch: Samples a second of a shuffled epoch, everything in the page cache.
        epoch_2_workers: The same with a DataLoader's 2 worker processes, started before.
        cold_epoch: The same as `epoch`, from opening on, with nothing in the page cache.
        pss_over_payload: Memory of 8 processes that hold or map all of it, over the samples' bytes.
        preload_s: Seconds from a cold file to everything in memory.
        notes: What was left out, and why.
    """

    write_mb_per_s: float | None = None
    num_files: int | None = None
    size_over_payload: float | None = None
    open_ms: float | None = None
    batch_over_memcpy: float | None = None
    windows_over_memcpy: float | None = None
    epoch: float | None = None
    epoch_2_workers: float | None = None
    cold_epoch: float | None = None
    pss_over_payload: float | None = None
    preload_s: float | None = None
    notes: tuple[str, ...] = ()


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


def random_access(peer: Peer) -> Figures:
    """Batches and windows over memcpy; everything is in the page cache, as check_values read it."""
    samples, rng = peer.samples, np.random.default_rng(0)
    batches = rng.integers(0, samples.num, (64, samples.batch))
    starts = rng.integers(0, samples.frames - WINDOW + 1, (64, NUM_WINDOWS))
    of_windows = rng.integers(0, samples.num, (64, NUM_WINDOWS))
    return Figures(
        batch_over_memcpy=_over_memcpy(
            samples, samples.batch * samples.sample_bytes, lambda i: peer.batch(batches[i % 64])
        ),
        windows_over_memcpy=_over_memcpy(
            samples,
            NUM_WINDOWS * WINDOW * samples.width * 4,
            lambda i: peer.windows(of_windows[i % 64], starts[i % 64], WINDOW),
        ),
    )


def _over_memcpy(samples: Samples, nbytes: int, function: Callable[[int], object]) -> float:
    call = timed(function)
    once = min(call(i) for i in range(2))
    pairs = max(3, min(101, int(_PAIRS_S / max(once, 1e-6))))
    memory = Memory(samples.nbytes, nbytes)
    return compare(call, timed(memory.copy), pairs=pairs, nbytes=nbytes).time_ratio


def open_ms(peer: Peer) -> float:
    """Median of three; the first sample stands for lazy opening."""

    def first_sample(_: int) -> None:
        peer.open()
        peer.sample(0)

    seconds = []
    for i in range(3):
        seconds.append(timed(first_sample)(i))
        peer.close()
    return 1e3 * float(np.median(seconds))


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


def drop_page_cache() -> None:
    """Drop what the page cache holds of any file; PermissionError unless root."""
    gc.collect()  # what is mapped stays
    os.sync()
    _PAGE_CACHE.write_text("3")


def _run(loader: object) -> tuple[int, float]:
    began, num = time.perf_counter(), 0
    for batch in loader:  # type: ignore[attr-defined]
        assert isinstance(batch, Tensor)
        num += 1
    return num, time.perf_counter() - began


def merged(parts: list[Figures]) -> Figures:
    """One of several, each with other figures."""
    together = Figures()
    for part in parts:
        found = {name: value for name, value in vars(part).items() if value is not None and name != "notes"}
        together = replace(together, **found, notes=together.notes + part.notes)
    return together
