"""`python -m benchmarks.models.budgets`: the models with as many samples, and with as much processor time.

The models benchmark gives all models one budget of counted operations. Here FNO has a quarter of it, and the
others are trained twice: on as many samples as FNO, and for as many steps as take as long as FNO's, by steps
that are timed in turns in one process. Stop it whenever you like: run again, it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.models.data import make_all_data, training_identity
from benchmarks.models.questions import SMALL, TEST, Question
from benchmarks.models.table import LABELS, PEERS, WORDS, Row, rows_of, shown_interval, summary
from benchmarks.models.timed import Timed, ratio_of_times
from benchmarks.models.train import MODELS, known_scores, train_and_score
from ups.config import load_config
from ups.output import write_atomically

_HERE = Path(__file__).resolve().parent
SHARE = 0.25  # of the benchmark's counted operations, for FNO
UNIT = "fno"
SEEDS = (0, 1, 2)
LIMITS = {"samples": "equal samples", "seconds": "equal processor time"}
QUESTIONS = {question.name: replace(question, flops=SHARE * question.flops) for question in SMALL}

Scores = dict[str, dict[int, Any]]  # by model and seed
console = Console(stderr=True)


def main(
    tasks: Annotated[str, typer.Option(help="which of them")] = ",".join(QUESTIONS),
    models: Annotated[str, typer.Option(help="beside FNO")] = ",".join(m for m in MODELS if m != UNIT),
    seeds: Annotated[str, typer.Option(help="training seeds")] = ",".join(map(str, SEEDS)),
    out: Annotated[
        Path | None, typer.Option(help="folder of data and scores [default: benchmarks/models/out-budgets]")
    ] = None,
) -> None:
    """Train what isn't trained yet, and print the table of what is."""
    torch.set_num_threads(1)
    folder = out or _HERE / "out-budgets"
    wanted, numbers = models.split(","), [int(seed) for seed in seeds.split(",")]
    rows: dict[str, list[Row]] = {limit: [] for limit in LIMITS}
    found: dict[tuple[str, str], Scores] = {}
    for question in (QUESTIONS[name] for name in tasks.split(",")):
        for limit, scores in scores_of(question, wanted, numbers, folder).items():
            found[question.name, limit] = scores
            rows[limit] += rows_of(question, scores)
    text = markdown(rows, found)
    write_atomically(folder / "budgets.md", text.encode())
    Console().print(text, markup=False, soft_wrap=True)


def scores_of(
    question: Question, models: Sequence[str], seeds: Sequence[int], folder: Path
) -> dict[str, Scores]:
    """Scores of a question by limit, of FNO and of the models beside it."""
    config_path = make_all_data(question, folder / question.name, note=_note)
    unit = {seed: _trained(question, UNIT, seed, config_path, folder) for seed in seeds}
    config = load_config(config_path, overrides=question.overrides)
    identity = training_identity(question)
    found: dict[str, Scores] = {limit: {UNIT: unit} for limit in LIMITS}
    for model in models:
        timed = (Timed(name, config) for name in (model, UNIT))
        ratio = ratio_of_times(*timed, folder / "ratios" / f"{question.name}-{model}-{identity}.json")
        for limit in LIMITS:
            for seed in seeds:
                steps = round(unit[seed]["steps"] / (ratio if limit == "seconds" else 1.0))
                scores = _trained(question, model, seed, config_path, folder, limit=limit, steps=steps)
                found[limit].setdefault(model, {})[seed] = scores
    return found


def _trained(
    question: Question,
    model: str,
    seed: int,
    config_path: Path,
    folder: Path,
    *,
    limit: str = "",
    steps: int | None = None,
) -> dict[str, Any]:
    scores = known_scores(question, model, seed, folder, variant=limit)
    if scores is None or steps not in (None, scores["steps"]):
        _note(f"{question.name}: {model}, seed {seed}, {LIMITS.get(limit, 'counted operations')}")
        scores = train_and_score(
            question,
            model,
            seed,
            config_path=config_path,
            folder=folder,
            note=_note,
            variant=limit,
            steps=None if steps is None else lambda stage, config: steps,
        )
    return scores


def markdown(rows: Mapping[str, Sequence[Row]], scores: Mapping[tuple[str, str], Scores]) -> str:
    """A sentence a limit and model, and a table of the test sets of the training's distribution."""
    lines = [line for limit in LIMITS for line in _sentences(limit, rows[limit])]
    lines += [
        "",
        "| task | budget | " + " | ".join(f"{LABELS[model]}: steps, s | nRMSE" for model in MODELS) + " | "
        "" + " | ".join(f"operator / {LABELS[peer]} | verdict" for peer in PEERS) + " |",
        "|---|---|" + "---:|---:|" * len(MODELS) + "---:|---|" * len(PEERS),
    ]
    for pair in zip(*rows.values(), strict=True):
        for limit, row in zip(rows, pair, strict=True):
            if row.set == TEST:
                lines.append(_line(limit, row, scores[row.question, limit]))
    return "\n".join(lines) + "\n"


def _sentences(limit: str, rows: Sequence[Row]) -> Iterator[str]:
    for peer, found in summary(rows).items():
        ahead, behind, untold = (found[verdict] for verdict in WORDS)
        if found["rows"]:
            yield (
                f"- {LIMITS[limit].capitalize()}, the operator beside {LABELS[peer]}, {found['rows']} rows: "
                f"ahead on {ahead}, behind on {behind}; on {untold} it can't be told."
            )


def _line(limit: str, row: Row, scores: Scores) -> str:
    cells = [row.question, LIMITS[limit]]
    for model in MODELS:
        if model not in scores:
            cells += ["–", "–"]
            continue
        each = list(scores[model].values())
        seconds = sum(one["cpu_seconds"] for one in each) / len(each)
        cells += [f"{each[0]['steps']:,}, {seconds:.0f}", shown_interval(row.nrmse[model])]
    for peer in PEERS:
        pair = row.paired.get(peer)
        cells += ["–", "–"] if pair is None else [shown_interval(pair.ratio), WORDS[pair.verdict]]
    return f"| {' | '.join(cells)} |"


def _note(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
