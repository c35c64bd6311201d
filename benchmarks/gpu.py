"""`python -m benchmarks.gpu`: what only a card can show, in nine minutes.

Each part runs in a process of its own, hands over every number as soon as it has it, and is killed when
its time is over: what was measured until then counts, and the other parts go on. `docs/results/gpu.md` says
how to run it without a package index. `--rehearse` does the same on the CPU with tiny sizes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.build.encode import SOURCE, _Latents, make_solutions
from benchmarks.harness import machine, report
from benchmarks.harness.inputs import Folder
from benchmarks.harness.measure import RATE, Comparison, UnavailableError, compare, tracked
from benchmarks.harness.report import Result
from benchmarks.harness.run import measure
from benchmarks.peers.formats import Hdf5, Items, Peer, PtFolder, Samples
from benchmarks.train.inputs import demo
from ups.data.batches import WindowBatch, WindowSource
from ups.data.windows import Windows
from ups.train.tracking import GPU_LOAD
from ups.train.trainer import Trainer
from ups_store.torch import new_tensor

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "results" / "gpu.md"
BEGIN, END = "<!-- gpu: written by benchmarks/gpu.py -->\n", "<!-- end of gpu -->"
TOTAL_S = 540.0


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    device: str = "cuda"
    num_test_files: int | None = None  # of those with tests marked `gpu`; None for all
    num_solutions: int = 320  # 0.8 MB each, whose latents are made
    pairs: int = 2  # of builds and `.pt` folders
    readers: tuple[int, ...] = (0, 1, 4, 8)
    large: tuple[str, ...] = ("operator.width=512", "operator.depths=[10]")
    num_workers: int = 8  # of the `DataLoader` over `.pt` and HDF5 files
    warm_up: int = 20  # steps that aren't timed
    steps_s: float = 8.0  # for which steps are


CARD = Size()
REHEARSED = ("operator.width=48", "training.batch_size=8")
REHEARSAL = Size("cpu", 1, 4, 1, (0, 1), REHEARSED, 1, 1, 0.05)
size = CARD


def run_tests() -> Iterator[Result]:
    """The tests marked `gpu`, each a row with its seconds as soon as it is over."""
    import pytest

    files = sorted(path for path in (REPO / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    outcomes = _Outcomes()
    options = ["-q", "-mgpu", "--run-slow", "-pno:cacheprovider", "--continue-on-collection-errors"]
    options += ["-Wdefault", "-otimeout=60"]  # other versions there have other warnings
    pytest.main([*options, *map(str, files[: size.num_test_files])], plugins=[outcomes])
    counts = {name: outcomes.seen.count(name) for name in ("passed", "failed", "skipped")}
    title = f"tests marked `gpu` that pass; {counts['failed']} fail, {counts['skipped']} are skipped"
    yield Result("gpu.tests", title, {}, float(counts["passed"]), f"of {len(outcomes.seen)}")


class _Outcomes:
    """A plugin of pytest that hands over each test's outcome."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._take(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._take(report)

    def _take(self, report: Any) -> None:
        self.seen.append(report.outcome)
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        failure = None if report.passed else f"{report.outcome}: {reason.strip().splitlines()[-1][:200]}"
        seconds = report.duration if report.passed else None
        hand_over(Result("gpu.tests", report.nodeid, {}, seconds, "s", failure=failure))


@cache
def solutions(source: str) -> Folder:
    """A folder with the HDF5 file, made once for all numbers of readers."""
    folder, num = Folder(), size.num_solutions
    make_solutions(folder.path / SOURCE, num_samples=num, is_compressed=source == "compressed")
    return folder


class Precompute(_Latents):
    """Readers have started, files are open, and the encoder is on the card: on both sides."""

    param_names = ("source", "readers")

    def setup(self, source: str, readers: int = 0) -> None:
        self.device, self.num_readers = size.device, readers
        super().setup(source)

    def make_sources(self, source: str) -> Path:
        return solutions(source).path

    @tracked("a build of latents, over a sample at a time into .pt files", RATE)
    def rate(self, source: str, readers: int) -> Comparison:
        ours, reference = self.from_scratch(self.pipeline), self.from_scratch(self.write_pt)
        return compare(ours, reference, pairs=size.pairs)


def run_precompute() -> Iterator[Result]:
    Precompute.params = (("contiguous", "compressed"), size.readers)
    return measure(Precompute, "gpu.Precompute", ["rate"])


LARGE = "20 M parameters, batches of 256, bfloat16"
MODELS = ("the demo's operator", LARGE)
ONE, MEMORY, OURS, PT, HDF5 = "one batch on the card", "memory on the card", "our loader", ".pt files", "HDF5"


class Training:
    """Steps of an operator; windows of the demo's fields are prepared and sent to the card in one way.

    `.pt` and HDF5 files are read by processes of torch's `DataLoader`, ahead of the thread that otherwise
    reads our store. With one batch on the card nothing is read, prepared or sent: no step can be faster.
    """

    param_names = ("model", "fed by")
    params = (MODELS, (ONE, MEMORY, OURS, PT, HDF5))

    def setup(self, model: str, fed: str) -> None:
        self.device = torch.device(size.device)
        where = "device" if fed == MEMORY and self.device.type == "cuda" else "page-cache"
        overrides = ["training.prefetch_factor=2", f"training.preload={where}"]
        overrides += [f"training.device={size.device}"]
        if model == LARGE:
            overrides += ["training.batch_size=256", "training.amp=true", "training.amp_dtype=bfloat16"]
            overrides += size.large
        self.folder = Folder()
        self.trainer = demo().trainer(*overrides, device=self.device)
        if fed in (PT, HDF5):
            read_from(self.trainer, Hdf5 if fed == HDF5 else PtFolder, self.folder.path)
        elif fed == ONE:
            batch = self.trainer._batch(0, is_stopping=None)
            self.trainer._batch = lambda *args, **options: batch  # type: ignore[method-assign]

    def teardown(self, model: str, fed: str) -> None:
        self.trainer.stage.loader.close()
        del self.trainer
        self.folder.cleanup()

    @cached_property
    def steps(self) -> dict[str, float]:
        """Seconds a step, and shares in per cent."""
        trainer, num_steps = self.trainer, 0
        for _ in range(size.warm_up):
            trainer.train_step()
        self._wait()
        trainer.work.utilization(1.0)
        trainer.stopwatch.skip()
        with trainer.gpu:
            until = time.perf_counter() + size.steps_s
            while time.perf_counter() < until:
                trainer.train_step()
                num_steps += 1
            self._wait()
            load = trainer.gpu.read()
        waited = trainer.stopwatch.read()["training/data_wait_share"]
        seconds = trainer.stopwatch.seconds
        mfu = trainer.work.utilization(seconds)["training/mfu"]
        shares = {"waited": waited, "mfu": mfu}
        return {name: 100 * share for name, share in shares.items()} | load | {"s": seconds / num_steps}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @tracked("a training step", "ms")
    def step(self, model: str, fed: str) -> float:
        return 1e3 * self.steps["s"]

    @tracked("share of the time that training waits for a batch", "%")
    def waiting(self, model: str, fed: str) -> float:
        return self.steps["waited"]

    @tracked("share of the time that a kernel runs on the card, by its driver", "%")
    def load(self, model: str, fed: str) -> float:
        if GPU_LOAD not in self.steps:
            raise UnavailableError("no driver says it")
        return self.steps[GPU_LOAD]

    @tracked("counted operations, of those that the device could make", "%")
    def used(self, model: str, fed: str) -> float:
        return self.steps["mfu"]


def run_training() -> Iterator[Result]:
    return measure(Training, "gpu.Training", ["step", "waiting", "load", "used"])


def read_from(trainer: Trainer, kind: type[Peer], folder: Path) -> None:
    """Have a stage's windows come from files of another kind, in the same order."""
    stage: Any = trainer.stage
    stage.loader.close()
    (task,) = stage._data.source.tasks
    windows = stage._data.source.tasks[task]
    values = windows.store["fields"]
    num, frames = values.shape[:2]
    samples = Samples("fields", num, frames, values[0, 0].size, stage.loader.order.global_batch_size)
    peer = kind(folder, samples)
    peer.write(values.reshape(num, frames, -1))
    stage._data.source = _PeerWindows(stage._data.source, task, peer, stage.loader.order)
    stage.loader = stage._data.loader(trainer.config, trainer.device, prepare=stage._prepare)


class _PeerWindows(WindowSource):
    """Windows whose states a `DataLoader` reads from a peer's files."""

    def __init__(self, source: WindowSource, task: str, peer: Peer, order: Any) -> None:
        super().__init__(source.tasks, parameters=source.parameters)
        self._order, windows = order, source.tasks[task]
        items = _PeerItems(peer, windows)
        first = np.zeros(1, np.int64)
        self._constants = source.fetch(0, first, epoch=0, allocate=new_tensor)  # one ν, one dt
        self._loader = DataLoader(
            items, batch_sampler=self, num_workers=size.num_workers, multiprocessing_context="fork"
        )
        self._states = iter(self._loader)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = 0
        while True:
            yield from (step.items.tolist() for step in self._order.steps(epoch))
            epoch += 1

    def fetch(self, number: int, items: Items, *, epoch: int, allocate: Any) -> WindowBatch:
        states: Tensor = next(self._states)
        out = allocate(tuple(states.shape), torch.float32)
        out.copy_(states)
        one, rows = self._constants, len(items)
        repeated = {"parameters": one.parameters.repeat(rows, 1), "dt": one.dt.repeat(rows)}
        return dataclasses.replace(one, states=out, **repeated)


class _PeerItems(Dataset[Tensor]):
    """One window an item, as people write it; every process opens the files for itself."""

    def __init__(self, peer: Peer, windows: Windows) -> None:
        self._peer, self._opened_by = peer, -1
        self._index, self._stride = windows._index, windows._stride
        self._length = windows.horizon * windows._stride + 1
        self._shape = windows.store.arrays["fields"].shape[2:]

    def __getitem__(self, item: int) -> Tensor:
        if self._opened_by != os.getpid():
            self._peer.open()
            self._opened_by = os.getpid()
        samples, starts = self._index.locate(np.array([item]), epoch=0)
        window = self._peer.window(int(samples[0]), int(starts[0]), self._length)
        return window[:: self._stride].reshape(-1, *self._shape)


PARTS: dict[str, tuple[Callable[[], Iterator[Result]], float]] = {  # with their seconds
    "tests": (run_tests, 150.0),
    "precompute": (run_precompute, 170.0),
    "training": (run_training, 190.0),
}
ROWS = "UPS_GPU_ROWS"  # variable: the file that a part's process writes its rows to


def hand_over(result: Result) -> None:
    """Write a row where the first process finds it, whatever happens next."""
    with Path(os.environ[ROWS]).open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def part_in_time(name: str, command: list[str], *, limit_s: float) -> list[Result]:
    """Run a part in a process, killed with its children at its limit, and return what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        began = time.monotonic()
        environment = {**os.environ, ROWS: str(rows), "UPS_BENCH": "quick"}
        process = subprocess.Popen(command, env=environment, cwd=REPO, start_new_session=True)
        try:
            code = process.wait(limit_s)
            failure = f"failed: ended with {code}" if code else None
        except subprocess.TimeoutExpired:
            failure = f"failed: killed after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        results = [_result(line) for line in rows.read_text().splitlines() if line.endswith("}")]
    seconds = None if failure else time.monotonic() - began
    return [*results, Result(f"gpu.{name}", f"part {name}: all of it", {}, seconds, "s", failure=failure)]


def _result(line: str) -> Result:
    values = json.loads(line)
    comparison = values.pop("comparison")
    return Result(**values, comparison=comparison and Comparison(**comparison))


def main(
    only: Annotated[str | None, typer.Option(help=f"one of {', '.join(PARTS)}")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the JSON and the page")] = None,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="tiny sizes on the CPU")] = False,
    limit: Annotated[float, typer.Option(help="seconds for everything")] = TOTAL_S,
    part: Annotated[str | None, typer.Option(hidden=True, help="run a part in this process")] = None,
) -> None:
    """Measure on a card; end with 1 if something failed. By default JSON and page go to their places."""
    global size
    size = REHEARSAL if rehearse else CARD
    if part is not None:
        for result in PARTS[part][0]():
            hand_over(result)
            print(" ".join(result.cells), flush=True)
        return
    if only not in (None, *PARTS):
        raise typer.BadParameter(f"expected one of {', '.join(PARTS)}", param_hint="--only")
    if not (rehearse or torch.cuda.is_available()):
        print("no card that torch can use; --rehearse runs everything on the CPU with tiny sizes")
        raise typer.Exit(1)
    until = time.monotonic() + limit
    results: list[Result] = []
    about = describe(rehearse=rehearse)
    name = f"{about['date']}-{machine.kind({**about['machine'], 'cpu': about['card']})}-gpu.json"
    folder = out or REPO / "benchmarks" / "results"
    for key in [only] if only else PARTS:
        left = max(1.0, min(PARTS[key][1], until - time.monotonic()))
        again = [sys.executable, "-m", "benchmarks.gpu", "--part", key, *(["--rehearse"] if rehearse else [])]
        results += part_in_time(key, again, limit_s=left)
        report.write_json(folder / name, results, about)  # after each part: the machine may go away
    page = PAGE
    if out is not None:
        page = out / PAGE.name
        page.write_text(PAGE.read_text())
    if out is not None or not (rehearse or only):
        report.write_docs(page, markdown(results, about), begin=BEGIN, end=END)
    raise typer.Exit(any((result.failure or "").startswith("failed") for result in results))


def markdown(results: list[Result], about: dict[str, Any]) -> str:
    """For the page: tests that passed only as their number, of training a line for what fed it."""
    steps = [result for result in results if result.benchmark.startswith("gpu.Training")]
    passed = [one for one in results if "::" in one.title and one.failure is None]
    others = [result for result in results if result not in [*steps, *passed]]
    lines = [f"{about['card']}, torch {about['torch']}; {report.markdown(others, about)}"]
    if steps:
        titles = list(dict.fromkeys(result.title for result in steps))
        lines += ["| operator | fed by | " + " | ".join(titles) + " |", "|---|---|" + "---:|" * len(titles)]
    for key in dict.fromkeys(tuple(result.parameters.values()) for result in steps):
        cells = [result.cells[2] for result in steps if tuple(result.parameters.values()) == key]
        lines.append("| " + " | ".join([*key, *cells]) + " |")
    return "\n".join(lines) + "\n"


def describe(*, rehearse: bool) -> dict[str, Any]:
    """Date, machine and card."""
    card = "no card, a rehearsal" if rehearse else torch.cuda.get_device_name()
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "mode": "rehearse" if rehearse else "card"}
    hardware = machine.describe(Path(tempfile.gettempdir()))
    return {**about, "card": card, "torch": torch.__version__, "machine": hardware}


if __name__ == "__main__":
    typer.run(main)
