"""The verb `train`: one stage, or all that the configuration has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.common import AsJson, Config, Overrides, note
from ups.errors import InterruptedTrainingError, UpsError
from ups.output import discard
from ups_store.command_line import completing
from ups_store.console import importing, print_lines, results
from ups_store.errors import StoreError
from ups_store.launch import not_shared_note, rank_of

if TYPE_CHECKING:
    from ups.config import RunConfig

ALL = "all"
_WITHOUT_RESTART = "the same command without --restart"


def train(
    overrides: Overrides = None,
    *,
    config: Config = None,
    stage: Annotated[
        str,
        typer.Option(
            help="autoencoder, joint or operator; all: those of the configuration, in order",
            autocompletion=completing(lambda: ("autoencoder", "joint", "operator", ALL)),
        ),
    ] = ALL,
    epochs: Annotated[int | None, typer.Option(help="of the stage, or of each stage")] = None,
    seed: Annotated[int | None, typer.Option(help="as seed=N")] = None,
    allow_unknown_encoder: Annotated[
        bool, typer.Option("--allow-unknown-encoder", help="as training.allow_unknown_encoder=true")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="start from scratch, not where a run was stopped")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="show the resolved configuration and stop")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train; run it again to continue after an interruption.

    Under torchrun: torchrun --nproc-per-node 2 -m ups train ...
    """
    with _ending(restart):
        with importing():
            from ups.config import dump_config, load_config
        given = [*(overrides or ()), *_flags(seed, allow_unknown_encoder)]
        resolved = load_config(config, overrides=given, note=_note_once)
        if epochs is not None:
            given += [f"stages.{name}.epochs={epochs}" for name in _stages_of(stage, resolved)]
            resolved = load_config(config, overrides=given, note=discard)  # it was said already
        if print_config:
            print_lines(*dump_config(resolved).splitlines())
            return
        report = _train(stage, resolved, config=config, overrides=given, restart=restart)
    if rank_of() == 0:
        _show(report, as_json=as_json)


def _flags(seed: int | None, allow_unknown_encoder: bool) -> list[str]:
    """What the flags say, as overrides."""
    allowed = ["training.allow_unknown_encoder=true"] if allow_unknown_encoder else []
    return allowed if seed is None else [*allowed, f"seed={seed}"]


def _stages_of(stage: str, config: RunConfig) -> Sequence[str]:
    """The stages that --epochs is about; one that the configuration leaves out stays out."""
    if stage != ALL:
        return [stage]
    names = ("joint" if config.trains_jointly else "autoencoder", "operator")
    return [name for name in names if config.stage(name).epochs]


def _train(
    stage: str, resolved: RunConfig, *, config: Path | None, overrides: Sequence[str], restart: bool
) -> dict[str, Any]:
    # DDP would warn that `find_unused_parameters` isn't needed whenever a batch needs all parameters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with importing():
        from ups.train.all_stages import run_all
        from ups.train.meter import process_began
        from ups.train.run import run_stage, unused_in_one_stage
    if unshared := not_shared_note():
        note(f"warning: {unshared}")
    common: dict[str, Any] = {"note": note, "restart": restart, "began": process_began()}
    if stage == ALL:
        return run_all(resolved, config_path=config, overrides=overrides, **common)
    for text in unused_in_one_stage(resolved):
        _note_once(f"warning: {text}")
    return run_stage(stage, resolved, **common)


@contextmanager
def _ending(restart: bool) -> Iterator[None]:
    """Inside, errors say which rank met them, and none says that a command with --restart continues."""
    try:
        yield
    except KeyboardInterrupt:  # a second Ctrl-C, or one while a build works
        command = _WITHOUT_RESTART if restart else "the same command"
        note(f"stopped at once: what was saved before is kept; {command} continues from there", is_last=True)
        raise typer.Exit(InterruptedTrainingError.exit_code) from None
    except (UpsError, StoreError) as error:
        if restart and isinstance(error, UpsError) and error.continued_by:
            error.continued_by = _WITHOUT_RESTART
        if isinstance(error, InterruptedTrainingError):  # as it was asked to: no error
            note(str(error), is_last=True)
        elif rank_of():
            note(f"error: {error}", is_last=True)
        else:
            raise
        raise typer.Exit(error.exit_code) from None


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    from ups.train.log import report_json, show_report

    if as_json:
        print_lines(*report_json(report).splitlines())
    else:
        show_report(report, results())


def _note_once(text: str) -> None:
    """What all ranks find alike, the first one says."""
    if rank_of() == 0:
        note(text)
