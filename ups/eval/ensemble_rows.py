"""A table's rows as ensembles: those of models with members, and point forecasts beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ups.data.windows import Trajectories
from ups.eval.comparison import ComparedModel, Comparison
from ups.eval.ensemble_scores import score_ensemble
from ups.eval.ensembles import (
    Climate,
    EnsembleErrors,
    EnsembleRollout,
    check_members,
    roll_out_members,
    roll_out_point,
)
from ups.eval.forecasters import has_members
from ups.eval.intervals import Resamples
from ups.eval.report import Row
from ups.log import logger


@dataclass(frozen=True)
class EnsembleRequest:
    """Which ensembles are asked for.

    Attributes:
        members: M.
        seed: Of their noise.

    Raises:
        ConfigError: Kind "members", if there are fewer than 2.
    """

    members: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_members(self.members)


def with_ensembles(
    rows: Sequence[Row],
    comparison: Comparison,
    wanted: EnsembleRequest,
    *,
    resamples: Resamples,
) -> tuple[list[Row], dict[str, EnsembleErrors]]:
    """Score every row as an ensemble, too.

    Args:
        rows: Of the comparison's entries, in order.
        comparison: What predicts which trajectories.
        wanted: Members and seed.
        resamples: Of the split, the same as of the rows' other scores.

    Returns:
        The rows with their `ensemble`, paired with the first one's; and by name, for the pictures, the
        numbers of the first training seed.
    """
    climate = Climate.of(comparison.trajectories)
    if not any(map(_is_ensemble, comparison.entries)):
        logger.warning("no model has members, so all are scored as point forecasts")
    found: list[Row] = []
    errors: dict[str, EnsembleErrors] = {}
    for row, entry in zip(rows, comparison.entries, strict=True):
        rollouts = _roll_out(entry, comparison.trajectories, climate, wanted)
        errors[row.name] = rollouts[0].errors
        scores = score_ensemble(
            [rollout.errors for rollout in rollouts],
            resamples=resamples,
            row=row.name,
            seconds=sum(rollout.seconds for rollout in rollouts) / len(rollouts),
        )
        if found and not row.sees_truth:
            assert found[0].ensemble is not None
            scores = replace(scores, paired=scores.scores.paired(found[0].ensemble.scores))
        found.append(replace(row, ensemble=scores))
    return found, errors


def _is_ensemble(entry: ComparedModel) -> bool:
    """Whether the models of all training seeds have members."""
    return all(map(has_members, entry.members))


def _roll_out(
    entry: ComparedModel, trajectories: Trajectories, climate: Climate, wanted: EnsembleRequest
) -> list[EnsembleRollout]:
    """The members of the model of each training seed, or its forecasts."""
    rollouts = []
    for number, model in enumerate(entry.members):
        if _is_ensemble(entry) and has_members(model):
            of_seed = f" (seed {entry.seeds[number]})" if len(entry.members) > 1 else ""
            logger.info(f"{trajectories.info.task}: {wanted.members} members of {model.label}{of_seed}")
            found = roll_out_members(model, trajectories, climate, members=wanted.members, seed=wanted.seed)
        else:
            found = roll_out_point(model, trajectories, climate)
        rollouts.append(found)
    return rollouts
