"""Make a data set in PDEBench's layout with the project's own solvers.

python scripts/make_data.py burgers1d --out data --samples 400
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ups.cli.commands import tell_on_stderr, telling_errors
from ups.data.solvers import SOLVERS, make_dataset
from ups.errors import OutputError
from ups_store.errors import StoreError

_HDF5_ERRNO = re.compile(r"errno = (\d+)")  # libhdf5 tells the system's error in the middle of a paragraph

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    task: Annotated[str, typer.Argument(help=f"What to solve: {', '.join(SOLVERS)}.")],
    out: Annotated[Path, typer.Option(help="Folder for the file; made if missing.")],
    samples: Annotated[int, typer.Option(help="Number of samples.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same file.")] = 0,
    points: Annotated[int | None, typer.Option(help="Cells per axis.")] = None,
    frames: Annotated[int | None, typer.Option(help="Stored time steps, the initial state included.")] = None,
    end_time: Annotated[float | None, typer.Option(help="Time of the last one.")] = None,
    nu: Annotated[float | None, typer.Option(help="Burgers: pi times the viscosity.")] = None,
    beta: Annotated[float | None, typer.Option(help="Advection: speed. Darcy: right-hand side.")] = None,
    du: Annotated[float | None, typer.Option(help="Reaction-diffusion: activator's diffusivity.")] = None,
    dv: Annotated[float | None, typer.Option(help="Reaction-diffusion: inhibitor's diffusivity.")] = None,
    k: Annotated[float | None, typer.Option(help="Reaction-diffusion: constant sink.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Solve TASK for random initial states and write one file, named and laid out as PDEBench's.

    Settings left out have PDEBench's values, except that less is stored: 41 time steps in 1D, 21 in 2D.
    """
    physics = {"nu": nu, "beta": beta, "du": du, "dv": dv, "k": k}
    grid = {"points": points, "frames": frames, "end_time": end_time}
    settings = {name: value for name, value in {**grid, **physics}.items() if value is not None}
    sys.unraisablehook = _hide_hdf5_cleanup
    with telling_errors(tell_on_stderr, interrupted="interrupted: nothing was written"):
        path = _make_with_progress(task, out, samples=samples, seed=seed, force=force, settings=settings)
    typer.echo(f"{path}  {decimal(path.stat().st_size)}")


def _make_with_progress(
    task: str, out: Path, *, samples: int, seed: int, force: bool, settings: dict[str, float]
) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    log = Console(stderr=True)
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as progress:
        bar = progress.add_task(task, total=samples)
        try:
            return make_dataset(
                task,
                out,
                num_samples=samples,
                seed=seed,
                overwrite=force,
                progress=lambda done: progress.update(bar, completed=done),
                **settings,
            )
        except (OSError, RuntimeError) as error:
            raise (error if isinstance(error, StoreError) else _as_ours(error, out)) from None


def _as_ours(error: OSError | RuntimeError, out: Path) -> OutputError:
    """The error of the file system, or of libhdf5, as one of ours; what isn't theirs is raised again."""
    if told := _HDF5_ERRNO.search(str(error)):
        number = int(told[1])
        error = OSError(number, os.strerror(number))
    if not isinstance(error, OSError):
        raise error
    return OutputError.of(error, out, flag="--out")


def _hide_hdf5_cleanup(unraisable: Any) -> None:
    """Keep quiet about objects that h5py couldn't close: why is what the command itself ends with."""
    if "Can't decrement id ref count" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    app()
