"""Train one stage.

python scripts/train.py --config configs/demo.yaml --stage autoencoder training.lr=1e-3
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ups.config import dump_config, load_config
from ups.errors import ConfigWarning, UpsError
from ups_store.errors import StoreError

_EXIT_INTERRUPTED = 5  # as in `ups_store.build`

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as training.lr=1e-4")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file")] = None,
    stage: Annotated[str, typer.Option(help="what to train")] = "autoencoder",
    epochs: Annotated[int | None, typer.Option(help="as stages.<stage>.epochs")] = None,
    seed: Annotated[int | None, typer.Option(help="as seed")] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="begin anew, not where a run was stopped")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="show the resolved configuration and stop")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="report as JSON on stdout")] = False,
) -> None:
    """Train a stage; run it again to continue after an interruption."""
    log = Console(stderr=True, soft_wrap=True, highlight=False)
    flags = {f"stages.{stage}.epochs": epochs, "seed": seed}
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConfigWarning)
            resolved = load_config(config, overrides=[*(overrides or ()), *given])
        for warning in caught:
            log.print(f"warning: {warning.message}", markup=False)
        if print_config:
            typer.echo(dump_config(resolved), nl=False)
            return
        from ups.train.run import run_stage  # torch takes a second, which mistakes needn't wait for

        report = run_stage(stage, resolved, restart=restart, note=lambda text: log.print(text, markup=False))
    except (UpsError, StoreError) as error:
        log.print(f"error: {error}", markup=False)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        log.print("interrupted")
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    typer.echo(json.dumps(report, indent=2)) if as_json else _show(report)


def _show(report: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    latent = report["latent"]
    rounded = next(key for key in report if key.startswith("floor_nrmse_"))
    table = Table(
        "fields", "latent tokens", "compression", "floor, nRMSE", rounded.removeprefix("floor_nrmse_")
    )
    for name, error in report["floor_nrmse"].items():
        size = f"{latent['tokens']} x {latent['dim']}"
        ratio = f"{report['compression'][name]:.3g}x"
        table.add_row(name, size, ratio, f"{error:.3%}", f"{report[rounded][name]:.3%}")
    console.print(table)
    for name, ratio in report["compression"].items():
        if ratio <= 1:
            console.print(f"warning: latents of {name} are no smaller than the fields ({ratio:.2g}x)")
    console.print(f"{report['checkpoint']}\n{report['figure']}", markup=False)


if __name__ == "__main__":
    app()
