"""Files of users' own in several layouts, each with its declaration and what plain h5py makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from pdebench_files import Arrays, T, X, Y, Z, coordinate, values

from ups_store.building.config import load_config
from ups_store.sources.tasks import Task

N = 4


def declared_task(layout: dict[str, Any], **keys: Any) -> Task:
    """The task "flow" of such a layout."""
    flags = {"data.tasks": "flow", "tasks": {"flow": {"layout": layout, **keys}}}
    return load_config(flags=flags).get_task("flow")


@dataclass(frozen=True)
class Example:
    """One layout: how a file is written, how it is declared, and how to read it without the package."""

    name: str
    write: Callable[[Path], Path]
    layout: dict[str, Any]
    read: Callable[[h5py.File], Arrays]
    channels: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def _write(path: Path, datasets: dict[str, np.ndarray], **attrs: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data
        file.attrs.update(attrs)
    return path


def write_fourier(path: Path) -> Path:
    """As neural-operator sets often are: space before time, a coefficient, numbers per sample."""
    datasets = {
        "sol": values("sol", (N, X, Y, T)),
        "coeff": values("coeff", (N, X, Y)),
        "re": np.array([100, 200, 300, 400], "<i4"),
        "tags": values("tags", (N, 3)),
        "mesh/x": coordinate(X),
        "mesh/y": coordinate(Y, start=2.0),
    }
    return _write(path, datasets, viscosity=0.25)


FOURIER = Example(
    name="space before time",
    write=write_fourier,
    layout={
        "fields": [{"dataset": "sol", "axes": "sample x y time", "channels": ["vorticity"]}],
        "arrays": {
            "coefficient": {"dataset": "coeff", "axes": "sample x y"},
            "tags": {"dataset": "tags", "axes": "sample component"},
        },
        "coordinates": {"x": "mesh/x", "y": {"dataset": "mesh/y"}, "t": {"start": 1.0, "step": 0.5}},
        "parameters": {"re": {"dataset": "re"}, "nu": {"attribute": "viscosity"}},
    },
    read=lambda file: {
        "fields": file["sol"][...].transpose(0, 3, 2, 1)[..., None],
        "coefficient": file["coeff"][...].swapaxes(1, 2),
        "tags": file["tags"][...],
        "re": file["re"][...].astype("f8"),
    },
    channels=("vorticity",),
)


def write_channels_first(path: Path) -> Path:
    datasets = {
        "u": values("u", (N, 2, T, X, Y), "<f8"),
        "p": values("p", (T, N, Y, X)),
        "floor": values("floor", (Y, X)),
        "re": np.array([7.0]),
        "time": np.tile(coordinate(T), (N, 1)),
    }
    return _write(path, datasets)


CHANNELS_FIRST = Example(
    name="channels first",
    write=write_channels_first,
    layout={
        "fields": [
            {"dataset": "u", "axes": "sample channel time x y"},
            {"dataset": "/p", "axes": "time sample y x"},
        ],
        "arrays": {"floor": {"dataset": "floor", "axes": "y x"}},
        "coordinates": {"t": "time"},
        "parameters": {"re": {"dataset": "re"}},
    },
    read=lambda file: {
        "fields": np.concatenate(
            [file["u"][...].transpose(0, 2, 4, 3, 1), file["p"][...].swapaxes(0, 1)[..., None]], axis=-1
        ),
        "floor": np.broadcast_to(file["floor"][...], (N, Y, X)),
        "re": np.full(N, 7.0),
    },
    channels=("u_0", "u_1", "p"),
)


def write_runs(path: Path) -> Path:
    """A group per run, numbered without zeros, with a shared grid at the root."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["x"] = coordinate(X)
        file["mass"] = np.arange(N) + 0.5
        file.attrs["gravity"] = 9.81
        for i in (10, 2, 1, 30):
            group = file.create_group(f"runs/run_{i}")
            group["state"] = values(f"state{i}", (T, 2, X))
            group["setup/start"] = values(f"start{i}", (X,))
            group["energy"] = np.array([float(i)])
            group["t"] = coordinate(T)
            group.attrs["nu"] = i / 100
            group["setup"].attrs["seed"] = i
        file["runs/run_notes"] = np.zeros(3)  # matches the pattern, but is no group
    return path


def _runs(file: h5py.File) -> list[h5py.Group]:
    return [file[f"runs/run_{i}"] for i in (1, 2, 10, 30)]


RUNS = Example(
    name="group per run",
    write=write_runs,
    layout={
        "groups": "runs/run_*",
        "fields": [{"dataset": "state", "axes": "time channel x", "channels": ["h", "q"]}],
        "arrays": {"start": {"dataset": "setup/start", "axes": "x"}},
        "coordinates": {"x": "/x", "t": "t"},
        "parameters": {
            "nu": {"attribute": "nu"},
            "seed": {"attribute": "seed", "of": "setup"},
            "energy": {"dataset": "energy"},
            "mass": {"dataset": "/mass"},
            "gravity": {"attribute": "gravity", "of": "/"},
        },
    },
    read=lambda file: {
        "fields": np.stack([run["state"][...] for run in _runs(file)]).swapaxes(2, 3),
        "start": np.stack([run["setup/start"][...] for run in _runs(file)]),
        "nu": np.array([run.attrs["nu"] for run in _runs(file)]),
        "seed": np.array([float(run["setup"].attrs["seed"]) for run in _runs(file)]),
        "energy": np.array([run["energy"][0] for run in _runs(file)]),
        "mass": file["mass"][...],
    },
    channels=("h", "q"),
)


def write_one_state(path: Path) -> Path:
    """A file per sample, without time."""
    return _write(path, {"phi": values(path.name, (X, Y, Z)), "k": np.array(2.5)})


ONE_STATE = Example(
    name="one steady state",
    write=write_one_state,
    layout={
        "fields": [{"dataset": "phi", "axes": "x y z"}],
        "parameters": {"k": {"dataset": "k"}},
    },
    read=lambda file: {"fields": file["phi"][...].T[None, None, ..., None], "k": np.array([2.5])},
    channels=("phi",),
)

EXAMPLES = (FOURIER, CHANNELS_FIRST, RUNS, ONE_STATE)
