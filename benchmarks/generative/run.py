"""`python -m benchmarks.generative.run`: the operator alone, with its corrector, and with students of it.

Stop it whenever you like: run again, it goes on. Trainings continue from their own states, and what is
measured is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.generative.questions import SEEDS, TASKS
from benchmarks.generative.table import markdown, scores_of, to_json
from benchmarks.generative.training import measure_costs, trained
from benchmarks.harness.commands import chosen, show_and_keep, show_progress

_HERE = Path(__file__).resolve().parent


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="a task's name, such as kicked; may be repeated")
    ] = None,
    seeds: Annotated[str, typer.Option(help="training seeds")] = ",".join(map(str, SEEDS)),
    out: Annotated[
        Path | None,
        typer.Option(help="folder of data, models and the table [default: benchmarks/generative/out]"),
    ] = None,
    docs: Annotated[bool, typer.Option("--docs", help="write it into docs/results/generative.md")] = False,
) -> None:
    """Make the data, train and measure what isn't yet, and print the table."""
    show_progress()
    torch.set_num_threads(1)
    folder = out or _HERE / "out"
    known = {task.question.name: task for task in TASKS}
    sections, values = [], {}
    for name in chosen(only, known):
        trainings, errors = [], []
        for seed in seeds.split(","):
            trainings.append(trained(known[name], int(seed), folder))
            errors.append(trainings[-1].errors())
        by_row = {row: [each[row] for each in errors] for row in errors[0]}
        scores, costs = scores_of(by_row), measure_costs(trainings[0])
        reports = [each.reports for each in trainings]
        sections.append(markdown(known[name], by_row, scores, costs, reports))
        values[name] = to_json(scores, costs)
    page = "generative" if docs else ""
    show_and_keep("\n".join(sections), folder / "table.md", {"tasks": values}, page=page)


if __name__ == "__main__":
    typer.run(main)
