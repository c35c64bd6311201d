"""`python -m benchmarks.models.budgets`: the models with as many samples, and with as much processor time.

The models benchmark gives all models one budget of counted operations. Here FNO has a quarter of it, and the
others are trained twice: on as many samples as FNO, and for as many steps as take as long as FNO's, by steps
that are timed in turns in one process. Stop it whenever you like: run again, it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness.commands import show_and_keep, show_progress
from benchmarks.models.questions import SMALL, TEST, Question
from benchmarks.models.run import SEEDS
from benchmarks.models.table import LABELS, PEER_HEADS, PEERS, Row, peer_cells, rows_of, sentences
from benchmarks.models.table import shown_interval as shown
from benchmarks.models.training import MODELS, Scores, identity_of, make_data, ratio_of_times, scores_of
from ups.config import load_config

_HERE = Path(__file__).resolve().parent
SHARE = 0.25  # of the benchmark's counted operations, for FNO
UNIT = "fno"
LIMITS = {"samples": "equal samples", "seconds": "equal processor time"}
QUESTIONS = {question.name: replace(question, flops=SHARE * question.flops) for question in SMALL}

ByModel = dict[str, dict[int, Scores]]  # and seed


def main(
    tasks: Annotated[str, typer.Option(help="which of them")] = ",".join(QUESTIONS),
    models: Annotated[str, typer.Option(help="beside FNO")] = ",".join(m for m in MODELS if m != UNIT),
    seeds: Annotated[str, typer.Option(help="training seeds")] = SEEDS,
    out: Annotated[
        Path | None, typer.Option(help="folder of data and scores [default: benchmarks/models/out-budgets]")
    ] = None,
) -> None:
    """Train what isn't trained yet, and print the table of what is."""
    show_progress()
    torch.set_num_threads(1)
    folder = out or _HERE / "out-budgets"
    rows: dict[str, list[Row]] = {limit: [] for limit in LIMITS}
    scores: dict[tuple[str, str], ByModel] = {}
    for question in (QUESTIONS[name] for name in tasks.split(",")):
        by_limit = scores_by_limit(question, models.split(","), [*map(int, seeds.split(","))], folder)
        for limit, by_model in by_limit.items():
            scores[question.name, limit] = by_model
            rows[limit] += rows_of(question, by_model)
    show_and_keep(markdown(rows, scores), folder / "budgets.md")


def scores_by_limit(
    question: Question, models: Sequence[str], seeds: Sequence[int], folder: Path
) -> dict[str, ByModel]:
    """Scores of a question by limit, of FNO and of the models beside it."""
    path = make_data(question, folder / question.name)
    unit = {seed: scores_of(question, UNIT, seed, folder) for seed in seeds}
    config = load_config(path, overrides=question.overrides)
    scores: dict[str, ByModel] = {limit: {UNIT: unit} for limit in LIMITS}
    for model in models:
        ratios = folder / "ratios" / f"{question.name}-{model}-{identity_of(question)}.json"
        ratio = ratio_of_times((model, config), (UNIT, config), ratios)
        for limit in LIMITS:
            for seed in seeds:
                steps = round(unit[seed]["steps"] / (ratio if limit == "seconds" else 1.0))
                by_seed = scores[limit].setdefault(model, {})
                by_seed[seed] = scores_of(question, model, seed, folder, variant=limit, steps=steps)
    return scores


def markdown(rows: Mapping[str, Sequence[Row]], scores: Mapping[tuple[str, str], ByModel]) -> str:
    """A sentence a limit and model, and a table of the test sets of the training's distribution."""
    lines = [
        line
        for limit, words in LIMITS.items()
        for line in sentences(rows[limit], begin=f"{words.capitalize()}, the", shows_worst=False)
    ]
    heads = " | ".join(f"{LABELS[model]}: steps, s | nRMSE" for model in MODELS)
    lines += ["", f"| task | budget | {heads} | {PEER_HEADS} |"]
    lines += ["|---|---|" + "---:|---:|" * len(MODELS) + "---:|---|" * len(PEERS)]
    for pair in zip(*rows.values(), strict=True):
        for limit, row in zip(rows, pair, strict=True):
            if row.set != TEST:
                continue
            cells = [row.question, LIMITS[limit]]
            for model in MODELS:
                by_seed = list(scores[row.question, limit].get(model, {}).values())
                if not by_seed:
                    cells += ["–", "–"]
                    continue
                seconds = sum(each["cpu_seconds"] for each in by_seed) / len(by_seed)
                cells += [f"{by_seed[0]['steps']:,}, {seconds:.0f}", shown(row.nrmse[model])]
            lines.append(f"| {' | '.join([*cells, *peer_cells(row)])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
