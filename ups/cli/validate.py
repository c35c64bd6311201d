"""The verbs that look before a run begins: `validate config`, `data` and `optimizations`, `dry-run`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.common import AsJson, Config, Overrides, note
from ups.config.legacy import present_stage
from ups.errors import ConfigError, GateMissedError, InterruptedTrainingError
from ups.output import check_writable, write_atomically
from ups_store.build import shipped_configs
from ups_store.command_line import Verb, Verbs, completing
from ups_store.console import importing, print_json, print_lines, results

if TYPE_CHECKING:
    from ups.pipeline.report import Report

app = typer.Typer(cls=Verbs, no_args_is_help=True)

_CONFIG_NAMES = completing(shipped_configs)
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="YAML file or a name of `ups configs`; then such as training.lr=1e-4, which wins over it",
        autocompletion=_CONFIG_NAMES,
    ),
]


def split_words(words: Sequence[str] | None, config: Path | None) -> tuple[Path | None, list[str]]:
    """The configuration, which may be the first word or --config, and the overrides."""
    first, *others = words or [""]
    if not first or "=" in first:
        return config, list(words or ())
    if config is not None:
        raise ConfigError("CONFIG", expected="one, as a word or as --config", found=f"{first} and {config}")
    return Path(first), others


@app.callback()
def validate() -> None:
    """Check a run before it begins; exit code 2: configuration, 3: data, 6: disk, 10: the machine."""


@app.command("config", cls=Verb)
def validate_config(words: Words = None, *, config: Config = None, as_json: AsJson = False) -> None:
    """Check a configuration and what it needs of this machine: a line per check, all problems at once."""
    with importing():
        from ups.pipeline.config_checks import check_config
    _report(check_config, words, config, as_json=as_json)


@app.command("data", cls=Verb)
def validate_data(words: Words = None, *, config: Config = None, as_json: AsJson = False) -> None:
    """Check the data of a run: each file opens, its first time steps are finite, its sizes fit."""
    with importing():
        from ups.pipeline.data_checks import check_data
    _report(check_data, words, config, as_json=as_json)


def dry_run(
    words: Words = None,
    *,
    config: Config = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="of the machine, in any currency: gives the cost")
    ] = None,
    steps: Annotated[int, typer.Option("--measured-steps", min=0, help="of each stage; 0: none")] = 5,
    as_json: AsJson = False,
) -> None:
    """Say what `ups train` would do, and measure a few steps of each stage; nothing of the run is written."""
    with importing():
        from functools import partial

        from ups.pipeline.dry_run import dry_run as plan_run
    plan = partial(plan_run, price_per_hour=price_per_hour, num_steps=steps)
    _report(plan, words, config, as_json=as_json)


def _report(
    check: Callable[[Path | None, Sequence[str]], Report],
    words: Sequence[str] | None,
    config: Path | None,
    *,
    as_json: bool,
) -> None:
    path, overrides = split_words(words, config)
    report = check(path, overrides)
    if as_json:
        print_json(report.to_json())
    else:
        report.show(results())
    raise typer.Exit(report.exit_code)


@app.command("optimizations", cls=Verb)
def optimizations(
    overrides: Overrides = None,
    *,
    baseline: Annotated[
        Path, typer.Option(help="YAML file, or a name of `ups configs`", autocompletion=_CONFIG_NAMES)
    ],
    optimized: Annotated[
        Path | None,
        typer.Option(help="what differs in switches [default: the baseline]", autocompletion=_CONFIG_NAMES),
    ] = None,
    only_optimized: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="switch of the optimised one alone; repeatable"),
    ] = None,
    stage: Annotated[str, typer.Option(help="whose steps are compared", callback=present_stage)] = "operator",
    epochs: Annotated[int | None, typer.Option(min=1, help="of the stage [default: as configured]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="optimiser steps instead")] = None,
    seed: Annotated[int | None, typer.Option(help="as seed=N, of both")] = None,
    warm_up: Annotated[int, typer.Option(min=2, help="first steps, timed apart")] = 5,
    min_speedup: Annotated[float, typer.Option(help="gate: times as fast, at least")] = 3.0,
    max_loss_difference: Annotated[float, typer.Option(help="gate: of the losses at the end")] = 1e-3,
    max_nrmse_increase: Annotated[float, typer.Option(help="gate: share of the validation error")] = 0.03,
    max_memory_gb: Annotated[float, typer.Option(help="gate: at the fullest moment of a step")] = 50.0,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="write the configuration that won to <out>/suggested.yaml")
    ] = False,
    out: Annotated[Path, typer.Option(help="folder of report.json")] = Path("reports/optimizations"),
    as_json: AsJson = False,
) -> None:
    """Train with switches one by one and together, beside the baseline: speed, memory, loss, nRMSE.

    Exit code 0 if the optimised configuration passes all gates, 10 if not; 2 for configurations that can't be
    compared; 5 if it was stopped: what was measured until then is shown.
    """
    check_writable(out)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # memory of before is freed: the allocator warns
    with importing():
        from ups.train.log import report_json
        from ups.train.optimizations import Gates, show_findings, suggested_yaml, validate_optimizations
    shared = [*(overrides or ()), *([] if seed is None else [f"seed={seed}"])]
    length = {"epochs": epochs, "steps": steps}  # instead of the stage's budget
    own = [f"stages.{stage}.{name}={number}" for name, number in length.items() if number is not None]
    try:
        findings = validate_optimizations(
            baseline,
            optimized or baseline,
            stage=stage,
            overrides=[*shared, *own, *([f"stages.{stage}.budget=null"] if own else [])],
            only_optimized=only_optimized or (),
            warm_up=warm_up,
            gates=Gates(min_speedup, max_loss_difference, max_nrmse_increase, max_memory_gb),
        )
    except KeyboardInterrupt:
        note("stopped at once: nothing is reported", is_last=True)
        raise typer.Exit(InterruptedTrainingError.exit_code) from None
    if as_json:
        print_json(findings.to_json())
    else:
        show_findings(findings, results())
    files = {"report.json": report_json(findings.to_json()) + "\n"}
    if suggest:
        files["suggested.yaml"] = suggested_yaml(
            findings,
            baseline,
            optimized or baseline,
            overrides=shared,
            only_optimized=only_optimized or (),
            folder=out,
        )
    for name, text in files.items():
        write_atomically(out / name, text.encode())
        (note if as_json else print_lines)(str(out / name))
    if not findings.is_complete:
        note("stopped: what was measured until then is shown, and decides nothing", is_last=True)
        raise typer.Exit(InterruptedTrainingError.exit_code)
    raise typer.Exit(0 if findings.is_passed else GateMissedError.exit_code)
