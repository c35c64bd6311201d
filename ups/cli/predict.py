"""The verb `predict`: trajectories from the states in a store or an HDF5 file, into a store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import click
import typer

from ups.cli.common import AllowCode, AsJson, parse_numbers
from ups.output import progress_bar
from ups_store.console import importing, print_json, print_lines


def predict(
    source: Annotated[
        Path, typer.Argument(help="store (.zarr.zip) or HDF5 file with the states to start from")
    ],
    *,
    checkpoint: Annotated[Path, typer.Option(help="operator.safetensors")],
    out: Annotated[Path, typer.Option(help="store to write")],
    horizon: Annotated[int, typer.Option(help="steps to predict; 1 of a steady task")] = 1,
    task: Annotated[str | None, typer.Option(help="where the operator knows several")] = None,
    start: Annotated[int, typer.Option(help="time step of the source that is given")] = 0,
    dt: Annotated[float | None, typer.Option(help="time of a step [default: that of the training]")] = None,
    parameter: Annotated[list[str] | None, typer.Option(help="name=value, instead of the source's")] = None,
    split: Annotated[
        str | None, typer.Option(help="train, val, test or all; asked for where an HDF5 file has several")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="at most so many samples")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="samples that are predicted together")] = 32,
    figure: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of the first sample")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    ttc: Annotated[
        bool | None, typer.Option(help="choose and correct steps by the task's laws [default: ttc.enabled]")
    ] = None,
    members: Annotated[
        int | None, typer.Option(help="of an ensemble of each sample, from a model that has any")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the members' noise")] = 0,
    observed: Annotated[
        str | None,
        typer.Option(
            help="where a prior of partly observed inputs knows them: a .npy file of true and false, on the "
            "grid or for each sample, or a number of random points"
        ),
    ] = None,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="parameters and time steps outside the training, too")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace a store that is there")] = False,
    allow_code: AllowCode = None,
    as_json: AsJson = False,
) -> None:
    """Start at one frame of every sample and predict what follows."""
    parameters = parse_numbers("--parameter", parameter or ())
    with importing():
        from ups.eval.predict import PredictionRequest, predict_store
    request = PredictionRequest(
        source=source,
        checkpoint=checkpoint,
        out=out,
        steps=horizon,
        task=task,
        start=start,
        dt=dt,
        parameters=parameters,
        split=split,
        limit=limit,
        batch_size=batch_size,
        figure=figure,
        device=device,
        replace=force,
        ttc=ttc,
        members=members,
        seed=seed,
        observed=observed,
        extrapolate=extrapolate,
    )
    with ExitStack() as bars:
        begun: list[Callable[[float], None]] = []

        def progress(done: int, total: int) -> None:
            if not begun:  # not before a question is answered
                begun.append(bars.enter_context(progress_bar("predicting", total=1)))
            begun[0](done / total)

        ask = _ask_split if sys.stdin.isatty() and sys.stderr.isatty() else None
        written = predict_store(request, ask=ask, progress=progress)
    if as_json:
        print_json(written)
    else:
        print_lines(*filter(None, written.values()))


def _ask_split(counts: Mapping[str, int]) -> str:
    """Let a person choose among the splits of a file."""
    splits = ", ".join(f"{split} ({num} samples)" for split, num in counts.items())
    choice = click.Choice([*counts, "all"])
    answer: str = typer.prompt(f"the file has {splits}; which", type=choice, default="test", err=True)
    return answer
