"""`BestWeights`: the best by validation are exported, be they those before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ups.checkpoint import read_document
from ups.errors import CheckpointError, OutputError
from ups.optim.ema import WeightsCopy
from ups.output import write_atomically
from ups.train.ranks import Ranks
from ups.train.stage import Stage, exports_of

Note = Callable[[str], None]


class BestWeights:
    """Which of a run's weights are exported.

    An untrained operator is persistence, so training that makes it worse has diverged, however finite its
    losses are. The weights before the first step are measured and compared at the end of the first epoch, so
    that training begins without waiting for it.

    Args:
        stage: What is trained, with the weights before the first step.
        ranks: Who trains together; the first one validates and exports.
        note: Told when training made it worse, and when a better checkpoint of an earlier run is set aside.

    Attributes:
        start: Validation error before the first step; None until it is measured.
        score: The least error; infinite until there is one.
        step: Optimiser step after which it was measured, 0 before the first one; None until there is one.
        bad_epochs: Epochs since.
    """

    def __init__(self, stage: Stage, *, ranks: Ranks, note: Note) -> None:
        self.start: float | None = None
        self.score, self.bad_epochs = math.inf, 0
        self.step: int | None = None
        self._stage, self._ranks, self._note = stage, ranks, note
        self._initial: WeightsCopy | None = WeightsCopy(stage.model)

    def take(self, metrics: dict[str, float], *, step: int) -> None:
        """Export the model's present weights if they are the best so far; a collective.

        Args:
            metrics: Of the present weights, with a finite `score`.
            step: Optimiser steps that were made.
        """
        before = self._measure_start() if self.start is None else None
        score = metrics["score"]
        assert self.start is not None
        if score > self.start:
            worse = f"validation error {score:.4g} after step {step}, {self.start:.4g} before the first one"
            self._note(f"warning: training made it worse: {worse}; lower training.lr")
        if score < self.score:
            self._export(metrics, is_first=before is not None)
            self.score, self.step, self.bad_epochs = score, step, 0
        else:
            self.bad_epochs += 1
            if before is not None and self._initial is not None:
                with self._initial.in_place():
                    self._export(before, is_first=True)
        self._initial = None

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON values."""
        best = {"best": self.score, "best_step": self.step, "bad_epochs": self.bad_epochs}
        return {**best, "start_score": self.start}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.score, self.step, self.bad_epochs = state["best"], state["best_step"], state["bad_epochs"]
        self.start = state["start_score"]
        if self.start is not None:
            self._initial = None

    def _measure_start(self) -> dict[str, float]:
        assert self._initial is not None
        with self._initial.in_place():
            metrics: dict[str, float] = self._ranks.first_does(self._stage.validate)
        self.start = metrics["score"] if math.isfinite(metrics["score"]) else math.inf
        self.score, self.step = self.start, 0
        return metrics

    def _export(self, metrics: dict[str, float], *, is_first: bool) -> None:
        if not self._ranks.is_first:
            return
        if is_first:
            for path, kind in exports_of(self._stage).items():
                set_aside(path, kind=kind, metrics=metrics, note=self._note)
        self._stage.export(metrics)


def set_aside(path: Path, *, kind: str, metrics: Mapping[str, float], note: Note) -> None:
    """Copy a checkpoint of an earlier run that is better than what replaces it to `<name>.previous<suffix>`.

    Only like is compared with like: the same metrics of the same tasks. What was set aside before stays, if
    it is better still.

    Args:
        path: What will be replaced; need not be there.
        kind: Its kind of checkpoint.
        metrics: Of what replaces it, with its `score`.
        note: Told.

    Raises:
        OutputError: If it can't be copied; nothing is replaced then.
    """
    score = _score_of(path, kind=kind, like=metrics)
    if score is None or score >= metrics["score"]:
        return
    aside = path.with_name(f"{path.stem}.previous{path.suffix}")
    earlier = _score_of(aside, kind=kind, like=metrics)
    if earlier is None or score < earlier:
        try:
            write_atomically(aside, path.read_bytes())
        except OSError as error:
            raise OutputError.of(error, aside) from error
    shown = f"validation error {score:.4g}, now {metrics['score']:.4g}"
    note(f"warning: {path} of an earlier run is better ({shown}); it is kept as {aside}")


def _score_of(path: Path, *, kind: str, like: Mapping[str, float]) -> float | None:
    """Validation error of a checkpoint; None if there is none that could be compared."""
    try:
        report = read_document(path, kind=kind).get("report", {})
    except CheckpointError:
        return None
    return float(report["score"]) if report.keys() == like.keys() else None
