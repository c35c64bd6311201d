"""`python -m benchmarks.peers.one_line`: samples of a generator into a file, each library's shortest way.

Lines, samples a second, and what a kill in the middle leaves: how many samples can be read afterwards, and
how many the same call takes when it is run again. Run it with the Python of benchmarks/peers/env.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness.report import RESULTS, describe, write_docs
from benchmarks.peers.isolated import FailedError, isolated

NUM = 4096
WIDTH = 25_600  # float32: 100 KB a sample, 420 MB in all
KILLED_AT = 3 * NUM // 4
_PROCESS_S = 300
_ROOT = Path(__file__).resolve().parents[2]
_PAGE = _ROOT / "docs" / "results" / "performance.md"
BEGIN, END = "<!-- one line: written by benchmarks/peers/one_line.py -->\n", "<!-- end of one line -->"


class Source:
    """A generator of samples, and a data set, that counts them, and can kill its process in the middle.

    Args:
        count: A file that has a byte for every sample that was taken.
        kill: Whether to kill the process where sample `KILLED_AT` is asked for.
    """

    def __init__(self, count: Path, *, kill: bool) -> None:
        self._count, self._kill = count, kill

    def __call__(self) -> Iterator[dict[str, Any]]:
        for i in range(NUM):
            yield self.sample(i)

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.sample(i)

    def sample(self, i: int) -> dict[str, Any]:
        """Sample i: its number in every value."""
        if self._kill and i == KILLED_AT:
            os.killpg(0, signal.SIGKILL)
        with self._count.open("ab") as file:
            file.write(b".")
        return {"x": np.full(WIDTH, i, np.float32)}


def write_ups_store(samples: Source, folder: Path) -> None:
    import ups_store

    ups_store.write(folder / "a.zarr.zip", samples(), identity={"version": 1})


def read_ups_store(folder: Path) -> int:
    import ups_store

    return len(ups_store.open(folder / "a.zarr.zip", partial=True))


def write_ups_store_by_number(samples: Source, folder: Path) -> None:
    import ups_store

    ups_store.write(folder / "a.zarr.zip", samples, identity={"version": 1})


def read_building(folder: Path) -> int:
    (path,) = [each for each in folder.iterdir() if each.name.endswith(".building")]
    command = [sys.executable, "-m", "ups_store", "info", str(path), "--json"]
    return int(json.loads(subprocess.check_output(command))["build"]["num_committed"])


def write_numpy(samples: Source, folder: Path) -> None:
    np.save(folder / "a.npy", np.stack([sample["x"] for sample in samples()]))


def read_numpy(folder: Path) -> int:
    return len(np.load(folder / "a.npy", mmap_mode="r"))


def write_hugging_face(samples: Source, folder: Path) -> None:
    import datasets

    datasets.Dataset.from_generator(samples, cache_dir=str(folder)).save_to_disk(str(folder / "a"))


def read_hugging_face(folder: Path) -> int:
    import datasets

    return len(datasets.load_from_disk(str(folder / "a")))


def write_litdata(samples: Source, folder: Path) -> None:
    import litdata

    litdata.optimize(samples.sample, list(range(NUM)), str(folder / "a"), num_workers=1, chunk_bytes="64MB")


def read_litdata(folder: Path) -> int:
    import litdata

    return len(litdata.StreamingDataset(str(folder / "a")))


def write_tensordict(samples: Source, folder: Path) -> None:
    import torch
    from tensordict import TensorDict

    torch.stack([TensorDict({"x": sample["x"]}) for sample in samples()]).memmap(folder / "a")


def read_tensordict(folder: Path) -> int:
    from tensordict import TensorDict

    return len(TensorDict.load_memmap(folder / "a"))


def write_zarr(samples: Source, folder: Path) -> None:
    import zarr

    zarr.save(str(folder / "a.zarr"), x=np.stack([sample["x"] for sample in samples()]))


def read_zarr(folder: Path) -> int:
    import zarr

    return int(zarr.open_group(str(folder / "a.zarr"), mode="r")["x"].shape[0])


# Name, package, and how it writes and reads.
WAYS: dict[str, tuple[str, Callable[[Source, Path], None], Callable[[Path], int]]] = {
    "`ups_store.write`": ("ups-store", write_ups_store, read_ups_store),
    "`ups_store.write` of a data set": ("ups-store", write_ups_store_by_number, read_building),
    "`np.save`": ("numpy", write_numpy, read_numpy),
    "`datasets.Dataset.from_generator`": ("datasets", write_hugging_face, read_hugging_face),
    "`litdata.optimize`": ("litdata", write_litdata, read_litdata),
    "`tensordict` `memmap`": ("tensordict", write_tensordict, read_tensordict),
    "`zarr.save`": ("zarr", write_zarr, read_zarr),
}


@dataclass(frozen=True)
class Outcome:
    """What was found of one way."""

    name: str  # of the way
    version: str  # of its package
    lines: int = 0  # statements of its function, imports left out
    # Samples, without syncing: the median of three runs, each in a process of its own.
    per_second: float | None = None
    synced_per_second: float | None = None  # the same, the files synced afterwards
    left: int | None = None  # samples that could be read after the kill; None if nothing could be opened
    taken_again: int | None = None  # samples that the same call took when it was run again
    reason: str = ""  # why there are no figures


def main(
    docs: Annotated[
        bool, typer.Option("--docs", help="write the table into docs/results/performance.md")
    ] = False,
) -> None:
    """Measure all ways in turns, print the table and write JSON."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    reasons: dict[str, str] = {}
    for _ in range(3):
        for name in WAYS:
            if name not in reasons:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        runs[name].append(isolated(_time, name, Path(folder), timeout_s=_PROCESS_S))
                    except FailedError as error:
                        reasons[name] = str(error)[:160]
    outcomes = [_outcome(name, runs[name], reasons.get(name, "")) for name in WAYS]
    about = describe()
    text = markdown(outcomes, about)
    print(text)
    path = RESULTS / f"{about['date']}-one-line.json"
    path.write_text(json.dumps({**about, "ways": [asdict(each) for each in outcomes]}, indent=1) + "\n")
    if docs:
        write_docs(_PAGE, text, begin=BEGIN, end=END)


def markdown(outcomes: list[Outcome], about: dict[str, Any]) -> str:
    """The table, with the machine above it."""
    of = about["machine"]
    lines = [
        f"{about['date']}: {of['cpu']}, {of['cores']} cores, {of['file_system']}; {NUM:,} samples of 100 KB, "
        f"killed where sample {KILLED_AT:,} is asked for.",
        "",
        "| | version | lines | samples/s | samples/s, synced | readable after the kill | taken again |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for each in outcomes:
        rates = [f"{rate:,.0f}" if rate else "–" for rate in (each.per_second, each.synced_per_second)]
        left = "nothing" if not each.left else f"{each.left:,}"
        again = "–" if each.taken_again is None else f"{each.taken_again:,}"
        cells = [each.name, each.version, str(each.lines), *rates, left, again]
        lines.append(
            "| " + " | ".join(cells if not each.reason else [each.name, each.reason, *["–"] * 5]) + " |"
        )
    return "\n".join(lines) + "\n"


def _outcome(name: str, runs: list[tuple[float, float]], reason: str) -> Outcome:
    package, write, read = WAYS[name]
    if reason:
        return Outcome(name, "", reason=reason)
    left, taken = None, None
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with contextlib.suppress(FailedError):
            isolated(lambda: _time(name, folder, kill=True), timeout_s=_PROCESS_S)
            raise AssertionError("it is killed")
        with contextlib.suppress(FailedError):
            left = isolated(read, folder, timeout_s=_PROCESS_S)
        (folder / "count").unlink(missing_ok=True)
        with contextlib.suppress(FailedError):
            isolated(_time, name, folder, timeout_s=_PROCESS_S)
            taken = (folder / "count").stat().st_size
    seconds, synced_s = map(statistics.median, zip(*runs, strict=True))
    lines, found = _num_lines(write), version(package)
    return Outcome(name, found, lines, NUM / seconds, NUM / synced_s, left, taken)


def _num_lines(write: Callable[[Source, Path], None]) -> int:
    """Statements of a function, imports left out."""
    body = ast.parse(inspect.getsource(write)).body[0]
    assert isinstance(body, ast.FunctionDef)
    return sum(not isinstance(each, ast.Import | ast.ImportFrom) for each in body.body)


def _time(name: str, folder: Path, *, kill: bool = False) -> tuple[float, float]:
    """Seconds to write, and to write and sync."""
    began = time.perf_counter()
    WAYS[name][1](Source(folder / "count", kill=kill), folder)
    written = time.perf_counter()
    os.sync()
    return written - began, time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
