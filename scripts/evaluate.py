"""Evaluate a trained operator beside its baselines, and write a report.

python scripts/evaluate.py --config configs/demo.yaml --split test --out reports/demo
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
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as data.limit=20")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file; by default what the checkpoint was made with")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="by default <checkpoint.dir>/operator.safetensors")
    ] = None,
    split: Annotated[str | None, typer.Option(help="train, val or test; by default evaluation.split")] = None,
    steps: Annotated[int | None, typer.Option(help="steps to predict; by default to the end")] = None,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("reports/evaluation"),
    title: Annotated[str | None, typer.Option(help="heading of the report")] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="name=seconds of what happened before, for the report")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="report as JSON on stdout")] = False,
) -> None:
    """Roll out on a split; baselines in <checkpoint.dir>/baselines are evaluated, too."""
    # torch takes a second, which --help needn't wait for
    from ups.eval.baseline_files import find_baselines
    from ups.eval.command import expect_split, open_run, parse_numbers, telling_errors
    from ups.eval.evaluate import evaluate
    from ups.eval.report import write_report
    from ups.eval.report_table import show_report

    log = Console(stderr=True, soft_wrap=True, highlight=False)

    def note(text: str) -> None:
        log.print(text, markup=False)

    with telling_errors(log):
        phases = parse_numbers("--phase", phase or ())
        resolved, simulator = open_run(checkpoint, config_path=config, overrides=overrides or (), log=log)
        report = evaluate(
            resolved,
            simulator,
            split=expect_split(split or resolved.evaluation.split),
            horizon=steps,
            baselines=find_baselines(resolved, simulator, note=note),
            phases=phases,
            note=note,
        )
        report = replace(report, title=title) if title else report
        paths = write_report(out, report)
        if as_json:
            typer.echo(json.dumps(report.to_json(), default=str))
        else:
            show_report(report, Console(soft_wrap=True, highlight=False))
        for path in paths.values():
            note(str(path))


if __name__ == "__main__":
    app()
