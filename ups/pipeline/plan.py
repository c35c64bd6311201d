"""What a dry run finds: what becomes of each store and stage, and what that takes; for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ups.pipeline.planned_ranks import PlannedRanks
from ups.pipeline.report import Report, show_checks
from ups.pipeline.scratch import Measured
from ups_store.console import format_nbytes

if TYPE_CHECKING:
    from rich.console import Console

BUILT = ("build", "rebuild", "continue", "repack")
Action = Literal["train", "train again", "continue", "keep"]


@dataclass(frozen=True)
class StorePlan:
    """What would become of a store.

    Attributes:
        task: Its task.
        split: Its split.
        holds: "fields" or "latents".
        action: As `ups_store.build.Explanation.action`.
        reason: Why.
        path: Where it lies, or would.
        nbytes: Its size, of latents whose encoder isn't there yet an estimate.
    """

    task: str
    split: str
    holds: str
    action: str
    reason: str
    path: str
    nbytes: int


@dataclass(frozen=True)
class StagePlan:
    """What would become of a stage.

    Attributes:
        name: Of the stage.
        action: "train", "train again" (another configuration, or another encoder), "continue", "keep".
        reason: Why.
        done: Optimiser steps that are made already.
        steps: In all; None where nothing says it.
        measured: What its steps take here; None where none were made.
    """

    name: str
    action: Action
    reason: str
    done: int = 0
    steps: int | None = None
    measured: Measured | None = None

    @property
    def seconds(self) -> float | None:
        """Of the steps that are left; validation and exports aside."""
        if self.action == "keep":
            return 0.0
        if self.measured is None or self.steps is None:
            return None
        return self.measured.first_step_s + max(0, self.steps - self.done - 1) * self.measured.step_s


@dataclass(frozen=True)
class Plan(Report):
    """What a run would do, beside what `check_config` found.

    Attributes:
        stores: In the order of their builds.
        stages: In the order of their training.
        device: Where they would be trained.
        price_per_hour: Of the machine; None where it isn't known.
        ranks: That train together.
    """

    stores: tuple[StorePlan, ...] = ()
    stages: tuple[StagePlan, ...] = ()
    device: str = ""
    price_per_hour: float | None = None
    ranks: PlannedRanks = field(default=PlannedRanks())

    @property
    def training_seconds(self) -> float | None:
        """Of all steps that are left; None if one stage's aren't known."""
        seconds = [stage.seconds for stage in self.stages]
        known = [each for each in seconds if each is not None]
        return sum(known) if len(known) == len(seconds) else None

    @property
    def cost(self) -> float | None:
        """Of these, in the unit of the price."""
        if self.price_per_hour is None or self.training_seconds is None:
            return None
        return self.training_seconds / 3600 * self.price_per_hour

    @property
    def memory_bytes(self) -> int:
        """Peak of all stages that were measured."""
        return max((stage.measured.memory_bytes for stage in self.stages if stage.measured), default=0)

    @property
    def disk_bytes(self) -> int:
        """Of stores that would be built and of checkpoints."""
        stores = sum(store.nbytes for store in self.stores if store.action in BUILT)
        return stores + sum(stage.measured.saved_bytes for stage in self.stages if stage.measured)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        totals = ("training_seconds", "cost", "memory_bytes", "disk_bytes")
        return {
            **super().to_json(),
            "device": self.device,
            "ranks": asdict(self.ranks),
            "stores": [asdict(store) for store in self.stores],
            "stages": [{**asdict(stage), "seconds": stage.seconds} for stage in self.stages],
            "price_per_hour": self.price_per_hour,
            **{name: getattr(self, name) for name in totals},
        }

    def show(self, console: Console) -> None:
        """Write what is odd, what would be done, and what it takes."""
        show_checks([check for check in self.checks if check.mark != "ok"], console)
        for store in self.stores:
            size = format_nbytes(store.nbytes)
            title = f"{store.task} {store.split} ({store.holds})"
            console.print(
                f"store  {title}: {store.action}: {store.reason}, {size}, {store.path}", soft_wrap=True
            )
        for stage in self.stages:
            console.print(
                f"stage  {stage.name}: {stage.action}: {stage.reason}{_taken(stage)}", soft_wrap=True
            )
        if self.stages:
            console.print(self._totals(), soft_wrap=True)
        console.print(self.summary)

    def _totals(self) -> str:
        seconds, cost = self.training_seconds, self.cost
        time_taken = "unknown" if seconds is None else duration(seconds)
        priced = "" if cost is None else f", costs {cost:.2f} at {self.price_per_hour:g} an hour"
        memory = f"{format_nbytes(self.memory_bytes)} at most" if self.memory_bytes else "not measured"
        one, each = "validation and builds", ""
        if self.ranks.num > 1:
            one, each = f"{one}, and what ranks exchange,", " of each rank"
        return (
            f"total  on {self.ranks.shown(self.device)}: steps take {time_taken}{priced} ({one} not counted);"
            f" memory{each} {memory}; disk {format_nbytes(self.disk_bytes)}"
        )


def _taken(stage: StagePlan) -> str:
    measured = stage.measured
    if measured is None or stage.seconds is None:
        return ""
    left = (stage.steps or 0) - stage.done
    each, memory = f"{1000 * measured.step_s:.1f} ms", format_nbytes(measured.memory_bytes)
    return f"; {left:,} steps of {each}: {duration(stage.seconds)}, memory {memory}"


def duration(seconds: float) -> str:
    """For people: "41 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
