"""From the scores of all trainings to a table: intervals, paired differences, verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.models.questions import TEST, Question
from benchmarks.models.training import MODELS, PERSISTENCE, Scores
from ups.eval.intervals import Interval, Paired, Resamples, compare

LABELS = {"operator": "operator", "fno": "FNO", "unet": "U-Net", PERSISTENCE: "persistence"}
OWN, PEERS = MODELS[0], MODELS[1:]
WORDS = {"ahead": "**ahead**", "behind": "behind", "can't be told": "can't be told"}
PEER_HEADS = " | ".join(f"operator / {LABELS[peer]} | verdict" for peer in PEERS)

BySeed = Mapping[int, Scores]


@dataclass(frozen=True)
class Row:
    """One test set of one question."""

    question: str  # name of the question
    set: str  # name of the test set
    num_trajectories: int  # of the set
    seeds: Sequence[int]  # training seeds of the models
    nrmse: Mapping[str, Interval]  # by model, mean over trajectories and seeds with its interval
    paired: Mapping[str, Paired]  # the operator beside each peer, on the same trajectories
    # By model, nRMSE over that of the test set of the training's distribution.
    degradation: Mapping[str, float]
    refused: Mapping[str, str]  # by model that can't take the set, why


def rows_of(question: Question, scores: Mapping[str, BySeed]) -> Iterator[Row]:
    """Rows of a question, of scores by model and seed; all models but persistence have the same seeds."""
    usual: dict[str, float] = {}
    for name in (TEST, *question.shifts):
        values = {model: values_of(by_seed, name) for model, by_seed in scores.items()}
        values = {model: by_seed for model, by_seed in values.items() if by_seed}
        if not values:
            continue
        num = len(next(iter(values.values()))[0])
        resamples = Resamples(num)
        resampled = {model: resamples.of(by_seed, row=model) for model, by_seed in values.items()}
        nrmse = {model: each.interval(is_positive=True) for model, each in resampled.items()}
        usual = usual or {model: interval.mean for model, interval in nrmse.items()}
        sets = {model: [one["sets"].get(name, {}) for one in by.values()] for model, by in scores.items()}
        refusals = {model: [s["refused"] for s in each if "refused" in s] for model, each in sets.items()}
        yield Row(
            question.name,
            name,
            num,
            tuple(sorted(scores[OWN])),
            nrmse,
            paired={
                peer: compare(resampled[OWN], resampled[peer])
                for peer in PEERS
                if peer in resampled and OWN in resampled
            },
            degradation={model: nrmse[model].mean / usual[model] for model in nrmse if model in usual},
            refused={model: reasons[0] for model, reasons in refusals.items() if reasons},
        )


def values_of(by_seed: BySeed, name: str) -> list[np.ndarray[Any, Any]]:
    """nRMSE of each trajectory, shape (B, 1), by seed; what blew up is infinite. Empty if it was refused."""
    sets = [scores["sets"].get(name, {}) for _, scores in sorted(by_seed.items())]
    if not all("nrmse" in each for each in sets):
        return []
    return [np.array([[np.inf if v is None else v] for v in each["nrmse"]]) for each in sets]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """On how many rows the operator is ahead of each peer, and where it is furthest behind."""
    totals = {}
    for peer in PEERS:
        pairs = {(row.question, row.set): row.paired[peer] for row in rows if peer in row.paired}
        verdicts = [pair.verdict for pair in pairs.values()]
        worst = max(pairs, key=lambda key: pairs[key].ratio.mean, default=None)
        totals[peer] = {
            "rows": len(pairs),
            **{verdict: verdicts.count(verdict) for verdict in WORDS},
            "worst": None if worst is None else [*worst, pairs[worst].ratio.mean],
        }
    return totals


def sentences(rows: Sequence[Row], *, begin: str, shows_worst: bool = True) -> Iterator[str]:
    """Say for each peer on how many rows the operator is ahead."""
    for peer, total in summary(rows).items():
        ahead, behind, untold = (total[verdict] for verdict in WORDS)
        furthest, worst = "", total["worst"]
        if worst is not None and shows_worst:
            furthest = f"; its largest ratio is {worst[2]:.2f}, on {worst[0]}, {worst[1]}"
        if total["rows"] or shows_worst:
            yield (
                f"- {begin} operator beside {LABELS[peer]}, {total['rows']} rows: ahead on {ahead}, "
                f"behind on {behind}; on {untold} it can't be told{furthest}."
            )


def markdown(
    questions: Sequence[Question], rows: Sequence[Row], scores: Mapping[str, Mapping[str, BySeed]]
) -> str:
    """A table a question, and what comes of all of them."""
    lines = list(sentences(rows, begin="The"))
    columns = [*MODELS, PERSISTENCE]
    for question in questions:
        of_question = [row for row in rows if row.question == question.name]
        if not of_question:
            continue
        trainings = []
        for model in filter(scores[question.name].__contains__, MODELS):
            by_seed = list(scores[question.name][model].values())
            seconds = np.mean([each["cpu_seconds"] for each in by_seed])
            size, steps = by_seed[0]["size"], by_seed[0]["steps"]
            trainings.append(f"{LABELS[model]} {size}, {steps:,} steps, {seconds:.0f} s of processor")
        lines += [
            "",
            f"### {question.title[0].upper()}{question.title[1:]}",
            "",
            f"{question.flops:.3g} FLOP each: {'; '.join(trainings)}.",
            "",
            f"| test set | n | {' | '.join(LABELS[model] for model in columns)} | {PEER_HEADS} |",
            "|---|" + "---:|" * (1 + len(columns)) + "---:|---|" * len(PEERS),
        ]
        for row in of_question:
            missing = {model: "refused" if model in row.refused else "–" for model in columns}
            cells = [
                shown_interval(row.nrmse[model]) if model in row.nrmse else missing[model]
                for model in columns
            ]
            name = "as trained" if row.set == TEST else row.set
            lines.append(f"| {' | '.join([name, str(row.num_trajectories), *cells, *peer_cells(row)])} |")
    return "\n".join(lines) + "\n"


def peer_cells(row: Row) -> Iterator[str]:
    """Ratio and verdict of each peer, below `PEER_HEADS`."""
    for peer in PEERS:
        pair = row.paired.get(peer)
        yield from ("–", "–") if pair is None else (shown_interval(pair.ratio), WORDS[pair.verdict])


def shown_interval(interval: Interval) -> str:
    if not interval.is_known:
        return f"{interval.mean:.3g}"
    return f"{interval.mean:.3g} ({interval.low:.3g} to {interval.high:.3g})"
