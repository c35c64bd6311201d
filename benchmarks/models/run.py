"""`python -m benchmarks.models.run`: models of one budget on several tasks, seeds and shifted test sets.

Stop it whenever you like: run again, it goes on. Scores of a training are written in one step, and trainings
continue from their own states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.commands import chosen, show_and_keep, show_progress
from benchmarks.models.questions import FULL, SMALL, Question
from benchmarks.models.table import OWN, markdown, rows_of, summary
from benchmarks.models.training import MODELS, PERSISTENCE, Scores, make_data, scores_of

_HERE = Path(__file__).resolve().parent
SEEDS = "0,1,2"


def main(
    full: Annotated[bool, typer.Option("--full", help="full sizes and two more tasks, for a GPU")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="a task's name, such as burgers; may be repeated")
    ] = None,
    models: Annotated[str, typer.Option(help="which of them")] = ",".join(MODELS),
    seeds: Annotated[str, typer.Option(help="training seeds")] = SEEDS,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of data, scores and the table [default: benchmarks/models/out]"),
    ] = None,
    docs: Annotated[bool, typer.Option("--docs", help="write the table into docs/results/models.md")] = False,
) -> None:
    """Make the data, train what isn't trained yet, and print the table of what is."""
    show_progress()
    folder = out or _HERE / ("out-full" if full else "out")
    known = {question.name: question for question in (FULL if full else SMALL)}
    questions = [known[name] for name in chosen(only, known)]
    trainings = [(model, int(seed)) for seed in seeds.split(",") for model in models.split(",")]
    scores = run_questions(questions, trainings, folder=folder)
    rows = [row for q in questions if OWN in scores[q.name] for row in rows_of(q, scores[q.name])]
    text = markdown(questions, rows, scores)
    document = {"summary": summary(rows), "rows": [asdict(row) for row in rows]}
    show_and_keep(text, folder / "table.md", document, page="models" if docs else "")


def run_questions(
    questions: Sequence[Question], trainings: Sequence[tuple[str, int]], *, folder: Path
) -> dict[str, dict[str, dict[int, Scores]]]:
    """Scores by question, model and seed; what is missing is trained, one question after the other."""
    scores: dict[str, dict[str, dict[int, Scores]]] = {}
    for question in questions:
        make_data(question, folder / question.name)
        for model, seed in [(PERSISTENCE, 0), *trainings]:
            by_seed = scores.setdefault(question.name, {}).setdefault(model, {})
            by_seed[seed] = scores_of(question, model, seed, folder)
    return scores


if __name__ == "__main__":
    typer.run(main)
