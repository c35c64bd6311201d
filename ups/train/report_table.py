"""What a stage reports, as people read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ups.output import with_nulls

# Values by task: key of the report, heading, format.
_COLUMNS = (
    ("compression", "compression", "{:.3g}x"),
    ("rollout_steps", "steps", "{}"),
    ("nrmse", "nRMSE of rollouts", "{:.3%}"),
    ("persistence_nrmse", "persistence", "{:.3%}"),
    ("floor_nrmse", "autoencoder floor, nRMSE", "{:.3%}"),
)
_ROUNDED = "floor_nrmse_"  # then the dtype of latents in a store, as in "floor_nrmse_float16_latents"
_NOT_TRAINED = (
    "no validation was better than before the first step; the checkpoint holds the untrained weights: "
    "lower training.lr, or train for longer"
)
_FILES = ("checkpoint", "autoencoder", "figure")


def show_report(report: Mapping[str, Any], console: Console) -> None:
    """Show a stage's report, or those of all stages: errors by task, time, files.

    Args:
        report: As `run_stage` or `run_all` returns it.
        console: Where to.
    """
    for stage, inner in report.get("stages", {}).items():
        console.print(f"{stage}", style="bold", markup=False)
        show_report(inner, console)
    if "stages" in report:
        _show_paths(report.get("evaluation", {}).values(), console)
        return
    columns = [column for column in (*_COLUMNS, *_rounded(report)) if report.get(column[0])]
    if columns:
        console.print(_table(report, columns))
    for name, ratio in report.get("compression", {}).items():
        if ratio <= 1:
            console.print(f"warning: latents of {name} are no smaller than the fields ({ratio:.2g}x)")
    console.print(_summary(report), markup=False)
    if report.get("best_step") == 0:
        console.print(f"warning: {_NOT_TRAINED}", markup=False)
    _show_paths((report[key] for key in _FILES if key in report), console)


def report_json(report: Mapping[str, Any]) -> str:
    """A report for machines; JSON has neither NaN nor infinity, so these are null."""
    return json.dumps(with_nulls(report), indent=2, allow_nan=False)


def _table(report: Mapping[str, Any], columns: list[tuple[str, str, str]]) -> Table:
    table = Table("fields", *(heading for _, heading, _ in columns))
    names = dict.fromkeys(name for key, _, _ in columns for name in report[key])
    for name in names:
        cells = (form.format(report[key][name]) if name in report[key] else "" for key, _, form in columns)
        table.add_row(name, *cells)
    return table


def _rounded(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The floor with latents as a store holds them."""
    return [
        (key, key.removeprefix(_ROUNDED).replace("_", " "), "{:.3%}")
        for key in report
        if key.startswith(_ROUNDED)
    ]


def _summary(report: Mapping[str, Any]) -> str:
    parts = []
    if latent := report.get("latent"):
        parts.append(f"latent state {latent['tokens']} x {latent['dim']}")
    parts.append(_effort(report))
    if report.get("best_step"):
        parts.append(f"best after step {report['best_step']}")
    if report["data_wait_share"]:
        parts.append(f"{report['data_wait_share']:.1%} of training waiting for data")
    return ", ".join(parts)


def _effort(report: Mapping[str, Any]) -> str:
    """Steps in all; the seconds are those of this call alone."""
    steps, before, seconds = report["steps"], report.get("resumed_at", 0), report["seconds"]
    if not before:
        return f"{steps} steps in {seconds:.1f} s"
    return f"{steps} steps, of which {before} were made before; {seconds:.1f} s now"


def _show_paths(paths: Any, console: Console) -> None:
    for path in paths:
        console.print(str(path), markup=False)
