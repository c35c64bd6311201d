"""A stage that has nothing to train: what was measured on the data is validated, exported, reported on."""

from __future__ import annotations

from typing import Any

from ups.config import RunConfig
from ups.distributed.ranks import Ranks
from ups.log import logger
from ups.train.best import export
from ups.train.saved_state import state_path
from ups.train.stage import Stage
from ups.train.state_files import remove_state


def is_untrained(stage: Stage) -> bool:
    """Whether no weight of the stage's model is trained."""
    return not any(parameter.requires_grad for parameter in stage.model.parameters())


def run_untrained(
    stage: Stage,
    config: RunConfig,
    *,
    ranks: Ranks,
) -> dict[str, Any]:
    """Export the model as it is, and report on it as `run_stage` does after training; a collective.

    There is no state to continue from: it costs a pass through the data to do it again. One of an earlier
    training is removed, since it isn't of what is exported now.
    """
    logger.info(f"stage {stage.name} has nothing to train: it is measured on the data, and exported")

    stage.ranks = ranks
    stage.model.eval()
    metrics = stage.validate()
    export(stage, metrics, ranks=ranks, earlier=config)
    if ranks.is_first:
        remove_state(state_path(config, stage.name))
    ranks.tell()  # the others read what was exported
    report = stage.finish()
    no_steps: dict[str, Any] = {
        "steps": 0,
        "resumed_at": 0,
        "best_step": None,
        "data_wait_share": 0.0,
        "startup": {},
    }
    return {**report, "start_score": metrics["score"], **no_steps}
