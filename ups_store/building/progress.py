"""How a build goes, and what became of it: its clock, the base of watchers, results and the manifest."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ups_store.console import format_age, format_nbytes
from ups_store.errors import ConfigError
from ups_store.printable import counted, json_text
from ups_store.system.files import make_folder, replace_text

if TYPE_CHECKING:
    from ups_store.building.readers import Choice  # h5py: not for --help
    from ups_store.sources.reader_pool import ReaderPool

PHASES = (
    *("imports", "stage", "plan", "digest", "open", "pull", "probe"),
    *("load", "read", "encode", "commit", "finish", "pack", "total"),
)
_MAX_MANIFEST_BYTES = 64 << 20  # a store takes a few kB
_END = object()

Item = TypeVar("Item")


class Stopwatch:
    """Adds up monotonic time by the name of a stage, and in total since it was made."""

    def __init__(
        self, begins: Callable[[str], None] = lambda stage: None, *, started_s: float | None = None
    ) -> None:
        self._begins = begins
        self._started = time.perf_counter() if started_s is None else started_s
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, stage: str, seconds: float) -> None:
        """Count time that was measured elsewhere to a stage."""
        self._seconds[stage] += seconds

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count the time of the block to a stage."""
        started = time.perf_counter()
        self._begins(stage)
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - started

    def timed_each(self, stage: str, items: Iterable[Item]) -> Iterator[Item]:
        """Count the time that an iterable takes for its items to a stage."""
        iterator = iter(items)
        while True:
            with self.timed(stage):
                item = next(iterator, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # the sentinel is gone

    def to_json(self) -> dict[str, float]:
        """Return seconds by stage, and "total"."""
        total = {"total": time.perf_counter() - self._started}
        return {stage: round(value, 4) for stage, value in {**self._seconds, **total}.items()}


# --- the watcher --------------------------------------------------------------------------------------


class Watcher:
    """Hears how a build goes: the stage, how far it is, what is waited for and how long, and the readers.

    It shows nothing, but gives notes to a function; those that show something are made of it.

    Args:
        note: Given what the user should know; by default that isn't shown either.
    """

    def __init__(self, note: Callable[[str], None] = lambda message: None) -> None:
        self._note = note
        self.name, self.done, self.total, self.unit = "start", 0, 0, ""
        self.waits_for = ""
        self.pool: ReaderPool | None = None
        self._waited_s: defaultdict[str, float] = defaultdict(float)
        self._rated, self._since_s = "", time.monotonic()

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Begin another stage, which has so many "bytes" or "samples"."""
        self.name, self.done, self.total, self.unit = name, 0, total, unit
        self._waited_s.clear()
        self._rated = ""

    def advance(self, num: int) -> None:
        """Count how much more of the stage is done."""
        self.done += num

    def note(self, message: str) -> None:
        """Tell the user something."""
        self._note(message)

    def watch(self, pool: ReaderPool) -> None:
        """Know the readers, whose state may be of interest."""
        self.pool = pool

    def waits(self, stage: str) -> None:
        """Know what everything waits for from now on, such as "read" or "commit"."""
        now = time.monotonic()
        if self._rated:
            self._waited_s[self._rated] += now - self._since_s
        self._rated = self.waits_for = stage
        self._since_s = now

    def per_second(self) -> dict[str, float]:
        """Return what was done over the seconds that "read", "commit" and so on were waited for.

        A stage that others overlap with is waited for less than it works, so its rate is what it could
        sustain.
        """
        waited_s = {stage: seconds for stage, seconds in self._waited_s.copy().items() if seconds > 0}
        return {stage: self.done / seconds for stage, seconds in waited_s.items() if self.done}


QuietWatcher = Watcher  # its name until there was one class for both


# --- results ------------------------------------------------------------------------------------------


@dataclass
class BuildResult:
    """What became of one store, as the manifest has it."""

    path: Path
    task: str
    split: str
    config_hash: str
    reused: bool  # whether it was valid already
    num_samples: int
    num_committed: int  # by this run
    source_sample_nbytes: int  # of a sample as it is read
    nbytes: int  # length of the file, or files
    age_s: float  # since its file was written, here: of a copy since it was copied
    codec: str = "none"
    num_files: int = 1  # `path` is their pattern if there are several
    mapped_nbytes: int = 0  # length of the mapped form
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    # Range of what was written, by array; how many values aren't finite, and how many casts of this process
    # made 0 or infinite. Empty where reused.
    statistics: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] | None = None  # what was tried and chosen for reading; None unless asked for
    pulled: bool = False  # from the shared cache
    pushed: bool = False  # to it, by this run

    @property
    def filling_s(self) -> float:
        """Seconds from when the sources were known to the finished store."""
        return self.seconds["total"] - self.seconds.get("digest", 0.0)

    def summary(self) -> str:
        """Say it in one line, for people."""
        size = f"{counted(self.num_samples, 'sample')}, {format_nbytes(self.nbytes)}"
        if self.num_files > 1:
            size += f" in {self.num_files} files"
        if self.codec != "none":
            size += f", packed by {self.codec} {self.mapped_nbytes / max(1, self.nbytes):.2f} times smaller"
        done = f"built in {self.seconds['total']:.1f} s"
        if self.reused and "pack" in self.seconds:
            verb = "unpacked" if self.codec == "none" else "packed"
            done = f"valid, {verb} in {self.seconds['pack']:.1f} s"
        elif self.reused:
            done = f"valid, written {format_age(self.age_s)}"
        if self.pulled:
            done = f"pulled in {self.seconds['pull']:.1f} s"
        elif self.pushed:
            done += ", pushed"
        return f"{self.task} {self.split}: {size}, {done}, {self.config_hash[:12]}, {self.path}"

    def to_json(self) -> dict[str, Any]:
        """Return the store's part of the manifest, with samples and megabytes of the sources per second."""
        per_s = self.num_committed / max(1e-9, self.filling_s)
        mb_per_s = round(per_s * self.source_sample_nbytes / 1e6, 3)
        return {
            **vars(self),
            "path": str(self.path),
            "samples_per_s": round(per_s, 3),
            "mb_per_s": mb_per_s,
        }


@dataclass(frozen=True)
class Startup:
    """Seconds by phase and throughput of one run.

    What the build waited for each of `PHASES`: stages that overlap count less than they work, and "probe" is
    the part of reading, encoding and committing that was spent in trials.
    """

    seconds: dict[str, float]
    reused: bool  # whether every store was valid already
    samples_per_s: float  # that this run committed, by the seconds from known sources to finished stores
    mb_per_s: float  # the same in megabytes as they are read

    @classmethod
    def of(cls, results: Sequence[BuildResult], clock: Stopwatch) -> Startup:
        """Sum up a run's stores, and the clock that has counted what isn't of one store."""
        whole = clock.to_json()
        seconds: Counter[str] = Counter()
        for part in (whole, *(result.seconds for result in results)):
            seconds.update({phase: round(1e4 * part.get(phase, 0.0)) for phase in PHASES[:-1]})
        built = [result for result in results if not result.reused]
        filling_s = max(1e-9, sum(result.filling_s for result in built))
        nbytes = sum(result.num_committed * result.source_sample_nbytes for result in built)
        return cls(
            seconds={**{phase: seconds[phase] / 1e4 for phase in PHASES[:-1]}, "total": whole["total"]},
            reused=not built,
            samples_per_s=round(sum(result.num_committed for result in built) / filling_s, 3),
            mb_per_s=round(nbytes / filling_s / 1e6, 3),
        )

    def metrics(self) -> dict[str, float]:
        """Return the same as numbers by name, `startup/<phase>_sec` and so on, for logs of runs."""
        seconds = {f"startup/{phase}_sec": value for phase, value in self.seconds.items()}
        others = {name: float(value) for name, value in vars(self).items() if name != "seconds"}
        return {**seconds, **{f"startup/{name}": value for name, value in others.items()}}


@dataclass(frozen=True)
class BuildReport:
    """What became of every store.

    Attributes:
        stores: Results in the order of tasks and splits.
        skipped: Stores that have no sample, with the reason, by "task split".
        readers: How many readers there were, and why.
        startup: Seconds by phase and throughput of the whole run.
    """

    stores: tuple[BuildResult, ...]
    skipped: dict[str, str]
    readers: Choice
    startup: Startup

    def to_json(self) -> dict[str, Any]:
        """Return the manifest."""
        return {
            "stores": [result.to_json() for result in self.stores],
            "skipped": self.skipped,
            "readers": vars(self.readers),
            "startup": asdict(self.startup),
        }


def prepare_manifest(path: Path) -> None:
    """Make the manifest's folder, and refuse to replace anything but an earlier manifest.

    Called before the hours of work that the manifest will describe.
    """
    make_folder(path.parent, hint="check --manifest")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("can't write into the folder", path=path.parent, hint="check --manifest")
    document: Any = None
    if path.is_file() and path.stat().st_size <= _MAX_MANIFEST_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(path.read_bytes() or b'{"stores": []}')  # an empty file may be replaced
    is_manifest = isinstance(document, dict) and isinstance(document.get("stores"), list)
    if path.exists() and not is_manifest:
        hint = "give --manifest another name"
        raise ConfigError("it isn't a manifest, so it isn't replaced", path=path, hint=hint)


def write_manifest(path: Path, report: BuildReport) -> None:
    """Write the manifest, atomically."""
    replace_text(path, json_text(report.to_json(), indent=2) + "\n")
