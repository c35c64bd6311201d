"""Compare an operator with FNO and U-Net at equal wall time and at equal samples.

python scripts/compare.py --config configs/demo.yaml --out reports/compare
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ups.cli.commands import tell_on_stderr, telling_errors
from ups.output import check_writable

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML file of the operator's run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="by default <checkpoint.dir>/operator.safetensors")
    ] = None,
    split: Annotated[str | None, typer.Option(help="train, val or test; by default evaluation.split")] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="fno, unet, fno_neuraloperator; by default the first two")
    ] = None,
    budget_seconds: Annotated[
        float | None, typer.Option(help="by default what the run's training took, by its logs")
    ] = None,
    budget_samples: Annotated[
        int | None, typer.Option(help="by default the windows that the operator was trained on")
    ] = None,
    also: Annotated[
        list[Path] | None, typer.Option(help="another operator of the same tasks, as a row; may be repeated")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="train anew what is there already")] = False,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("reports/compare"),
    as_json: Annotated[bool, typer.Option("--json", help="report as JSON on stdout")] = False,
) -> None:
    """Train each baseline at both budgets, and evaluate all beside the operator."""
    with telling_errors(tell_on_stderr):
        # torch takes a second, which --help needn't wait for
        from ups.eval.comparison import equal_budgets
        from ups.eval.evaluate import check_kinds, check_split, evaluate, open_others, open_run, publish
        from ups.eval.train_baseline import obtain_baseline
        from ups.eval.training_logs import read_stage_logs

        kinds = check_kinds(kind)
        check_writable(out)
        resolved, simulator = open_run(
            checkpoint, config_path=config, overrides=overrides or (), note=tell_on_stderr
        )
        others = open_others(also or (), resolved, simulator, note=tell_on_stderr)
        which = check_split(split or resolved.evaluation.split)
        tasks = resolved.data.task
        logs = read_stage_logs(resolved, note=tell_on_stderr)
        budgets = equal_budgets(
            logs,
            num_tasks=len(tasks),
            seconds=budget_seconds,
            samples=budget_samples,
        )
        baselines = [
            obtain_baseline(
                resolved,
                name,
                task,
                budget=budget,
                device=simulator.device,
                restart=restart,
                note=tell_on_stderr,
            )
            for task in tasks
            for budget in budgets
            for name in kinds
        ]
        report = evaluate(
            resolved,
            simulator,
            split=which,
            baselines=baselines,
            also=others,
            logs=logs,
            note=tell_on_stderr,
        )
        title = f"{', '.join(tasks)}: at a {' and at a '.join(map(str, budgets))} for each baseline"
        report = replace(report, title=title)
        publish(report, out, as_json=as_json, note=tell_on_stderr)


if __name__ == "__main__":
    app()
