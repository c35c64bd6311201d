"""What became of stores, what the time of a run went to, and the manifest that says both."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ups_store.building.progress import Stopwatch
from ups_store.building.readers import Choice
from ups_store.console import format_age, format_nbytes
from ups_store.errors import ConfigError
from ups_store.printable import counted, json_text
from ups_store.system.files import make_folder, replace_text

_BEFORE = ("imports", "stage", "plan", "digest", "open", "pull", "probe")
_BUILDING = ("load", "read", "encode", "commit", "finish", "pack")
PHASES = (*_BEFORE, *_BUILDING, "total")

_MAX_MANIFEST_BYTES = 64 << 20  # a store takes a few kB


@dataclass
class BuildResult:
    """What became of one store.

    Attributes:
        path: The store.
        task: Its task.
        split: Its split.
        config_hash: Hash of its identity.
        reused: Whether it was valid already.
        num_samples: N.
        num_committed: Samples committed by this run.
        source_sample_nbytes: Bytes of a sample as it is read.
        nbytes: Length of the file, or files.
        age_s: Seconds since its file was written, here: of a copy since it was copied.
        codec: How it is packed: "none", "blosc" or "pcodec".
        num_files: In how many files it is; `path` is their pattern if there are several.
        mapped_nbytes: Length of the mapped form.
        seconds: Time by stage: digest, open, probe, load, read, encode, commit, finish, pack, total.
        statistics: Range of what was written, by array; how many values aren't finite, and how many casts of
            this process made 0 or infinite. Empty where reused.
        tuning: What was tried and chosen for reading, see `tuning.Tuning`; None unless that was asked for.
        pulled: Whether it came from the shared cache.
        pushed: Whether this run has put it there.
    """

    path: Path
    task: str
    split: str
    config_hash: str
    reused: bool
    num_samples: int
    num_committed: int
    source_sample_nbytes: int
    nbytes: int
    age_s: float
    codec: str = "none"
    num_files: int = 1
    mapped_nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] | None = None
    pulled: bool = False
    pushed: bool = False

    @property
    def filling_s(self) -> float:
        """Seconds from when the sources were known to the finished store."""
        return self.seconds["total"] - self.seconds.get("digest", 0.0)

    @property
    def throughput(self) -> dict[str, float]:
        """Samples and megabytes of the sources per second, of what this run committed."""
        per_s = self.num_committed / max(1e-9, self.filling_s)
        mb_per_s = per_s * self.source_sample_nbytes / 1e6
        return {"samples_per_s": round(per_s, 3), "mb_per_s": round(mb_per_s, 3)}

    def summary(self) -> str:
        """One line for people."""
        size = f"{counted(self.num_samples, 'sample')}, {format_nbytes(self.nbytes)}"
        if self.num_files > 1:
            size += f" in {self.num_files} files"
        if self.codec != "none":
            size += f", packed by {self.codec} {self.mapped_nbytes / max(1, self.nbytes):.2f} times smaller"
        took = f"built in {self.seconds['total']:.1f} s"
        done = f"valid, written {format_age(self.age_s)}" if self.reused else took
        if self.reused and "pack" in self.seconds:
            what = "unpacked" if self.codec == "none" else "packed"
            done = f"valid, {what} in {self.seconds['pack']:.1f} s"
        if self.pulled:
            done = f"pulled in {self.seconds['pull']:.1f} s"
        elif self.pushed:
            done += ", pushed"
        return f"{self.task} {self.split}: {size}, {done}, {self.config_hash[:12]}, {self.path}"

    def to_json(self) -> dict[str, Any]:
        """The store's part of the manifest."""
        return {**vars(self), "path": str(self.path), **self.throughput}


@dataclass(frozen=True)
class Startup:
    """Seconds by phase and throughput of one run.

    Attributes:
        seconds: What the build waited for each of `PHASES`: stages that overlap count less than they work,
            and "probe" is the part of reading, encoding and committing that was spent in trials.
        reused: Whether every store was valid already.
        samples_per_s: Samples that this run committed, by the seconds from known sources to finished stores.
        mb_per_s: The same in megabytes as they are read.
    """

    seconds: dict[str, float]
    reused: bool
    samples_per_s: float
    mb_per_s: float

    @classmethod
    def of(cls, results: Sequence[BuildResult], clock: Stopwatch) -> Startup:
        """Of a run's stores, and the clock that has counted what isn't of one store."""
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

    def to_json(self) -> dict[str, Any]:
        """The manifest's `startup`."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """The same as numbers by name, `startup/<phase>_sec` and so on, for logs of runs."""
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
        """The manifest."""
        return {
            "stores": [result.to_json() for result in self.stores],
            "skipped": self.skipped,
            "readers": vars(self.readers),
            "startup": self.startup.to_json(),
        }


def write_manifest(path: Path, report: BuildReport) -> None:
    """Write the manifest, atomically."""
    replace_text(path, json_text(report.to_json(), indent=2) + "\n")


def prepare_manifest(path: Path) -> None:
    """Make the manifest's folder, and refuse to replace anything but an earlier manifest.

    Called before the hours of work that the manifest will describe.
    """
    make_folder(path.parent, hint="check --manifest")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("can't write into the folder", path=path.parent, hint="check --manifest")
    if path.exists() and not _is_manifest(path):
        raise ConfigError(
            "it isn't a manifest, so it isn't replaced", path=path, hint="give --manifest another name"
        )


def _is_manifest(path: Path) -> bool:
    """Whether a file is one, or empty."""
    if not path.is_file() or path.stat().st_size > _MAX_MANIFEST_BYTES:
        return False
    try:
        document = json.loads(path.read_bytes() or b'{"stores": []}')
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and isinstance(document.get("stores"), list)
