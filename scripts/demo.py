"""The demo: data -> stores -> checks -> speed -> a picture, in one small folder.

Run by `make demo`; every step is a command that you could type yourself, and is printed before it runs.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import h5py
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import ups_store
from ups_store.console import format_nbytes

TASK = "burgers1d"
NUM_SAMPLES = 400
NUM_ROUNDS = 200
BATCH = 64
SMALL_NBYTES = 16 << 20  # of a batch: below, a copy takes milliseconds, as other processes' turns do

console = Console()


def main(
    out: Annotated[Path, typer.Option(help="folder for everything that the demo makes")] = Path("demo"),
    data: Annotated[Path | None, typer.Option(help="folder with PDEBench files of the task")] = None,
    task: Annotated[str, typer.Option(help="task to build, if you bring your own data")] = TASK,
) -> None:
    """Make data, build train/val/test stores, verify them, read them, draw one sample."""
    out.mkdir(parents=True, exist_ok=True)
    root = data or _make_data(out / "data")
    cache = out / "cache"
    build = [sys.executable, "-m", "ups_store.build", "--tasks", task, "--root", str(root)]
    build += ["--cache-dir", str(cache), "--manifest", str(out / "manifest.json")]
    _title("Build one store per split")
    _run(build)
    _title("Again: nothing to do")
    _run(build)
    stores = sorted(cache.glob(f"{task}_*.zarr.zip"))
    train = next((path for path in stores if path.name.endswith("_train.zarr.zip")), stores[0])
    _title("Verify every byte")
    _run([sys.executable, "-m", "ups_store", "verify", *map(str, stores)])
    _title("Open it with zarr-python: nothing of ours is needed to read it")
    _open_with_zarr(train)
    _title(f"Read speed: {BATCH} random samples a batch, warm page cache, one thread")
    _show_speed(train, root)
    _title("A picture")
    _run([sys.executable, "-m", "ups_store", "preview", str(train), "--out", str(out / "preview.png")])
    _title("Next")
    _show_next(out, train, task)


def _show_next(out: Path, train: Path, task: str) -> None:
    """What to type now; lines to copy, so nothing is wrapped."""
    console.print(
        f"look at     {out / 'preview.png'}\n"
        f"inspect     .venv/bin/python -m ups_store info {shlex.quote(str(train))}\n"
        f"your data   make demo DATA=folder-with-PDEBench-files, or\n"
        f"            .venv/bin/python -m ups_store.build --tasks {task} --root FOLDER\n"
        f"the format  docs/format/spec.md",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _make_data(folder: Path) -> Path:
    found = list(folder.glob("*.hdf5"))
    if not found:
        _title(f"Solve the Burgers equation for {NUM_SAMPLES} initial conditions, in PDEBench's layout")
        script = Path(__file__).with_name("make_data.py")
        _run([sys.executable, str(script), TASK, "--out", str(folder), "--samples", str(NUM_SAMPLES)])
    return folder


def _open_with_zarr(path: Path) -> None:
    import zarr

    with zarr.storage.ZipStore(path, mode="r") as archive:
        group = zarr.open_group(archive, mode="r")
        console.print(group.tree())
        theirs = group["fields"][-1]
    with ups_store.open(path) as store:
        same = np.array_equal(np.asarray(theirs), store["fields"][-1])
    console.print(f"last sample equal to ours: {same}")
    if not same:
        raise SystemExit(1)


def _show_speed(path: Path, root: Path) -> None:
    with ups_store.open(path) as store:
        order = np.random.default_rng(0).integers(0, len(store), (NUM_ROUNDS, BATCH))
        batch = store.gather(order[0], ["fields"])
        nbytes = batch["fields"].nbytes
        block = np.ones(max(4 * nbytes, store["fields"].nbytes), np.uint8)
        copy = np.empty(nbytes, np.uint8)
        starts = np.random.default_rng(1).integers(0, len(block) - nbytes, NUM_ROUNDS)
        rates = {
            "memcpy of as many contiguous bytes": _rate(
                lambda i: np.copyto(copy, block[starts[i] : starts[i] + nbytes]), nbytes, NUM_ROUNDS
            ),
            "store.gather, reused buffer": _rate(
                lambda i: store.gather(order[i], ["fields"], out=batch), nbytes, NUM_ROUNDS
            ),
        }
        source = _hdf5_rate(store, root, nbytes)
    if source:
        rates["the HDF5 file it came from, h5py"] = source
    table = Table("reading through", "GB/s", "samples/s")
    for name, rate in rates.items():
        table.add_row(name, f"{rate / 1e9:.2f}", f"{rate / nbytes * BATCH:,.0f}")
    console.print(table)
    if nbytes < SMALL_NBYTES:
        console.print(
            f"A batch has {format_nbytes(nbytes)}, so these numbers are noisy: run it again to see how much. "
            "Measured tables are in docs/performance.md."
        )


def _hdf5_rate(store: ups_store.Store, root: Path, nbytes: int) -> float | None:
    """Rate for random samples of the first source, where it is one dataset `tensor` with a sample axis."""
    name = store.identity["content"]["sources"][0]["name"]
    path = next(root.rglob(name))
    with h5py.File(path) as file:
        if "tensor" not in file:
            return None
        tensor = file["tensor"]
        order = np.random.default_rng(0).integers(0, len(tensor), (8, BATCH))
        return _rate(lambda i: [tensor[j] for j in order[i]], nbytes, len(order))


def _rate(read: Callable[[int], object], nbytes: int, num_rounds: int) -> float:
    seconds = []
    for i in range(num_rounds):
        started = time.perf_counter()
        read(i)
        seconds.append(time.perf_counter() - started)
    return nbytes / float(np.median(seconds))


def _title(text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def _run(command: list[str]) -> None:
    shown = ["python" if word == sys.executable else word for word in command]
    console.print(f"$ {shlex.join(shown)}", style="dim", highlight=False, markup=False, soft_wrap=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    typer.run(main)
