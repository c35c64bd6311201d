"""`python -m benchmarks.models.run`: models of one budget on several tasks, seeds and shifted test sets.

Stop it whenever you like: run again, it goes on. Scores of a training are written in one step, and trainings
continue from their own states.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.harness import machine
from benchmarks.harness.report import write_docs
from benchmarks.models.data import make_all_data
from benchmarks.models.questions import FULL, SMALL, Question
from benchmarks.models.table import Row, markdown, rows_of, summary, to_json
from benchmarks.models.train import MODELS, PERSISTENCE, known_scores, train_and_score
from ups.output import with_nulls, write_atomically

_HERE = Path(__file__).resolve().parent
_PAGE = _HERE.parents[1] / "docs" / "results" / "models.md"
BEGIN, END = "<!-- begin table -->\n", "<!-- end table -->"
SEEDS = (0, 1, 2)

console = Console(stderr=True)


def main(
    full: Annotated[bool, typer.Option("--full", help="full sizes and two more tasks, for a GPU")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="a task's name, such as burgers; may be repeated")
    ] = None,
    models: Annotated[str, typer.Option(help="which of them")] = ",".join(MODELS),
    seeds: Annotated[str, typer.Option(help="training seeds")] = ",".join(map(str, SEEDS)),
    out: Annotated[
        Path | None,
        typer.Option(help="folder of data, scores and the table [default: benchmarks/models/out]"),
    ] = None,
    docs: Annotated[bool, typer.Option("--docs", help="write the table into docs/results/models.md")] = False,
) -> None:
    """Make the data, train what isn't trained yet, and print the table of what is."""
    folder = out or _HERE / ("out-full" if full else "out")
    known = {question.name: question for question in (FULL if full else SMALL)}
    if unknown := [name for name in only or () if name not in known]:
        raise typer.BadParameter(f"{unknown[0]}: expected {', '.join(known)}", param_hint="--only")
    questions = [known[name] for name in only or known]
    wanted = [(model, seed) for seed in map(int, seeds.split(",")) for model in models.split(",")]
    scores = run_questions(questions, wanted, folder=folder)
    rows = [row for question in questions for row in _rows(question, scores[question.name])]
    about = {"machine": machine.describe(folder), "torch": torch.__version__, "summary": summary(rows)}
    document = {**about, "rows": [to_json(row) for row in rows]}
    write_atomically(folder / "table.json", json.dumps(with_nulls(document), indent=1).encode())
    text = markdown(questions, rows, scores)
    write_atomically(folder / "table.md", text.encode())
    Console().print(text, markup=False, soft_wrap=True)
    if docs:
        write_docs(_PAGE, text, begin=BEGIN, end=END)


def run_questions(
    questions: Sequence[Question], wanted: Sequence[tuple[str, int]], *, folder: Path
) -> dict[str, dict[str, dict[int, Any]]]:
    """Scores by question, model and seed; what is missing is trained, one question after the other."""
    found: dict[str, dict[str, dict[int, Any]]] = {}
    began = time.perf_counter()
    for question in questions:
        config_path = make_all_data(question, folder / question.name, note=_note)
        by_model = found.setdefault(question.name, {})
        for number, (model, seed) in enumerate([(PERSISTENCE, 0), *wanted]):
            scores = known_scores(question, model, seed, folder)
            if scores is None:
                _note(f"{question.name}: {model}, seed {seed} ({number} of {len(wanted)})")
                scores = train_and_score(
                    question, model, seed, config_path=config_path, folder=folder, note=_note
                )
            by_model.setdefault(model, {})[seed] = scores
    _note(f"all trained and scored after {time.perf_counter() - began:.0f} s")
    return found


def _rows(question: Question, scores: dict[str, dict[int, Any]]) -> Iterator[Row]:
    if MODELS[0] in scores:
        yield from rows_of(question, scores)


def _note(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
