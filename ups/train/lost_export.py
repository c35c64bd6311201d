"""A training that continues looks whether what it exported is still there: else it is exported again.

A training state has the weights of its last step, and says after which step the best ones were exported.
Where these are the same, nothing is lost.
"""

from __future__ import annotations

from pathlib import Path

from ups.errors import CheckpointError
from ups.log import logger
from ups.train.best import BestWeights
from ups.train.stage import Stage

LOST_WEIGHTS = "lost_weights"


def restore_export(stage: Stage, best: BestWeights, *, step: int, is_over: bool, state_path: Path) -> None:
    """Export the present weights again if what was exported is gone or damaged; a collective.

    If they aren't the best ones, a training that goes on exports the best of the epochs to come.

    Args:
        stage: What is trained, with the averaged weights where there are any.
        best: Which weights were exported; some were.
        step: Optimiser steps that were made.
        is_over: Whether there are no more to make.
        state_path: Where the weights are from.

    Raises:
        CheckpointError: Kind "lost_weights", if nothing more is trained.
    """
    problem = best.ranks.first_does(lambda: _problem(stage, best.score))
    if problem is None:
        return
    if best.step == step:
        logger.info(f"{problem}; it is exported again from {state_path}")
        best.export_again()
    elif not is_over:
        logger.warning(f"{problem}; the best weights of the epochs to come are exported")
        best.forget()
    else:
        lost = f"those of step {best.step} were exported, and {state_path} has those of step {step}"
        raise CheckpointError(f"{problem}; {lost}", kind=LOST_WEIGHTS, hint="train again with --restart")


def _problem(stage: Stage, score: float) -> str | None:
    try:
        stage.check_exported(score)
    except CheckpointError as error:
        return f"{error.path}: {error.problem}"
    return None
