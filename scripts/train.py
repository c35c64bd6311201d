"""Train one stage, or all of them.

python scripts/train.py --config configs/demo.yaml --stage autoencoder training.lr=1e-3
torchrun --nproc-per-node 2 scripts/train.py --config configs/demo.yaml --stage all
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ups.cli.commands import resolve_config, tell_on_stderr, telling_errors
from ups.config import RunConfig, dump_config
from ups.errors import ConfigError, InterruptedTrainingError, UpsError
from ups.train.interrupt import CONTINUES

# A second Ctrl-C, or one while a command of another kind works; stages say more.
_AT_ONCE = f"stopped at once: what was saved before is kept; {CONTINUES} from there"
_WITHOUT_RESTART = "the same command without --restart continues"

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
    with telling_errors(_tell, interrupted=_truly(_AT_ONCE, restart)):
        given = [*(overrides or ()), *_flags(stage, epochs, seed, allow_unknown_encoder)]
        resolved = resolve_config(config, given, note=_tell_once)
        if print_config:
            typer.echo(dump_config(resolved), nl=False)
            return
        try:
            with _hinting_truly(restart):
                report = _train(stage, resolved, config=config, overrides=given, restart=restart)
        except InterruptedTrainingError as stopped:  # as it was asked to: no error
            _tell(str(stopped))
            raise typer.Exit(stopped.exit_code) from None
    if _rank() == 0:
        _report(report, as_json=as_json)


def _flags(stage: str, epochs: int | None, seed: int | None, allow_unknown_encoder: bool) -> list[str]:
    """What the flags say, as overrides."""
    if stage == "all" and epochs is not None:
        raise ConfigError("--epochs with --stage all", expected="stages.<stage>.epochs=... of each stage")
    flags: dict[str, int | str | None] = {f"stages.{stage}.epochs": epochs, "seed": seed}
    flags["training.allow_unknown_encoder"] = "true" if allow_unknown_encoder else None
    return [f"{key}={value}" for key, value in flags.items() if value is not None]


def _train(
    stage: str,
    resolved: RunConfig,
    *,
    config: Path | None,
    overrides: list[str],
    restart: bool,
) -> dict[str, Any]:
    # DDP would warn that `find_unused_parameters` isn't needed whenever a batch needs all parameters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # torch takes a second, which mistakes of the configuration needn't wait for
    from ups.train.all_stages import run_all
    from ups.train.meter import process_began
    from ups.train.run import run_stage, unused_in_one_stage
    from ups.train.stage import ALL

    common: dict[str, Any] = {"note": _tell, "restart": restart, "began": process_began()}
    if stage == ALL:
        return run_all(resolved, config_path=config, overrides=overrides, **common)
    for text in unused_in_one_stage(resolved):
        _tell_once(f"warning: {text}")
    return run_stage(stage, resolved, **common)


@contextmanager
def _hinting_truly(restart: bool) -> Iterator[None]:
    """Inside, no error says that a command with --restart continues."""
    try:
        yield
    except UpsError as error:
        error.hint = error.hint and _truly(error.hint, restart)
        raise


def _truly(text: str, restart: bool) -> str:
    return text.replace(CONTINUES, _WITHOUT_RESTART) if restart else text


def _report(report: dict[str, Any], *, as_json: bool) -> None:
    from ups.train.log import report_json, show_report

    if as_json:
        typer.echo(report_json(report))
    else:
        show_report(report, Console(soft_wrap=True, highlight=False))


def _tell(text: str) -> None:
    """Ranks but the first say who they are."""
    tell_on_stderr(text if _rank() == 0 else f"rank {_rank()}: {text}")


def _tell_once(text: str) -> None:
    """What all ranks find alike, the first one says."""
    if _rank() == 0:
        tell_on_stderr(text)


def _rank() -> int:
    """As torchrun says; 0 without it."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while training, it stops after a step
    app()
