"""What became of one store."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups_store.console import counted, format_age, format_nbytes


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
        nbytes: Length of the file.
        age_s: Seconds since it was written.
        seconds: Time by stage: digest, open, probe, load, read, encode, commit, finish, total.
        statistics: Range and non-finite counts of what was written, by array; empty where reused.
        tuning: What was tried and chosen for reading, see `tuning.Tuning`; None unless that was asked for.
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
    seconds: dict[str, float] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] | None = None

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
        took = f"built in {self.seconds['total']:.1f} s"
        done = f"valid, made {format_age(self.age_s)}" if self.reused else took
        return f"{self.task} {self.split}: {size}, {done}, {self.config_hash[:12]}, {self.path}"

    def to_json(self) -> dict[str, Any]:
        """The store's part of the manifest."""
        return {**vars(self), "path": str(self.path), **self.throughput}
