"""Predict trajectories from the states in a store or an HDF5 file, into a store.

python scripts/predict.py test.zarr.zip --checkpoint operator.safetensors --steps 40 --out predicted.zarr.zip
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ups.cli.commands import tell_on_stderr, telling_errors

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    source: Annotated[
        Path, typer.Argument(help="store (.zarr.zip) or HDF5 file with the states to start from")
    ],
    checkpoint: Annotated[Path, typer.Option(help="operator.safetensors")],
    out: Annotated[Path, typer.Option(help="store to write")],
    steps: Annotated[int, typer.Option(help="frames to predict; 1 of a steady task")] = 1,
    task: Annotated[str | None, typer.Option(help="where the operator knows several")] = None,
    start: Annotated[int, typer.Option(help="time step of the source that is given")] = 0,
    dt: Annotated[float | None, typer.Option(help="time of a step; by default that of the training")] = None,
    parameter: Annotated[list[str] | None, typer.Option(help="name=value, instead of the source's")] = None,
    limit: Annotated[int | None, typer.Option(help="at most so many samples")] = None,
    batch_size: Annotated[int, typer.Option(help="samples that are predicted together")] = 32,
    figure: Annotated[Path | None, typer.Option(help="PNG of the first sample")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="replace a store that is there")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="what was written, as JSON on stdout")] = False,
) -> None:
    """Start at one frame of every sample and predict what follows."""
    with telling_errors(tell_on_stderr):
        # torch takes a second, which --help needn't wait for
        from ups.eval.evaluate import parse_numbers
        from ups.eval.predict import PredictionRequest, predict_store

        written = predict_store(
            PredictionRequest(
                source=source,
                checkpoint=checkpoint,
                out=out,
                steps=steps,
                task=task,
                start=start,
                dt=dt,
                parameters=parse_numbers("--parameter", parameter or ()),
                limit=limit,
                batch_size=batch_size,
                figure=figure,
                device=device,
                replace=force,
            ),
            note=tell_on_stderr,
        )
    typer.echo(json.dumps(written) if as_json else "\n".join(map(str, filter(None, written.values()))))


if __name__ == "__main__":
    app()
