"""The verb `make-data`: a data set in PDEBench's layout, made with the project's own solvers."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ups.cli.common import note
from ups.errors import InterruptedTrainingError, OutputError
from ups.output import progress_bar
from ups_store.console import format_nbytes, importing, print_lines
from ups_store.errors import StoreError

_HDF5_ERRNO = re.compile(r"errno = (\d+)")  # libhdf5 tells the system's error in the middle of a paragraph


def make_data(
    task: Annotated[str, typer.Argument(help="burgers1d, advection1d, diffreact2d or darcy2d")],
    *,
    out: Annotated[Path, typer.Option(help="folder for the file; made if missing")],
    samples: Annotated[int, typer.Option(help="number of samples")] = 100,
    seed: Annotated[int, typer.Option(help="the same seed gives the same file")] = 0,
    points: Annotated[int | None, typer.Option(help="cells per axis")] = None,
    frames: Annotated[int | None, typer.Option(help="stored time steps, the initial state included")] = None,
    end_time: Annotated[float | None, typer.Option(help="time of the last one")] = None,
    nu: Annotated[float | None, typer.Option(help="Burgers: pi times the viscosity")] = None,
    beta: Annotated[float | None, typer.Option(help="advection: speed; Darcy: right-hand side")] = None,
    du: Annotated[float | None, typer.Option(help="reaction-diffusion: activator's diffusivity")] = None,
    dv: Annotated[float | None, typer.Option(help="reaction-diffusion: inhibitor's diffusivity")] = None,
    k: Annotated[float | None, typer.Option(help="reaction-diffusion: constant sink")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a file that is there")] = False,
) -> None:
    """Solve TASK for random initial states and write one file, named and laid out as PDEBench's.

    Settings left out have PDEBench's values, except that less is stored: 41 time steps in 1D, 21 in 2D.
    """
    physics = {"nu": nu, "beta": beta, "du": du, "dv": dv, "k": k}
    grid = {"points": points, "frames": frames, "end_time": end_time}
    settings = {name: value for name, value in {**grid, **physics}.items() if value is not None}
    sys.unraisablehook = _hide_hdf5_cleanup
    with importing():
        from ups.data.solvers import make_dataset
    try:
        with progress_bar(task, total=samples) as advance:
            path = make_dataset(
                task,
                out,
                num_samples=samples,
                seed=seed,
                overwrite=force,
                progress=advance,
                **settings,
            )
    except KeyboardInterrupt:
        note("interrupted: nothing was written", is_last=True)
        raise typer.Exit(InterruptedTrainingError.exit_code) from None
    except (OSError, RuntimeError) as error:
        raise (error if isinstance(error, StoreError) else _as_ours(error, out)) from None
    print_lines(f"{path}  {format_nbytes(path.stat().st_size)}")


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
