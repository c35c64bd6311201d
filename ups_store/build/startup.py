"""What the time of a run goes to before there is something to train on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ups_store.build.result import BuildResult
from ups_store.build.stopwatch import Stopwatch

PHASES = ("imports", "plan", "digest", "open", "probe", "load", "read", "encode", "commit", "finish", "total")


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
        """The same as numbers by name, `startup/<phase>_sec` and so on, for whoever logs runs."""
        seconds = {f"startup/{phase}_sec": value for phase, value in self.seconds.items()}
        others = {name: float(value) for name, value in vars(self).items() if name != "seconds"}
        return {**seconds, **{f"startup/{name}": value for name, value in others.items()}}
