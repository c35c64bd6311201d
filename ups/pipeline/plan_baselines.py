"""What becomes of the baselines of a run's evaluation: one for each task, kind and budget."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ups.config import RunConfig
from ups.config.stages import BudgetConfig
from ups.errors import CheckpointError
from ups.eval.baseline_model import BASELINE, DEFAULT_KINDS
from ups.eval.equal_budgets import parse_budgets
from ups.eval.runs import baseline_path
from ups.pipeline.plan import StagePlan
from ups.train.saved_state import differing_keys
from ups.train.train_baselines import config_of_baseline
from ups.trained.checkpoint import read_document


@dataclass(frozen=True)
class PlannedBaseline:
    """A baseline that the evaluation asks for.

    Attributes:
        kind: "fno" or "unet".
        task: Its task.
        budget: How much it may be trained.
        plan: What would become of it.
    """

    kind: str
    task: str
    budget: BudgetConfig
    plan: StagePlan

    def in_run(self, config: RunConfig) -> tuple[str, RunConfig]:
        """Its stage, and what a run's configuration says of it."""
        return self.kind, config_of_baseline(config, self.kind, self.task, budget=self.budget)


def plan_baselines(config: RunConfig) -> dict[str, PlannedBaseline]:
    """Those of a run, by their names; its data are compared when it is made.

    Raises:
        ConfigError: If a budget isn't positive.
    """
    evaluation = config.evaluation
    budgets = parse_budgets(
        flops=evaluation.baseline_flops,
        samples=evaluation.baseline_samples,
        seconds=evaluation.baseline_seconds,
    )
    found = {}
    for task, budget, kind in itertools.product(config.data.tasks, budgets, DEFAULT_KINDS):
        name = f"{kind} ({task}, {budget})"
        found[name] = PlannedBaseline(kind, task, budget, _plan(config, name, kind, task, budget))
    return found


def _plan(config: RunConfig, name: str, kind: str, task: str, budget: BudgetConfig) -> StagePlan:
    path = baseline_path(config, kind, task, budget.limit)
    try:
        document = read_document(path, kind=BASELINE)
    except CheckpointError:
        return StagePlan(name, "train", "there is none yet")
    steps = document["config"]["stages"].get(kind, {}).get("steps")
    own = config_of_baseline(config, kind, task, budget=budget, steps=steps)
    if document["effort"] is None or (differing := differing_keys(document["config"], own, stage=kind)):
        return StagePlan(name, "train again", differing[0] if document["effort"] else "it is untrained")
    return StagePlan(name, "keep", "it was trained alike", done=steps or 0, steps=steps)
