"""Compare an operator with FNO and U-Net at equal wall time and at equal samples.

python scripts/compare.py --config configs/demo.yaml --out reports/compare
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML file of the operator's run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="by default <checkpoint.dir>/operator.safetensors")
    ] = None,
    split: Annotated[str | None, typer.Option(help="train, val or test; by default evaluation.split")] = None,
    budget_seconds: Annotated[
        float | None, typer.Option(help="by default what the run's training took, by its logs")
    ] = None,
    budget_samples: Annotated[
        int | None, typer.Option(help="by default the windows that the operator was trained on")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="train anew what is there already")] = False,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("reports/compare"),
    as_json: Annotated[bool, typer.Option("--json", help="report as JSON on stdout")] = False,
) -> None:
    """Train both baselines at both budgets, and evaluate all beside the operator."""
    # torch takes a second, which --help needn't wait for
    from ups.eval.baseline_files import obtain_baseline
    from ups.eval.command import expect_kinds, expect_split, open_run, telling_errors
    from ups.eval.equal_budgets import equal_budgets
    from ups.eval.evaluate import evaluate
    from ups.eval.report import write_report
    from ups.eval.report_table import show_report
    from ups.eval.training_logs import read_stage_logs

    log = Console(stderr=True, soft_wrap=True, highlight=False)

    def note(text: str) -> None:
        log.print(text, markup=False)

    with telling_errors(log):
        resolved, simulator = open_run(checkpoint, config_path=config, overrides=overrides or (), log=log)
        which = expect_split(split or resolved.evaluation.split)
        tasks = resolved.data.task
        budgets = equal_budgets(
            read_stage_logs(resolved),
            num_tasks=len(tasks),
            seconds=budget_seconds,
            samples=budget_samples,
        )
        baselines = [
            obtain_baseline(
                resolved, kind, task, budget=budget, device=simulator.device, restart=restart, note=note
            )
            for task in tasks
            for budget in budgets
            for kind in expect_kinds(None)
        ]
        report = evaluate(resolved, simulator, split=which, baselines=baselines, note=note)
        title = f"{', '.join(tasks)}: at a {' and at a '.join(map(str, budgets))} for each baseline"
        report = replace(report, title=title)
        paths = write_report(out, report)
        if as_json:
            typer.echo(json.dumps(report.to_json(), default=str))
        else:
            show_report(report, Console(soft_wrap=True, highlight=False))
        for path in paths.values():
            note(str(path))


if __name__ == "__main__":
    app()
