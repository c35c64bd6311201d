"""Train the FNO and the U-Net that stand beside an operator, within a budget.

python scripts/train_baselines.py --config configs/demo.yaml --budget-seconds 60
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ups.cli.commands import resolve_config, tell_on_stderr, telling_errors

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML file of the operator's run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as seed=1")] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="fno, unet, fno_neuraloperator; by default the first two")
    ] = None,
    budget_seconds: Annotated[float | None, typer.Option(help="wall time of each")] = None,
    budget_samples: Annotated[int | None, typer.Option(help="training windows that each sees")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="train anew what is there already")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="report as JSON on stdout")] = False,
) -> None:
    """Train each baseline on every task of a run, into <checkpoint.dir>/baselines."""
    trained: dict[str, Any] = {}
    with telling_errors(tell_on_stderr):
        # torch takes a second, which --help needn't wait for
        from ups.device import choose_device
        from ups.eval.evaluate import check_kinds
        from ups.eval.train_baseline import Budget, baseline_path, obtain_baseline

        budget, kinds = Budget(budget_seconds, budget_samples), check_kinds(kind)
        resolved = resolve_config(config, overrides or (), note=tell_on_stderr)
        device = choose_device(resolved.training.device, note=tell_on_stderr)
        for task in resolved.data.task:
            for name in kinds:
                model = obtain_baseline(
                    resolved, name, task, budget=budget, device=device, restart=restart, note=tell_on_stderr
                )
                tell_on_stderr(f"{task} {model.label}: {model.note}")
                assert model.effort is not None
                effort = {key: value for key, value in asdict(model.effort).items() if key != "curve"}
                trained[str(baseline_path(resolved, name, task, budget.limit))] = effort
    typer.echo(json.dumps(trained) if as_json else "\n".join(trained))


if __name__ == "__main__":
    app()
