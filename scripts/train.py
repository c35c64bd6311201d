"""Train one stage, or all of them.

python scripts/train.py --config configs/demo.yaml --stage autoencoder training.lr=1e-3
torchrun --nproc-per-node 2 scripts/train.py --config configs/demo.yaml --stage all
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ups.config import RunConfig, dump_config, load_config
from ups.errors import ConfigError, ConfigWarning, OutputError, UpsError
from ups_store.errors import StoreError

_EXIT_INTERRUPTED = 5  # as in `ups_store.build`

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as training.lr=1e-4")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file")] = None,
    stage: Annotated[
        str, typer.Option(help="what to train: autoencoder, joint, operator, or all")
    ] = "autoencoder",
    epochs: Annotated[int | None, typer.Option(help="as stages.<stage>.epochs")] = None,
    seed: Annotated[int | None, typer.Option(help="as seed")] = None,
    allow_unknown_encoder: Annotated[
        bool, typer.Option("--allow-unknown-encoder", help="as training.allow_unknown_encoder=true")
    ] = False,
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
    try:
        given = [*(overrides or ()), *_flags(stage, epochs, seed, allow_unknown_encoder)]
        resolved = _resolve(config, given, log)
        if print_config:
            typer.echo(dump_config(resolved), nl=False)
            return
        report = _train(stage, resolved, config=config, overrides=given, restart=restart, log=log)
    except (UpsError, StoreError) as error:
        _tell(f"error: {error}", log)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        ours = OutputError.of(error, error.filename or "a file", doing="can't be used")
        _tell(f"error: {ours}", log)
        raise typer.Exit(ours.exit_code) from None
    except KeyboardInterrupt:
        log.print("interrupted")
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    if _rank() == 0:
        _report(report, as_json=as_json)


def _flags(stage: str, epochs: int | None, seed: int | None, allow_unknown_encoder: bool) -> list[str]:
    """What the flags say, as overrides."""
    if stage == "all" and epochs is not None:
        raise ConfigError("--epochs with --stage all", expected="stages.<stage>.epochs=... of each stage")
    flags = {f"stages.{stage}.epochs": epochs, "seed": seed}
    flags["training.allow_unknown_encoder"] = "true" if allow_unknown_encoder else None
    return [f"{key}={value}" for key, value in flags.items() if value is not None]


def _resolve(config: Path | None, overrides: list[str], log: Console) -> RunConfig:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        resolved = load_config(config, overrides=overrides)
    for warning in caught if _rank() == 0 else ():
        log.print(f"warning: {warning.message}", markup=False)
    return resolved


def _train(
    stage: str,
    resolved: RunConfig,
    *,
    config: Path | None,
    overrides: list[str],
    restart: bool,
    log: Console,
) -> dict[str, Any]:
    # DDP would warn that `find_unused_parameters` isn't needed whenever a batch needs all parameters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # torch takes a second, which mistakes of the configuration needn't wait for
    from ups.train.all_stages import run_all
    from ups.train.run import run_stage
    from ups.train.stage import ALL
    from ups.train.startup import process_began
    from ups.train.unused_settings import unused_in_one_stage

    def note(text: str) -> None:
        _tell(text, log)

    common: dict[str, Any] = {"note": note, "restart": restart, "began": process_began()}
    if stage == ALL:
        return run_all(resolved, config_path=config, overrides=overrides, **common)
    for text in unused_in_one_stage(resolved) if _rank() == 0 else ():
        note(f"warning: {text}")
    return run_stage(stage, resolved, **common)


def _report(report: dict[str, Any], *, as_json: bool) -> None:
    from ups.train.report_table import show_report

    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show_report(report, Console(soft_wrap=True, highlight=False))


def _tell(text: str, log: Console) -> None:
    """Ranks but the first say who they are."""
    log.print(text if _rank() == 0 else f"rank {_rank()}: {text}", markup=False)


def _rank() -> int:
    """As torchrun says; 0 without it."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while training, it stops after a step
    app()
