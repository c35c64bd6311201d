"""From the scores of all trainings to a table: intervals, paired differences, verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.models.questions import TEST, Question
from benchmarks.models.train import MODELS, PERSISTENCE
from ups.eval.intervals import Interval, Paired, Resampled, Resamples, compare

LABELS = {"operator": "operator", "fno": "FNO", "unet": "U-Net", PERSISTENCE: "persistence"}
OWN, PEERS = MODELS[0], MODELS[1:]
WORDS = {"ahead": "**ahead**", "behind": "behind", "can't be told": "can't be told"}

Scores = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One test set of one question.

    Attributes:
        question: Name of the question.
        set: Name of the test set.
        num_trajectories: Of the set.
        seeds: Training seeds of the models.
        nrmse: By model, mean over trajectories and seeds with its interval.
        paired: The operator beside each peer, on the same trajectories.
        degradation: By model, nRMSE over that of the test set of the training's distribution.
        refused: By model that can't take the set, why.
    """

    question: str
    set: str
    num_trajectories: int
    seeds: Sequence[int]
    nrmse: Mapping[str, Interval]
    paired: Mapping[str, Paired]
    degradation: Mapping[str, float]
    refused: Mapping[str, str]


def rows_of(question: Question, scores: Mapping[str, Mapping[int, Scores]]) -> Iterator[Row]:
    """The rows of a question.

    Args:
        question: The question.
        scores: What `train_and_score` returned, by model and seed; all models but persistence have the same
            seeds.
    """
    seeds = tuple(sorted(scores[OWN]))
    usual: dict[str, float] = {}
    for name in (TEST, *question.shifts):
        found = {model: values_of(by_seed, name) for model, by_seed in scores.items()}
        known = {model: values for model, values in found.items() if values}
        if not known:
            continue
        resamples = Resamples(len(next(iter(known.values()))[0]))
        resampled = {model: resamples.of(values, row=model) for model, values in known.items()}
        nrmse = {model: each.interval(is_positive=True) for model, each in resampled.items()}
        usual = usual or {model: interval.mean for model, interval in nrmse.items()}
        yield Row(
            question.name,
            name,
            len(next(iter(known.values()))[0]),
            seeds,
            nrmse,
            paired=_paired(resampled),
            degradation={model: nrmse[model].mean / usual[model] for model in nrmse if model in usual},
            refused={model: reason for model, by in scores.items() if (reason := _refusal(by, name))},
        )


def values_of(by_seed: Mapping[int, Scores], name: str) -> list[np.ndarray[Any, Any]]:
    """nRMSE of each trajectory, shape (B, 1), by seed; what blew up is infinite. Empty if it was refused."""
    sets = [scores["sets"].get(name, {}) for _, scores in sorted(by_seed.items())]
    if not all("nrmse" in each for each in sets):
        return []
    return [np.array([[np.inf if v is None else v] for v in each["nrmse"]]) for each in sets]


def _refusal(by_seed: Mapping[int, Scores], name: str) -> str:
    sets = (scores["sets"].get(name, {}) for scores in by_seed.values())
    return next((each["refused"] for each in sets if "refused" in each), "")


def _paired(resampled: Mapping[str, Resampled]) -> dict[str, Paired]:
    if OWN not in resampled:
        return {}
    return {peer: compare(resampled[OWN], resampled[peer]) for peer in PEERS if peer in resampled}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """On how many rows the operator is ahead of each peer, and where it is furthest behind."""
    found = {}
    for peer in PEERS:
        pairs = {(row.question, row.set): row.paired[peer] for row in rows if peer in row.paired}
        verdicts = [pair.verdict for pair in pairs.values()]
        worst = max(pairs, key=lambda key: pairs[key].ratio.mean, default=None)
        found[peer] = {
            "rows": len(pairs),
            **{verdict: verdicts.count(verdict) for verdict in WORDS},
            "worst": None if worst is None else [*worst, pairs[worst].ratio.mean],
        }
    return found


def markdown(questions: Sequence[Question], rows: Sequence[Row], scores: Mapping[str, Any]) -> str:
    """A table a question, and what comes of all of them."""
    lines = [_sentence(peer, found) for peer, found in summary(rows).items()]
    for question in questions:
        own = [row for row in rows if row.question == question.name]
        if own:
            lines += ["", f"### {question.title[0].upper()}{question.title[1:]}", ""]
            lines += [_trained(question, scores[question.name]), "", *_table(own)]
    return "\n".join(lines) + "\n"


def _sentence(peer: str, found: Mapping[str, Any]) -> str:
    worst = found["worst"]
    furthest = "" if worst is None else f"; its largest ratio is {worst[2]:.2f}, on {worst[0]}, {worst[1]}"
    ahead, behind, untold = (found[verdict] for verdict in WORDS)
    return (
        f"- The operator beside {LABELS[peer]}, {found['rows']} rows: ahead on {ahead}, behind on {behind}; "
        f"on {untold} it can't be told{furthest}."
    )


def _trained(question: Question, scores: Mapping[str, Mapping[int, Scores]]) -> str:
    """What the trainings of a question were."""
    parts = []
    for model in filter(scores.__contains__, MODELS):
        by_seed = list(scores[model].values())
        steps, seconds = by_seed[0]["steps"], [each["cpu_seconds"] for each in by_seed]
        parts.append(
            f"{LABELS[model]} {by_seed[0]['size']}, {steps:,} steps, {np.mean(seconds):.0f} s of processor"
        )
    return f"{question.flops:.3g} FLOP each: {'; '.join(parts)}."


def _table(rows: Sequence[Row]) -> Iterator[str]:
    columns = [OWN, *PEERS, PERSISTENCE]
    yield (
        f"| test set | n | {' | '.join(LABELS[model] for model in columns)} | "
        + " | ".join(f"operator / {LABELS[peer]} | verdict" for peer in PEERS)
        + " |"
    )
    yield "|---|" + "---:|" * (1 + len(columns)) + "---:|---|" * len(PEERS)
    for row in rows:
        cells = [_cell(row, model) for model in columns]
        for peer in PEERS:
            pair = row.paired.get(peer)
            cells += ["–", "–"] if pair is None else [shown_interval(pair.ratio), WORDS[pair.verdict]]
        name = "as trained" if row.set == TEST else row.set
        yield f"| {name} | {row.num_trajectories} | {' | '.join(cells)} |"


def _cell(row: Row, model: str) -> str:
    if model not in row.nrmse:
        return "refused" if model in row.refused else "–"
    return shown_interval(row.nrmse[model])


def shown_interval(interval: Interval) -> str:
    if not interval.is_known:
        return f"{interval.mean:.3g}"
    return f"{interval.mean:.3g} ({interval.low:.3g} to {interval.high:.3g})"


def to_json(row: Row) -> dict[str, Any]:
    """JSON values of a row."""
    return asdict(row)
