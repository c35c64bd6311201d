"""The verb `make-data`: data sets in PDEBench's layouts, made with the project's own solvers."""

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
from ups_store.errors import ConfigError, StoreError

_HDF5_ERRNO = re.compile(r"errno = (\d+)")  # libhdf5 says the system's error in the middle of a paragraph


def make_data(
    task: Annotated[
        str,
        typer.Argument(
            help="burgers1d, advection1d, diffreact2d, darcy2d, shallow_water2d or incompressible2d"
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="folder for the files; made if missing")],
    samples: Annotated[int, typer.Option(help="number of samples of a file")] = 100,
    seed: Annotated[int, typer.Option(help="the same seed gives the same files")] = 0,
    split: Annotated[
        str | None,
        typer.Option(help="train, val or test: all samples are of it [default: a build shares out]"),
    ] = None,
    points: Annotated[int | None, typer.Option(help="cells per axis")] = None,
    frames: Annotated[int | None, typer.Option(help="stored time steps, the initial state included")] = None,
    end_time: Annotated[float | None, typer.Option(help="time of the last one")] = None,
    nu: Annotated[
        str | None,
        typer.Option(help="viscosity, Burgers: pi times that; several as 0.001,0.01 make a file each"),
    ] = None,
    beta: Annotated[
        str | None, typer.Option(help="advection: speed; Darcy: right-hand side; several as for --nu")
    ] = None,
    du: Annotated[float | None, typer.Option(help="reaction-diffusion: activator's diffusivity")] = None,
    dv: Annotated[float | None, typer.Option(help="reaction-diffusion: inhibitor's diffusivity")] = None,
    k: Annotated[float | None, typer.Option(help="reaction-diffusion: constant sink")] = None,
    amplitude: Annotated[
        float | None,
        typer.Option(
            help="of initial states: largest deviation of sines, deviation of noise, RMS of vorticity"
        ),
    ] = None,
    mean: Annotated[
        float | None, typer.Option(help="1D: initial means are uniform within this of zero")
    ] = None,
    max_wave_number: Annotated[
        int | None, typer.Option(help="of initial sines and vortices, periods per unit length")
    ] = None,
    kicks: Annotated[
        float | None, typer.Option(help="Burgers: RMS of a random field added after every stored step")
    ] = None,
    waves: Annotated[int | None, typer.Option(help="1D: initial sines of a sample")] = None,
    walls: Annotated[
        bool | None, typer.Option("--walls", help="Burgers: u = 0 at both ends, instead of periodic")
    ] = None,
    modes: Annotated[
        int | None,
        typer.Option(help="reaction-diffusion, Darcy: random modes per axis, for other --points alike"),
    ] = None,
    burn_in: Annotated[
        float | None, typer.Option(help="reaction-diffusion: time from the noise to the first stored step")
    ] = None,
    forcing: Annotated[float | None, typer.Option(help="incompressible flow: of the steady source")] = None,
    height: Annotated[float | None, typer.Option(help="shallow water: inside the dam; outside 1")] = None,
    min_radius: Annotated[float | None, typer.Option(help="shallow water: least radius of a dam")] = None,
    max_radius: Annotated[float | None, typer.Option(help="shallow water: largest radius of a dam")] = None,
    shift: Annotated[float | None, typer.Option(help="shallow water: of the dam's centre, at most")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that are there")] = False,
) -> None:
    """Solve TASK for random initial states and write a file, named and laid out as PDEBench's.

    Settings left out have PDEBench's values, except that less is stored: 41 time steps in 1D, 21 in 2D.
    """
    grid = {"points": points, "frames": frames, "end_time": end_time}
    physics = {"nu": _numbers(nu, "--nu"), "beta": _numbers(beta, "--beta"), "du": du, "dv": dv, "k": k}
    states = {"amplitude": amplitude, "mean": mean, "max_wave_number": max_wave_number, "waves": waves}
    states |= {"kicks": kicks, "walls": walls, "modes": modes, "burn_in": burn_in, "forcing": forcing}
    dam = {"height": height, "min_radius": min_radius, "max_radius": max_radius, "shift": shift}
    given = {**grid, **physics, **states, **dam}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    sys.unraisablehook = _hide_hdf5_cleanup
    with importing():
        from ups.data.solvers import make_datasets
    num_files = max(len(settings.get(name, ())) or 1 for name in ("nu", "beta"))
    done: dict[Path, int] = {}
    try:
        with progress_bar(task, total=samples * num_files) as advance:

            def report(file: Path, count: int) -> None:
                done[file] = count
                advance(sum(done.values()))

            paths = make_datasets(
                task,
                out,
                settings=settings,
                num_samples=samples,
                seed=seed,
                split=split,
                overwrite=force,
                progress=report,
            )
    except KeyboardInterrupt:
        unwritten = "nothing" if num_files == 1 else "no unfinished file"
        note(f"interrupted: {unwritten} was written", is_last=True)
        raise typer.Exit(InterruptedTrainingError.exit_code) from None
    except (OSError, RuntimeError) as error:
        raise (error if isinstance(error, StoreError) else _as_ours(error, out)) from None
    for path in paths:
        print_lines(f"{path}  {format_nbytes(path.stat().st_size)}")


def _numbers(text: str | None, flag: str) -> tuple[float, ...] | None:
    """One number or several with commas between them."""
    try:
        return None if text is None else tuple(float(each) for each in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{flag} {text}", kind="bad_number", expected="a number, or several as 0.001,0.01"
        ) from None


def _as_ours(error: OSError | RuntimeError, out: Path) -> OutputError:
    """The error of the file system, or of libhdf5, as one of ours; what isn't theirs is raised again."""
    if found := _HDF5_ERRNO.search(str(error)):
        number = int(found[1])
        error = OSError(number, os.strerror(number))
    if not isinstance(error, OSError):
        raise error
    return OutputError.of(error, out, flag="--out")


def _hide_hdf5_cleanup(unraisable: Any) -> None:
    """Keep quiet about objects that h5py couldn't close: why is what the command itself ends with."""
    if "Can't decrement id ref count" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)
