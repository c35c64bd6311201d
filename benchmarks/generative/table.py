"""From the errors of all seeds to a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.generative.questions import CORRECTOR, LABELS, OPERATOR, STUDENTS, Task
from benchmarks.generative.training import Cost
from benchmarks.models.table import WORDS, shown_interval
from ups.eval.ensembles import EnsembleErrors, EnsembleScores, score_ensemble
from ups.eval.generative_gates import corrector_gates, student_gates
from ups.eval.intervals import Resamples
from ups.eval.metrics import BANDS

_COLUMNS = {"mean_nrmse": "nRMSE of the mean", "crps": "CRPS", "energy_score": "energy score"}

Errors = Mapping[str, Sequence[EnsembleErrors]]  # by row, one a seed


def scores_of(errors: Errors) -> dict[str, EnsembleScores]:
    """Scores of every row over its seeds, by name; all share the resamples of the trajectories."""
    resamples = Resamples(len(next(iter(errors.values()))[0]))
    return {name: score_ensemble(by_seed, resamples=resamples, row=name) for name, by_seed in errors.items()}


def markdown(
    task: Task,
    errors: Errors,
    scores: Mapping[str, EnsembleScores],
    costs: Mapping[str, Cost],
    reports: Sequence[Mapping[str, Mapping[str, Any]]],
) -> str:
    """Write a section of the page."""
    trainings = []
    for stage in reports[0]:
        steps, seconds = (np.mean([each[stage][key] for each in reports]) for key in ("steps", "cpu_seconds"))
        trainings.append(f"{stage} {steps:,.0f} steps, {seconds:.0f} s of processor")
    why = task.why[0].upper() + task.why[1:]
    lines = [
        f"### {task.question.title}",
        "",
        f"{why}. {task.num_trajectories} test trajectories of {task.horizon} steps. Trained, mean over "
        f"{len(reports)} seeds: {'; '.join(trainings)}.",
        "",
    ]
    verdicts = []
    for name, counts in missed_gates(errors).items():
        misses = [f"misses {gate} in {num} of {len(reports)} seeds" for gate, num in sorted(counts.items())]
        verdicts.append(f"{LABELS[name].removeprefix('with ')} {' and '.join(misses) or 'passes all'}")
    gates = f"Gates on the test split: {'; '.join(verdicts)}."
    return "\n".join([*lines, *_table(scores, costs), "", gates]) + "\n"


def missed_gates(errors: Errors) -> dict[str, dict[str, int]]:
    """In how many seeds each gate is missed on the test split, by row; a row that passes all has none."""
    missed: dict[str, dict[str, int]] = {}
    for name in (CORRECTOR, *STUDENTS.values()):
        counts = missed.setdefault(name, {})
        for row, operator, teacher in zip(errors[name], errors[OPERATOR], errors[CORRECTOR], strict=True):
            verdicts = corrector_gates(row, operator)
            verdicts += [] if name == CORRECTOR else student_gates(row, teacher)
            for gate in {verdict.gate for verdict in verdicts if not verdict.passed}:
                counts[gate] = counts.get(gate, 0) + 1
    return missed


def to_json(scores: Mapping[str, EnsembleScores], costs: Mapping[str, Cost]) -> dict[str, Any]:
    """JSON values of a task's rows."""
    first = scores[OPERATOR].scores
    return {
        name: {
            **row.to_json(),
            "beside_operator": {
                metric: {"ratio": pair.ratio.mean, "verdict": pair.verdict}
                for metric, pair in row.scores.paired(first).items()
            },
            **({"ms": costs[name].milliseconds, "flops": costs[name].flops} if name in costs else {}),
        }
        for name, row in scores.items()
    }


def _table(scores: Mapping[str, EnsembleScores], costs: Mapping[str, Cost]) -> Iterator[str]:
    first = scores[OPERATOR].scores
    bands = [name for name in BANDS if f"band_{name}" in first.metrics]
    heads = [*_COLUMNS.values(), "CRPS / operator's", "verdict", "spread / skill"]
    heads += [f"{name} band" for name in bands] + ["ms a step", "FLOP a step / operator's"]
    yield f"| | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * 4 + "---|" + "---:|" * (len(heads) - 5)
    for name, row in scores.items():
        metrics, cost = row.scores.metrics, costs.get(name)
        pair = None if name == OPERATOR else row.scores.paired(first)["crps"]
        cells = [shown_interval(metrics[metric]) for metric in _COLUMNS]
        cells += ["–", "–"] if pair is None else [shown_interval(pair.ratio), WORDS[pair.verdict]]
        cells += ["–" if row.is_point else f"{metrics['spread_skill'].mean:.2f}"]
        cells += [f"{metrics[f'band_{band}'].mean:.2f}" for band in bands]
        if cost is None:
            cells += ["–", "–"]
        else:
            cells += [f"{cost.milliseconds:.3g}", f"{cost.flops / costs[OPERATOR].flops:.2f}"]
        yield f"| {LABELS[name]} | {' | '.join(cells)} |"
