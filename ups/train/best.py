"""`BestWeights`: the best by validation are exported, be they those before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ups.config import RunConfig
from ups.config.legacy import of_document
from ups.config.stage_keys import flat_keys, users_of
from ups.distributed.ranks import Ranks
from ups.distributed.sharding import whole
from ups.errors import CheckpointError, OutputError
from ups.log import logger
from ups.optim import WeightsCopy
from ups.output import write_atomically
from ups.train.stage import Stage
from ups.trained.checkpoint import read_document, write_card

LOST_WEIGHTS = "lost_weights"


class BestWeights:
    """Which of a run's weights are exported.

    An untrained operator is persistence, so training that makes it worse has diverged, however finite its
    losses are. The weights before the first step are measured and compared at the end of the first epoch, so
    that training begins without waiting for it. Until then every rank has a copy of them, or of its shards,
    in the CPU's memory.

    Args:
        stage: What is trained, with the weights before the first step.
        validate: Gives the stage's metrics of the present weights; a collective.
        ranks: The processes that train together; the first one exports.
        is_first_epoch_over: Whether `restore` will be given a state of after the first epoch.

    Attributes:
        start: Validation error before the first step, infinite if it isn't finite; None until measured.
        score: The least error; infinite until there is one.
        ranks: As given.
        step: Optimiser step after which it was measured, 0 before the first one; None until there is one.
        bad_epochs: Epochs since the best of the epochs, be that one worse than the weights before the first.
    """

    def __init__(
        self,
        stage: Stage,
        config: RunConfig,
        *,
        validate: Callable[[], dict[str, float]],
        ranks: Ranks,
        is_first_epoch_over: bool = False,
    ) -> None:
        self.start: float | None = None
        self.score, self.bad_epochs = math.inf, 0
        self.step: int | None = None
        self._best_epoch_score = math.inf
        self._stage, self._config, self.ranks = stage, config, ranks
        self._validate = validate
        self._initial = None if is_first_epoch_over else WeightsCopy(stage.model, device="cpu")

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
            logger.warning(f"training made it worse: {worse}; lower training.lr")
        if score < self.score:
            self._export(metrics, replaces_earlier=before is not None)
            self.score, self.step = score, step
        elif before is not None:
            assert self._initial is not None
            with self._initial.in_place():
                self._export(before, replaces_earlier=True)
        self._initial = None
        self.bad_epochs = 0 if score < self._best_epoch_score else self.bad_epochs + 1
        self._best_epoch_score = min(self._best_epoch_score, score)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON values."""
        epochs = {"best_epoch_score": self._best_epoch_score, "bad_epochs": self.bad_epochs}
        return {"best": self.score, "best_step": self.step, "start_score": self.start, **epochs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.score, self.step, self.start = state["best"], state["best_step"], state["start_score"]
        self._best_epoch_score, self.bad_epochs = state["best_epoch_score"], state["bad_epochs"]

    def export_lost(self, step: int, *, is_over: bool, state_path: Path) -> None:
        """Export the present weights again if what was exported is gone or damaged; a collective.

        A training state has the weights of its last step. If these aren't the best ones, a training that goes
        on exports the best of the epochs to come.

        Args:
            step: Optimiser steps that were made.
            is_over: Whether there are no more to make.
            state_path: Where the present weights are from.
        """
        problem = self.ranks.first_does(self._problem_of_exported)
        if problem is None:
            return
        if self.step == step:
            logger.info(f"{problem}; it is exported again from {state_path}")
            metrics = {**self._validate(), "score": self.score}  # on another machine the last bits may differ
            export(self._stage, metrics, ranks=self.ranks, earlier=None, is_again=True)
        elif not is_over:
            logger.warning(f"{problem}; the best weights of the epochs to come are exported")
            self.score = math.inf
        else:
            lost = f"those of step {self.step} were exported, and {state_path} has those of step {step}"
            raise CheckpointError(f"{problem}; {lost}", kind=LOST_WEIGHTS, hint="train again with --restart")

    def _problem_of_exported(self) -> str | None:
        try:
            self._stage.check_exported(self.score)
        except CheckpointError as error:
            return f"{error.path}: {error.problem}"
        return None

    def _measure_start(self) -> dict[str, float]:
        assert self._initial is not None
        with self._initial.in_place():
            metrics = self._validate()
        self.start = metrics["score"] if math.isfinite(metrics["score"]) else math.inf
        self.score, self.step = self.start, 0
        return metrics

    def _export(self, metrics: dict[str, float], *, replaces_earlier: bool) -> None:
        earlier = self._config if replaces_earlier else None
        export(self._stage, metrics, ranks=self.ranks, earlier=earlier)


def export(
    stage: Stage,
    metrics: dict[str, float],
    *,
    ranks: Ranks,
    earlier: RunConfig | None,
    is_again: bool = False,
) -> None:
    """Export a stage's present weights, whole; a collective, of which the first rank writes.

    Args:
        metrics: Of these weights.
        earlier: Configuration of the run, where files of an earlier one are replaced, see `set_aside`.
        is_again: Whether they were exported before, see `Stage.export_again`.

    Raises:
        OutputError: If they can't be written.
    """
    weights = whole(stage.model.state_dict(), is_kept=ranks.is_first)
    if not ranks.is_first:
        return
    if earlier is not None:
        for path, kind in stage.exports().items():
            set_aside(path, kind=kind, metrics=metrics, config=earlier)
    (stage.export_again if is_again else stage.export)(metrics, weights)


def set_aside(path: Path, *, kind: str, metrics: Mapping[str, float], config: RunConfig) -> None:
    """Keep a checkpoint of an earlier run that is better than what replaces it as `<name>.previous<suffix>`.

    Only like is compared with like: the same metrics of the same tasks, on the same data, validated alike.
    What was set aside before stays, if it is better still. That it can't be kept ends no run: a note says so.

    Args:
        path: What will be replaced, by another file under its name; need not be there.
        kind: Its kind of checkpoint.
        metrics: Of what replaces it, with its `score`.
        config: Configuration of the run that replaces it.
    """
    score_of = partial(_score_of, kind=kind, like=metrics, config=config)
    score = score_of(path)
    if score is None or score >= metrics["score"]:
        return
    aside = path.with_name(f"{path.stem}.previous{path.suffix}")
    shown = f"(validation error {score:.4g}, now {metrics['score']:.4g})"
    better = f"{path} of an earlier run is better than the first epoch of this run {shown}"
    kept = score_of(aside)
    if kept is not None and kept <= score:
        logger.info(f"{better}; not kept, since {aside} is at least as good ({kept:.4g})")
        return
    try:
        _keep_as(aside, path)
        write_card(aside, kind=kind)
    except (OSError, OutputError) as error:
        logger.warning(f"{better}; it can't be kept: {error}")
    else:
        logger.info(f"{better}; kept as {aside}")


def _keep_as(aside: Path, path: Path) -> None:
    """Give a file a second name; a copy where links can't be made, or in the place of what has that name."""
    try:
        aside.hardlink_to(path)
    except OSError:
        write_atomically(aside, path.read_bytes())


def _score_of(path: Path, *, kind: str, like: Mapping[str, float], config: RunConfig) -> float | None:
    """Validation error of a checkpoint; None if there is none that could be compared."""
    try:
        document = read_document(path, kind=kind)
    except CheckpointError:
        return None
    report, saved = document.get("report", {}), document.get("config", {})
    is_alike = _validated_on(saved) == _validated_on(config.model_dump(mode="json"))
    return float(report["score"]) if is_alike and report.keys() == like.keys() else None


def _validated_on(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in flat_keys(of_document(config)).items()
        if "validation" in users_of(key) and not (key.startswith("stages.") and value is None)
    }
