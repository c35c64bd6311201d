"""Evaluate a trained operator beside its baselines, and write a report.

python scripts/evaluate.py --config configs/demo.yaml --split test --out reports/demo
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
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as data.limit=20")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file; by default what the checkpoint was made with")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="by default <checkpoint.dir>/operator.safetensors")
    ] = None,
    split: Annotated[str | None, typer.Option(help="train, val or test; by default evaluation.split")] = None,
    steps: Annotated[int | None, typer.Option(help="steps to predict; by default to the end")] = None,
    also: Annotated[
        list[Path] | None, typer.Option(help="another operator of the same tasks, as a row; may be repeated")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("reports/evaluation"),
    title: Annotated[str | None, typer.Option(help="heading of the report")] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="name=seconds of what happened before, for the report")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="report as JSON on stdout")] = False,
) -> None:
    """Roll out on a split; baselines in <checkpoint.dir>/baselines are evaluated, too."""
    with telling_errors(tell_on_stderr):
        # torch takes a second, which --help needn't wait for
        from ups.eval.evaluate import check_split, evaluate, open_others, open_run, parse_numbers, publish
        from ups.eval.train_baseline import find_baselines

        check_writable(out)
        phases = parse_numbers("--phase", phase or ())
        resolved, simulator = open_run(
            checkpoint, config_path=config, overrides=overrides or (), note=tell_on_stderr
        )
        others = open_others(also or (), resolved, simulator, note=tell_on_stderr)
        report = evaluate(
            resolved,
            simulator,
            split=check_split(split or resolved.evaluation.split),
            horizon=steps,
            baselines=find_baselines(resolved, simulator, note=tell_on_stderr),
            also=others,
            phases=phases,
            note=tell_on_stderr,
        )
        report = replace(report, title=title) if title else report
        publish(report, out, as_json=as_json, note=tell_on_stderr)


if __name__ == "__main__":
    app()
