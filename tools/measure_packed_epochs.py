"""Measure what packed stores save on the disk and cost in an epoch; the table of docs/results/packing.md.

    python -m tools.measure_packed_epochs cache/*_train.zarr.zip

Each store's samples are repeated up to `--mb`: a codec sees one sample at a time. Epochs of a packed store
and of the mapped one take turns, both in the page cache; ratios are medians of pairs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ups_store
from benchmarks.harness.measure import Comparison, compare, timed
from ups_store.packed.pack import pack_store
from ups_store.read.base import AnyStore
from ups_store.read.chunked import KEPT_BYTES, SHARED
from ups_store.torch import StoreDataset, Window, make_loader

CODECS = ("blosc", "pcodec")
WINDOW = Window(horizon=1)


def repeated(path: Path, target: Path, nbytes: int) -> Path:
    """A store of a store's samples, as often as it takes."""
    with ups_store.open(path) as store:
        num = max(1, -(-nbytes // (store.nbytes // len(store))))
        specs = {
            name: ups_store.ArraySpec((num, *spec.shape[1:]), spec.dtype, dims=spec.dims)
            for name, spec in store.arrays.items()
        }
        options: dict[str, Any] = {"constants": store.constants, "identity": {"repeats": path.name}}
        options["dims"] = {name: store.dims[name] for name in store.constants}
        with ups_store.create(target, specs, **options, durability="lazy") as writer:
            for first in range(0, num, 64):
                numbers = np.arange(first, min(first + 64, num))
                writer.commit_many(numbers, store.gather(numbers % len(store)))
            return writer.finish()


def epoch_of(store: AnyStore, *, window: Window | None, shuffle: Any, num_workers: int) -> Any:
    """A function that takes one epoch of the store, in batches of 32 or less."""
    dataset = StoreDataset(store, window=window)
    size = min(32, -(-len(dataset) // 16))
    loader = make_loader(
        dataset, batch_size=size, shuffle=shuffle, num_workers=num_workers, across_epochs=False
    )

    def epoch(i: int) -> None:
        num = sum(len(batch["index"]) for batch in loader)
        assert num == len(dataset)

    return epoch


def rows_of(path: Path, folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Table rows of one store."""
    mapped_path = repeated(path, folder / path.name, int(arguments.mb * 1e6))
    with ups_store.open(mapped_path) as mapped:
        state = "latent" if "latent" in mapped else "fields"
        spec = mapped.arrays[state]
        what = f"{path.name.split('_')[0]} {state} {spec.dtype} {tuple(spec.shape[1:])}"
        has_windows = spec.shape[1] > 1 and (spec.dims or ())[1:2] == ("time",)
        for codec in CODECS:
            began = time.perf_counter()
            packed_path = pack_store(mapped, folder / f"{codec}.zip", codec=codec, force=True).path
            packing_s = time.perf_counter() - began
            with ups_store.open(packed_path) as packed:
                cells = [f"{mapped.nbytes / packed.nbytes:.2f}", f"{mapped.nbytes / packing_s / 1e6:,.0f}"]
                for window, shuffle in ((None, True), (WINDOW, "block"), (WINDOW, True)):
                    if window is not None and not has_windows:
                        cells.append("-")
                        continue
                    found = against(packed, mapped, window, shuffle, arguments)
                    cells.append(shown(found))
                packed.preload("copy")
                window = WINDOW if has_windows else None
                cells.append(shown(against(packed, mapped, window, True, arguments)))
            yield f"| {what} | {codec} | " + " | ".join(cells) + " |"


def against(
    packed: AnyStore, mapped: AnyStore, window: Window | None, shuffle: Any, arguments: argparse.Namespace
) -> Comparison:
    options: dict[str, Any] = {"window": window, "shuffle": shuffle, "num_workers": arguments.num_workers}
    # Of a full shuffle of a store much larger than what is kept, next to nothing is found there again.
    SHARED.limit = 0 if shuffle is True else KEPT_BYTES
    ours, reference = epoch_of(packed, **options), epoch_of(mapped, **options)
    return compare(timed(ours), timed(reference), pairs=arguments.pairs)


def shown(found: Comparison) -> str:
    low, high = found.quartiles
    return f"{found.time_ratio:.1f} ({low:.1f}-{high:.1f}; {found.ours_s:.2f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", type=Path, nargs="+", help="mapped stores, of fields or of latents")
    parser.add_argument("--mb", type=float, default=64.0, help="size that samples are repeated to")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=2)
    arguments = parser.parse_args()
    print(f"{ups_store.num_cores()} processors, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(
        "| store | codec | times smaller | pack MB/s | samples | windows, block | windows, full shuffle "
        "| after preload |"
    )
    print("|---" * 8 + "|")
    for path in arguments.stores:
        with tempfile.TemporaryDirectory(dir=os.environ.get("UPS_BENCH_DIR")) as folder:
            for row in rows_of(path, Path(folder), arguments):
                print(row, flush=True)


if __name__ == "__main__":
    main()
