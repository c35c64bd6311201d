"""From the errors of all seeds to a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.generative.questions import CORRECTOR, LABELS, OPERATOR, STUDENTS, Task
from benchmarks.generative.train import Cost
from benchmarks.models.table import WORDS, shown_interval
from ups.eval.ensembles import EnsembleErrors, EnsembleScores, score_ensemble
from ups.eval.generative_gates import corrector_gates, student_gates
from ups.eval.intervals import Resamples
from ups.eval.metrics import BANDS

_COLUMNS = {"mean_nrmse": "nRMSE of the mean", "crps": "CRPS", "energy_score": "energy score"}


def scores_of(errors: Mapping[str, Sequence[EnsembleErrors]]) -> dict[str, EnsembleScores]:
    """Scores of every row over its seeds, by name; all share the resamples of the trajectories."""
    resamples = Resamples(len(next(iter(errors.values()))[0]))
    return {name: score_ensemble(by_seed, resamples=resamples, row=name) for name, by_seed in errors.items()}


def missed_gates(errors: Mapping[str, Sequence[EnsembleErrors]]) -> dict[str, dict[str, int]]:
    """In how many seeds each gate is missed on the test split, by row; a row that passes all has none."""
    found: dict[str, dict[str, int]] = {}
    for name in (CORRECTOR, *STUDENTS.values()):
        counts = found.setdefault(name, {})
        for own, operator, teacher in zip(errors[name], errors[OPERATOR], errors[CORRECTOR], strict=True):
            verdicts = corrector_gates(own, operator)
            verdicts += [] if name == CORRECTOR else student_gates(own, teacher)
            for gate in {verdict.gate for verdict in verdicts if not verdict.passed}:
                counts[gate] = counts.get(gate, 0) + 1
    return found


def markdown(
    task: Task,
    missed: Mapping[str, Mapping[str, int]],
    scores: Mapping[str, EnsembleScores],
    costs: Mapping[str, Cost],
    reports: Sequence[Mapping[str, Mapping[str, Any]]],
) -> str:
    """A section of the page."""
    lines = [f"### {task.question.title}", "", f"{_sentence(task)} {_trained(reports)}", ""]
    gates = gates_sentence(missed, num_seeds=len(reports))
    return "\n".join([*lines, *_table(scores, costs), "", gates]) + "\n"


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


def _sentence(task: Task) -> str:
    why = task.why[0].upper() + task.why[1:]
    return f"{why}. {task.num_trajectories} test trajectories of {task.horizon} steps."


def gates_sentence(missed: Mapping[str, Mapping[str, int]], *, num_seeds: int) -> str:
    """Which rows pass the gates of their stage, judged by these test ensembles."""
    parts = []
    for name, counts in missed.items():
        said = [f"misses {gate} in {count} of {num_seeds} seeds" for gate, count in sorted(counts.items())]
        parts.append(f"{LABELS[name].removeprefix('with ')} {' and '.join(said) or 'passes all'}")
    return f"Gates on the test split: {'; '.join(parts)}."


def _trained(reports: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """What the trainings took, mean over seeds."""
    parts = []
    for stage in reports[0]:
        steps = [each[stage]["steps"] for each in reports]
        seconds = [each[stage]["cpu_seconds"] for each in reports]
        parts.append(f"{stage} {np.mean(steps):,.0f} steps, {np.mean(seconds):.0f} s of processor")
    return f"Trained, mean over {len(reports)} seeds: {'; '.join(parts)}."


def _table(scores: Mapping[str, EnsembleScores], costs: Mapping[str, Cost]) -> Iterator[str]:
    bands = [name for name in BANDS if f"band_{name}" in scores[OPERATOR].scores.metrics]
    heads = [*_COLUMNS.values(), "CRPS / operator's", "verdict", "spread / skill"]
    heads += [f"{name} band" for name in bands] + ["ms a step", "FLOP a step / operator's"]
    yield f"| | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * 4 + "---|" + "---:|" * (len(heads) - 5)
    first = scores[OPERATOR].scores
    for name, row in scores.items():
        cells = [shown_interval(row.scores.metrics[metric]) for metric in _COLUMNS]
        pair = None if name == OPERATOR else row.scores.paired(first)["crps"]
        cells += ["–", "–"] if pair is None else [shown_interval(pair.ratio), WORDS[pair.verdict]]
        cells += ["–" if row.is_point else f"{row.scores.metrics['spread_skill'].mean:.2f}"]
        cells += [f"{row.scores.metrics[f'band_{band}'].mean:.2f}" for band in bands]
        cost = costs.get(name)
        cells += ["–", "–"] if cost is None else [f"{cost.milliseconds:.3g}", _share(cost, costs[OPERATOR])]
        yield f"| {LABELS[name]} | {' | '.join(cells)} |"


def _share(cost: Cost, operator: Cost) -> str:
    return f"{cost.flops / operator.flops:.2f}"
