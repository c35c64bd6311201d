"""What became of one store."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups_store.console import format_age, format_nbytes


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
        nbytes: Length of the file.
        age_s: Seconds since it was written.
        seconds: Time by stage: digest, read, commit, finish, total.
        statistics: Range and non-finite counts of what was written, by array; empty where reused.
    """

    path: Path
    task: str
    split: str
    config_hash: str
    reused: bool
    num_samples: int
    num_committed: int
    nbytes: int
    age_s: float
    seconds: dict[str, float] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """One line for people."""
        what = f"{self.task} {self.split}: {self.num_samples} samples, {format_nbytes(self.nbytes)}"
        took = f"built in {self.seconds['total']:.1f} s"
        done = f"valid, made {format_age(self.age_s)}" if self.reused else took
        return f"{what}, {done}, {self.config_hash[:12]}, {self.path}"

    def to_json(self) -> dict[str, Any]:
        """The store's part of the manifest."""
        return {**vars(self), "path": str(self.path)}
