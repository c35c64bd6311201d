"""The verb `validate optimizations`: a baseline beside switches, and gates that decide by an exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.common import AsJson, Overrides, note
from ups.config.legacy import present_stage
from ups.errors import InterruptedTrainingError
from ups.output import check_writable
from ups_store.build import shipped_configs
from ups_store.command_line import completing
from ups_store.console import importing, print_json, print_lines, results

if TYPE_CHECKING:
    from ups.train.optimizations import Findings

GATE_MISSED = 10
_CONFIG_NAMES = completing(shipped_configs)


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
        from ups.train.optimizations import Gates, suggested_yaml, validate_optimizations
    given = [*(overrides or ()), *([] if seed is None else [f"seed={seed}"])]
    try:
        findings = validate_optimizations(
            baseline,
            optimized or baseline,
            stage=stage,
            overrides=[*given, *_length(stage, epochs=epochs, steps=steps)],
            only_optimized=only_optimized or (),
            warm_up=warm_up,
            gates=Gates(min_speedup, max_loss_difference, max_nrmse_increase, max_memory_gb),
        )
    except KeyboardInterrupt:
        note("stopped at once: nothing is reported", is_last=True)
        raise typer.Exit(InterruptedTrainingError.exit_code) from None
    _publish(findings, out, as_json=as_json)
    if suggest:
        text = suggested_yaml(
            findings,
            baseline,
            optimized or baseline,
            overrides=given,
            only_optimized=only_optimized or (),
            folder=out,
        )
        _write(out / "suggested.yaml", text, as_json=as_json)
    if not findings.is_complete:
        note("stopped: what was measured until then is shown, and decides nothing", is_last=True)
        raise typer.Exit(InterruptedTrainingError.exit_code)
    raise typer.Exit(0 if findings.is_passed else GATE_MISSED)


def _length(stage: str, *, epochs: int | None, steps: int | None) -> list[str]:
    """How long the stage is trained, instead of its budget."""
    given = {"epochs": epochs, "steps": steps}
    said = [f"stages.{stage}.{name}={number}" for name, number in given.items() if number is not None]
    return [*said, f"stages.{stage}.budget=null"] if said else []


def _publish(findings: Findings, out: Path, *, as_json: bool) -> None:
    from ups.train.log import report_json
    from ups.train.optimizations import show_findings

    if as_json:
        print_json(findings.to_json())
    else:
        show_findings(findings, results())
    _write(out / "report.json", report_json(findings.to_json()) + "\n", as_json=as_json)


def _write(path: Path, text: str, *, as_json: bool) -> None:
    from ups.output import write_atomically

    write_atomically(path, text.encode())
    (note if as_json else print_lines)(str(path))
