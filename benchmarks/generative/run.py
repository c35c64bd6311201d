"""`python -m benchmarks.generative.run`: the operator alone, with its corrector, and with students of it.

Stop it whenever you like: run again, it goes on. Trainings continue from their own states, and what is
measured is kept.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.generative.questions import SEEDS, TASKS, Task
from benchmarks.generative.table import markdown, missed_gates, scores_of, to_json
from benchmarks.generative.train import forecasters_of, measure, measure_costs, reports_of
from benchmarks.harness import machine
from benchmarks.harness.report import write_docs
from ups.output import with_nulls, write_atomically

_HERE = Path(__file__).resolve().parent
_PAGE = _HERE.parents[1] / "docs" / "results" / "generative.md"
BEGIN, END = "<!-- begin table -->\n", "<!-- end table -->"

console = Console(stderr=True)


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
    torch.set_num_threads(1)
    folder = out or _HERE / "out"
    known = {task.question.name: task for task in TASKS}
    if unknown := [name for name in only or () if name not in known]:
        raise typer.BadParameter(f"{unknown[0]}: expected {', '.join(known)}", param_hint="--only")
    numbers = [int(seed) for seed in seeds.split(",")]
    parts = [_section(known[name], numbers, folder) for name in only or known]
    text = "\n".join(section for section, _ in parts)
    document = {"machine": machine.describe(folder), "torch": torch.__version__}
    tasks = {name: found for name, (_, found) in zip(only or known, parts, strict=True)}
    values = with_nulls({**document, "tasks": tasks})
    write_atomically(folder / "table.json", json.dumps(values, indent=1).encode())
    write_atomically(folder / "table.md", text.encode())
    Console().print(text, markup=False, soft_wrap=True)
    if docs:
        write_docs(_PAGE, text, begin=BEGIN, end=END)


def _section(task: Task, seeds: list[int], folder: Path) -> tuple[str, dict[str, object]]:
    """The text of a task and its JSON values."""
    by_seed = [measure(task, seed, folder, note=_note) for seed in seeds]
    errors = {row: [found[row] for found in by_seed] for row in by_seed[0]}
    scores = scores_of(errors)
    costs = measure_costs(*forecasters_of(task, seeds[0], folder))
    reports = [reports_of(task, seed, folder) for seed in seeds]
    text = markdown(task, missed_gates(errors), scores, costs, reports)
    return text, to_json(scores, costs)


def _note(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
