"""`python -m benchmarks.store.large`: stores of millions of samples, and of a terabyte; many readers at once.

Large stores are sparse: their first samples are real, the others are holes, recorded as committed. So
opening, orders, batches and memory are those of the whole store, and only what was written can be checked.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import typer
from rich.console import Console

import ups_store
from benchmarks.harness import machine
from benchmarks.harness.inputs import NAME, Folder, check, make_store, values_of
from benchmarks.harness.memory import own_bytes, pss_bytes
from benchmarks.harness.report import write_docs
from benchmarks.harness.scale import MIB
from ups_store import ArraySpec
from ups_store.format.build_tail import pack_records
from ups_store.read.order import DataOrder
from ups_store.writing import commit

BEGIN, END = "<!-- large: written by benchmarks/store/large.py -->\n", "<!-- end of large -->"
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "performance.md"
BATCH, NUM_REAL, NUM_CHECKED, NUM_BATCHES = 64, 4096, 1024, 64
STORES = ((10_000, 4096), (1_000_000, 4096), (10_000_000, 4096), (10_000_000, 102_400))
ORDERS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
READERS = (1, 2, 8, 32)
_SHARED = {"num_samples": 2560, "sample_bytes": 102_400}  # what many processes read
_SPAWN = multiprocessing.get_context("spawn")

console = Console(stderr=True)


def main(
    docs: Annotated[bool, typer.Option("--docs", help="write the tables into the page")] = False,
) -> None:
    """Measure, and print three tables."""
    with Folder() as name:
        folder = Path(name)
        about = machine.describe(folder)
        lines = [
            f"{time.strftime('%Y-%m-%d', time.gmtime())}: {about['cpu']}, {about['cores']} cores, "
            f"{about['caches']}, {about['memory_gib']} GiB, {about['file_system']}, load {about['load']}.",
            "",
            *_table_of_stores(folder),
            "",
            *_table_of_orders(),
            "",
            *_table_of_readers(folder),
        ]
    text = "\n".join(lines) + "\n"
    Console().print(text, markup=False, soft_wrap=True)
    if docs:
        write_docs(_PAGE, text, begin=BEGIN, end=END)


def make_sparse(path: Path, num_samples: int, sample_bytes: int) -> None:
    """A store of that many samples, of which the first `NUM_REAL` take room on the disk."""
    spec = ArraySpec((num_samples, sample_bytes // 4), "float32", dims=("sample", "x"))
    samples, made_for = np.arange(min(NUM_REAL, num_samples)), {"made_for": "a benchmark"}
    with (
        mock.patch("ups_store.system.files.allocate", os.ftruncate),
        ups_store.create(path, {NAME: spec}, identity=made_for, durability="lazy") as writer,
    ):
        writer.commit_many(samples, {NAME: values_of(samples, sample_bytes)})
        for first in range(len(samples), num_samples, MIB):
            holes = np.arange(first, min(first + MIB, num_samples))
            crcs = np.zeros((len(holes), 1), np.uint32)
            commit.write_records(writer.building, holes, pack_records(writer.building.header, holes, crcs))
        writer.finish()


def _table_of_stores(folder: Path) -> Iterator[str]:
    yield (
        f"| samples | bytes each | file | open, ms | first batch of {BATCH}, ms "
        f"| each of the next {NUM_BATCHES}, ms | {NUM_CHECKED:,} samples checked at first use, ms "
        "| memory added, MB |"
    )
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for num_samples, sample_bytes in STORES:
        path = folder / "large.zarr.zip"
        console.log("makes", f"{num_samples:,} samples of {sample_bytes:,} bytes")
        make_sparse(path, num_samples, sample_bytes)
        found = _in_a_process(_use, path, sample_bytes)
        size = path.stat().st_size / 1e9
        numbers = " | ".join(f"{value:.3g}" for value in found)
        yield f"| {num_samples:,} | {sample_bytes:,} | {size:,.3g} GB | {numbers} |"
        path.unlink()


def _use(path: Path, sample_bytes: int) -> tuple[float, ...]:
    """Milliseconds to open, of the first batch, of a later one, of checked samples; MB of memory."""
    with ups_store.open(path) as store:  # imports, and the pages that any opening reads
        store.gather(np.arange(BATCH))
    rng = np.random.default_rng(0)
    before = own_bytes()
    store, open_s = _timed(lambda: ups_store.open(path))
    order = DataOrder([len(store)], global_batch_size=BATCH, shuffle=True, drop_last=True)
    steps = iter(order.steps())
    batch, first_s = _timed(lambda: store.gather(next(steps).items))
    out = {NAME: batch[NAME]}
    _, batches_s = _timed(lambda: [store.gather(step.items, out=out) for step in islice(steps, NUM_BATCHES)])
    added = own_bytes() - before
    chosen = rng.choice(min(NUM_REAL, len(store)), NUM_CHECKED, replace=False)
    with ups_store.open(path, verify="touch") as checked:
        found, check_s = _timed(lambda: checked.gather(chosen))
    check(found[NAME], values_of(chosen, sample_bytes))
    store.close()
    return 1e3 * open_s, 1e3 * first_s, 1e3 * batches_s / NUM_BATCHES, 1e3 * check_s, added / 1e6


def _table_of_orders() -> Iterator[str]:
    yield "| samples in a shuffled epoch | to the first batch, ms | each later batch, µs | memory added, MB |"
    yield "|---:|---:|---:|---:|"
    for num in ORDERS:
        first_s, later_s, added = _in_a_process(_order, num)
        yield f"| {num:,} | {1e3 * first_s:.3g} | {1e6 * later_s:.3g} | {added / 1e6:.2g} |"


def _order(num: int) -> tuple[float, float, int]:
    list(DataOrder([1000], global_batch_size=BATCH, shuffle=True).steps())
    before = own_bytes()
    order = DataOrder([num], global_batch_size=BATCH, shuffle=True)
    steps = iter(order.steps())
    _, first_s = _timed(lambda: next(steps))
    num_later = min(2048, num // BATCH - 1)
    _, later_s = _timed(lambda: sum(len(step.items) for step in islice(steps, num_later)))
    return first_s, later_s / num_later, own_bytes() - before


def _table_of_readers(folder: Path) -> Iterator[str]:
    path = folder / "shared.zarr.zip"
    make_store(path, **_SHARED).close()
    yield "| processes that read one store of 262 MB | GB/s together | PSS of its mappings, over the store |"
    yield "|---:|---:|---:|"
    for num in READERS:
        barrier, pipes = _SPAWN.Barrier(num), [_SPAWN.Pipe() for _ in range(num)]
        readers = [_SPAWN.Process(target=_read, args=(path, barrier, there)) for _, there in pipes]
        for reader in readers:
            reader.start()
        found = [here.recv() for here, _ in pipes]
        for reader in readers:
            reader.join()
        seconds, nbytes = max(one[1] for one in found) - min(one[0] for one in found), path.stat().st_size
        yield f"| {num} | {num * nbytes / seconds / 1e9:.3g} | {sum(one[2] for one in found) / nbytes:.3g} |"


def _read(path: Path, barrier: Barrier, answers: Connection) -> None:
    with ups_store.open(path) as store:
        batches = np.random.default_rng(os.getpid()).permutation(len(store)).reshape(-1, BATCH)
        out = store.gather(batches[0])
        barrier.wait()
        began = time.monotonic()
        for batch in batches:
            store.gather(batch, out=out)
        ended = time.monotonic()
        barrier.wait()
        answers.send((began, ended, pss_bytes(path)))
        barrier.wait()  # none leaves before all were counted


def _in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with _SPAWN.Pool(1) as pool:
        return pool.apply(function, arguments)


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    found = function()
    return found, time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
