"""The verb `demo`: data, stores, checks, speed, autoencoder, latents, operator, baselines, report.

Every step is a command that you could type yourself, and is shown before it runs. With data of your own the
demo ends with the stores.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups_store.console import PrintableConsole, format_nbytes

if TYPE_CHECKING:
    import ups_store

TASK = "burgers1d"
NUM_SAMPLES = 400
NUM_ROUNDS = 200
BATCH = 64
SMALL_NBYTES = 16 << 20  # of a batch: below, a copy takes milliseconds, as other processes' turns do

CONFIG = Path("demo")  # as shipped
CONFIGURED_OUT = Path("demo")  # what the configuration's folders are in
UPS, STORE = [sys.executable, "-m", "ups"], [sys.executable, "-m", "ups_store"]
_SHOWN = {tuple(UPS): "ups", tuple(STORE): "ups-store"}
# With --quick: enough of everything to see that it works.
QUICK_SAMPLES = 40
QUICK = {"operator": {"epochs": 1, "budget": {"flops": 1e10}}}

console = PrintableConsole()


def demo(
    *,
    out: Annotated[
        Path | None, typer.Option(help="folder for everything that the demo makes [default: demo]")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="folder with PDEBench files of the task")] = None,
    task: Annotated[str, typer.Option(help="task to build, if you bring your own data")] = TASK,
    report: Annotated[Path | None, typer.Option(help="folder of the report [default: reports/demo]")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="a minute, in demo/quick: shows that it works, trains nothing well"),
    ] = False,
) -> None:
    """Make data, build and read stores, train an autoencoder and an operator, and report on them."""
    out = out or (CONFIGURED_OUT / "quick" if quick else CONFIGURED_OUT)
    report = report or Path("reports") / ("demo-quick" if quick else "demo")
    out.mkdir(parents=True, exist_ok=True)
    if data is not None:
        places = ["--cache-dir", str(out / "cache"), "--manifest", str(out / "manifest.json")]
        build = [*STORE, "build", "--tasks", task, "--root", str(data), *places]
        _show_stores(out, build, task=task, root=data)
        _title("Next")
        _show_next(out, out / "cache" / f"{task}_train.zarr.zip", task)
        return
    config = _configuration(out, quick=quick)
    seconds, samples = {"data": 0.0}, QUICK_SAMPLES if quick else NUM_SAMPLES
    if not list((out / "data").glob("*.hdf5")):
        _title(f"Solve the Burgers equation for {samples} initial conditions, in PDEBench's layout")
        seconds["data"] = _run(_ups("make-data", TASK, "--out", out / "data", "--samples", samples))
    build = [*STORE, "build", "--config", str(config)]
    fields = [*build, "--manifest", str(out / "manifest.json"), "latent.encoder=none"]
    seconds["field stores"] = _show_stores(out, fields, task=TASK, root=out / "data")
    unasked = ("--skip-validation", "--skip-data-check", "--skip-dry-run", "--skip-small-eval")
    run = _ups("run", config, f"pipeline.report_dir={report}", *unasked)
    _title("Make an autoencoder, stores of its latents, and an operator that advances them")
    _run([*run, "--skip-full-eval"])
    _title("Train FNO and U-Net on the fields, with as many operations as the operator took")
    _run(_ups("train-baselines", "--config", config))
    _title("The same run goes on: all of them on the development split, and promotion")
    phases = [word for name, value in seconds.items() for word in ("--phase", f"{name}={value:.1f}")]
    _run([*run, *phases])
    _title("Next")
    _show_next(out, out / "cache" / f"{TASK}_train.zarr.zip", TASK, report=report, config=config)


def _show_stores(out: Path, build: list[str], *, task: str, root: Path) -> float:
    """Build the field stores, and everything that can be seen of them; returns the seconds of the build."""
    _title("Build one store per split")
    seconds = _run(build)
    _title("Again: nothing to do")
    _run(build)
    stores = sorted((out / "cache").glob(f"{task}_*.zarr.zip"))
    train = next((path for path in stores if path.name.endswith("_train.zarr.zip")), stores[0])
    _title("Verify every byte")
    _run([*STORE, "verify", *map(str, stores)])
    _title("Open it with zarr-python: nothing of ours is needed to read it")
    _open_with_zarr(train)
    _title(f"Read speed: {BATCH} random samples a batch, warm page cache, one thread")
    _show_speed(train, root)
    _title("A picture")
    _run([*STORE, "preview", str(train), "--out", str(out / "preview.png")])
    return seconds


def _configuration(out: Path, *, quick: bool) -> Path:
    """The demo's configuration; one that includes it where folders or lengths are others."""
    if out == CONFIGURED_OUT and not quick:
        return CONFIG
    import yaml

    own = {
        "include": str(CONFIG),
        "data": {"root": str(out / "data")},
        "cache": {"dir": str(out / "cache")},
        "training": {"latent_cache_dir": str(out / "latents")},
        "checkpoint": {"dir": str(out / "checkpoints")},
        "stages": QUICK if quick else {},
    }
    path = out / "run.yaml"
    path.write_text(yaml.safe_dump(own, sort_keys=False), encoding="utf-8")
    return path


def _ups(verb: str, *arguments: object) -> list[str]:
    return [*UPS, verb, *map(str, arguments)]


def _show_next(
    out: Path, train: Path, task: str, *, report: Path | None = None, config: Path = CONFIG
) -> None:
    """What to type now; lines to copy, so nothing is wrapped."""
    lines = {
        "look at": report / "report.html" if report else out / "preview.png",
        "inspect": f"ups-store info {shlex.quote(str(train))}",
        "compare": f"ups compare --config {shlex.quote(str(config))}" if report else None,
        "your data": f"ups-store build --tasks {task} --root FOLDER-WITH-PDEBENCH-FILES",
    }
    text = "\n".join(f"{name:<12}{line}" for name, line in lines.items() if line is not None)
    console.print(text, soft_wrap=True)


def _open_with_zarr(path: Path) -> None:
    import numpy as np
    import zarr

    import ups_store

    with zarr.storage.ZipStore(path, mode="r") as archive:
        group = zarr.open_group(archive, mode="r")
        console.print(group.tree())
        fields: Any = group["fields"]
        theirs = fields[-1]
    with ups_store.open(path) as store:
        same = np.array_equal(theirs, store["fields"][-1])
    console.print(f"last sample equal to ours: {same}")
    if not same:
        raise SystemExit(1)


def _show_speed(path: Path, root: Path) -> None:
    import numpy as np
    from rich.table import Table

    import ups_store

    with ups_store.open(path) as store:
        order = np.random.default_rng(0).integers(0, len(store), (NUM_ROUNDS, BATCH))
        batch = store.gather(order[0], ["fields"])
        nbytes = batch["fields"].nbytes
        block = np.ones(max(4 * nbytes, store["fields"].nbytes), np.uint8)
        copy = np.empty(nbytes, np.uint8)
        starts = np.random.default_rng(1).integers(0, len(block) - nbytes, NUM_ROUNDS)
        seconds = {
            "memcpy of as many contiguous bytes": _seconds(
                lambda i: np.copyto(copy, block[starts[i] : starts[i] + nbytes]), NUM_ROUNDS
            ),
            "store.gather, reused buffer": _seconds(
                lambda i: store.gather(order[i], ["fields"], out=batch), NUM_ROUNDS
            ),
        }
        rates = {name: (nbytes, value) for name, value in seconds.items()}
        if source := _hdf5_seconds(store, root):
            rates["the HDF5 file it came from, whole samples, h5py"] = source
    table = Table("reading through", "GB/s", "samples/s")
    for name, (read_nbytes, value) in rates.items():
        table.add_row(name, f"{read_nbytes / value / 1e9:.2f}", f"{BATCH / value:,.0f}")
    console.print(table)
    if nbytes < SMALL_NBYTES:
        console.print(
            f"A batch has {format_nbytes(nbytes)}, so these numbers are noisy: run it again to see how much. "
            "Measured tables are in docs/results/performance.md."
        )


def _hdf5_seconds(store: ups_store.AnyStore, root: Path) -> tuple[int, float] | None:
    """Bytes and seconds of a batch of the first source, where that is one dataset `tensor` of all samples."""
    import h5py
    import numpy as np

    name = store.identity["sources"][0]["name"]
    path = next(root.rglob(name))
    with h5py.File(path) as file:
        if "tensor" not in file:
            return None
        tensor = file["tensor"]
        order = np.random.default_rng(0).integers(0, len(tensor), (8, BATCH))
        return BATCH * tensor[0].nbytes, _seconds(lambda i: [tensor[j] for j in order[i]], len(order))


def _seconds(read: Callable[[int], object], num_rounds: int) -> float:
    """Median of the rounds."""
    from statistics import median

    seconds = []
    for i in range(num_rounds):
        started = time.perf_counter()
        read(i)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def _title(text: str) -> None:
    console.print(f"\n{text}", style="bold")


def _run(command: list[str]) -> float:
    """Show a command and run it; returns its seconds, and ends the demo where it fails."""
    shown = shlex.join([_SHOWN[tuple(command[:3])], *command[3:]])
    console.print(f"$ {shown}", style="dim", soft_wrap=True)
    started = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)
    return time.perf_counter() - started
