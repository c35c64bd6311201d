"""The verb `train`: one stage, or all that the configuration has."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.common import (
    AllowCode,
    AsJson,
    Config,
    ExportAnyway,
    Overrides,
    Seeds,
    ending,
    exporting_anyway,
    note,
)
from ups.cli.notify import Notify, notifying
from ups.config.legacy import present_stage
from ups.errors import ConfigError
from ups.log import logger, quiet
from ups.stages import BASELINES, STAGES
from ups_store.command_line import completing
from ups_store.console import importing, print_lines, results
from ups_store.launch import not_shared_note, rank_of
from ups_store.printable import without_secrets

if TYPE_CHECKING:
    from ups.config import RunConfig

ALL = "all"
_STAGES = [name for name in STAGES if name not in BASELINES]


def train(
    overrides: Overrides = None,
    *,
    config: Config = None,
    stage: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(_STAGES)}; all: those of the configuration, in order; "
            f"{', '.join(BASELINES)}: baselines, one for each task",
            autocompletion=completing(lambda: (*STAGES, ALL)),
            callback=present_stage,
        ),
    ] = ALL,
    epochs: Annotated[int | None, typer.Option(help="of the stage, or of each stage")] = None,
    seed: Annotated[int | None, typer.Option(help="as seed=N")] = None,
    seeds: Seeds = None,
    allow_unknown_encoder: Annotated[
        bool, typer.Option("--allow-unknown-encoder", help="as training.allow_unknown_encoder=true")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="start from scratch, not where a run was stopped")
    ] = False,
    unless_valid: Annotated[
        bool,
        typer.Option(
            "--unless-valid", help="as all does: begin again where the state is of other data or another run"
        ),
    ] = False,
    export_anyway: ExportAnyway = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="show the resolved configuration and stop")
    ] = False,
    profile: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            min=1,
            help="record so many steps of each stage: a trace beside the checkpoints, and what bounds them",
        ),
    ] = None,
    notify: Notify = None,
    allow_code: AllowCode = None,
    as_json: AsJson = False,
) -> None:
    """Train; run it again to continue after an interruption.

    With --seeds 0,1,2 all of it is done with one seed after the other, and evaluated together.

    Under torchrun: torchrun --nproc-per-node 2 -m ups train ...
    """
    with ending(restart), notifying(None if print_config else notify) as notice:
        with importing():
            from ups.config import dump_config, load_config
            from ups.config.seeds import parse_seeds, seed_folder
        if seed is not None and seeds is not None:
            raise ConfigError("--seed and --seeds", expected="one of them", found="both")
        numbers = parse_seeds(seeds) if seeds is not None else ()
        if len(numbers) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Ranks that torchrun started meet for one training; they can't part and meet again for another.
            raise ConfigError(
                "--seeds of several processes",
                kind="ranks",
                expected="one seed",
                found=", ".join(map(str, numbers)),
                hint=f"one command for each: --seeds {numbers[0]}, then --seeds {numbers[1]}",
            )
        words = [*(overrides or ()), *exporting_anyway(export_anyway)]
        words += ["training.allow_unknown_encoder=true"] if allow_unknown_encoder else []
        words += [] if seed is None else [f"seed={seed}"]
        resolved = load_config(config, overrides=words)
        if epochs is not None:
            stages = resolved.trained_stages if stage == ALL else [stage]  # what is left out stays out
            words += [f"stages.{name}.epochs={epochs}" for name in stages]
            with quiet():  # it was said already
                resolved = load_config(config, overrides=words)
        if print_config:
            print_lines(*without_secrets(dump_config(resolved)).splitlines())
            return
        notice.run = resolved.checkpoint.dir
        with importing():
            from ups.train.interrupt import listening_to_stalls
            from ups.train.log import report_json, show_report
            from ups.train.profile import profiling
            from ups.train.tracking import forget_run
        if unshared := not_shared_note():
            note(f"warning: {unshared}")
        if restart and rank_of() == 0:
            for folder in [seed_folder(notice.run, number) for number in numbers] or [notice.run]:
                forget_run(folder)
        with listening_to_stalls(notice.failed), profiling(profile or 0):
            options: dict[str, Any] = {"config": config, "overrides": words, "restart": restart}
            report = _train(stage, resolved, numbers, unless_valid=unless_valid, **options)
    if rank_of() == 0 and as_json:
        print_lines(*report_json(report).splitlines())
    elif rank_of() == 0:
        show_report(report, results())


def _train(
    stage: str,
    resolved: RunConfig,
    seeds: Sequence[int],
    *,
    config: Path | None,
    overrides: Sequence[str],
    restart: bool,
    unless_valid: bool,
) -> dict[str, Any]:
    # DDP would warn that `find_unused_parameters` isn't needed whenever a batch needs all parameters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with importing():
        from ups.config.seeds import with_seeds
        from ups.train.checks import unused_in_one_stage
        from ups.train.launched import process_began
        from ups.train.run import run_stage, train_unless_valid
        from ups.train.tracking import CONTEXT_FILE, handing_on
    source: dict[str, Any] = {"config_path": config, "overrides": overrides}
    common: dict[str, Any] = {"restart": restart, "began": process_began()}
    if stage == ALL:  # which imports what evaluates, too
        with importing():
            from ups.pipeline.training import run_all, run_all_seeds
    if stage == ALL and seeds:
        return run_all_seeds(resolved, seeds, **source, **common)
    if stage == ALL:
        return run_all(resolved, **source, **common)
    if unless_valid and stage not in BASELINES and not seeds:  # a node of a run
        return train_unless_valid(stage, resolved, **common)
    for text in unused_in_one_stage(resolved):
        logger.warning(text)
    train_one: Callable[..., dict[str, Any]] = run_stage
    if stage in BASELINES:
        from ups.train.train_baselines import train_stage_of_baselines

        train_one = train_stage_of_baselines
    if not seeds:
        return train_one(stage, resolved, **common)
    reports: dict[int, Any] = {}
    for own in with_seeds(resolved, seeds, **source):
        with handing_on(own.checkpoint.dir / CONTEXT_FILE):  # each seed is a run of its own
            reports[own.seed] = train_one(stage, own, **common)
    return {"stage": stage, "seeds": reports}
