"""Tiny files in the format of The Well, and what plain h5py makes of them, put in order by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
from pdebench_files import Arrays, Size, T, X, Y, Z, coordinate, values

SIZES = {"x": X, "y": Y, "z": Z, "theta": X, "phi": Y}


def add_field(
    file: h5py.File, order: int, name: str, data: np.ndarray, *, varies: str, space: Sequence[bool]
) -> None:
    """Add a dataset to `t<order>_fields`; `varies` has "s" and "t" for samples and time."""
    group = file.require_group(f"t{order}_fields")
    listed = [*map(str, group.attrs.get("field_names", [])), name]
    group.attrs["field_names"] = listed
    dataset = group.create_dataset(name, data=data)
    dataset.attrs["dim_varying"] = np.array(space)
    dataset.attrs["sample_varying"] = "s" in varies
    dataset.attrs["time_varying"] = "t" in varies


def add_scalar(file: h5py.File, name: str, data: object, *, varies: str = "") -> None:
    group = file.require_group("scalars")
    group.attrs["field_names"] = [*map(str, group.attrs.get("field_names", [])), name]
    group[name] = data
    group[name].attrs["sample_varying"] = "s" in varies
    group[name].attrs["time_varying"] = "t" in varies


def add_boundary(
    file: h5py.File, name: str, kind: str, dims: Sequence[str], mask: np.ndarray, *, varies: str = ""
) -> None:
    group = file.require_group("boundary_conditions").create_group(name)
    group.attrs["associated_dims"] = list(dims)
    group.attrs["associated_fields"] = np.array([])  # what h5py makes of an empty list
    group.attrs["bc_type"] = kind
    group.attrs["sample_varying"] = "s" in varies
    group.attrs["time_varying"] = "t" in varies
    group["mask"] = mask


def ends(length: int, *, first: bool = True, last: bool = True) -> np.ndarray:
    """A mask that is true at the ends of an axis."""
    mask = np.zeros(length, bool)
    mask[0], mask[-1] = first, last
    return mask


def start_file(
    path: Path,
    *,
    num_samples: int,
    dims: Sequence[str],
    attrs: Mapping[str, object],
    frames: int = T,
    lengths: Mapping[str, int] = SIZES,
) -> h5py.File:
    """A file with its root attributes and dimensions, still without fields."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = h5py.File(path, "w")
    file.attrs.update(
        {
            "dataset_name": "small",
            "grid_type": "cartesian",
            "n_spatial_dims": len(dims),
            "n_trajectories": num_samples,
            **attrs,
        }
    )
    group = file.create_group("dimensions")
    group.attrs["spatial_dims"] = list(dims)
    group["time"] = coordinate(frames)
    group["time"].attrs["sample_varying"] = False
    for name in dims:
        group[name] = coordinate(lengths[name], start=1.0)
        group[name].attrs.update({"sample_varying": False, "time_varying": False})
    return file


def write_well_2d(
    path: Path, *, num_samples: int = 3, seed: str = "", parameters: Mapping[str, object] | None = None
) -> Path:
    """Every kind of field and scalar, each in every way in which it can vary."""
    parameters = {"alpha": -1.0, "Nu": 2.0} if parameters is None else parameters
    attrs = {"simulation_parameters": [*parameters, "solver"], "solver": "spectral", **parameters}
    n = num_samples
    with start_file(path, num_samples=n, dims=("x", "y"), attrs=attrs) as file:
        both, only_x = (True, True), (True, False)

        def some(name: str, *shape: int) -> np.ndarray:
            return values(seed + name, shape)

        add_field(file, 0, "density", some("density", n, T, X, Y), varies="st", space=both)
        add_field(file, 0, "profile", some("profile", n, T, X), varies="st", space=only_x)
        add_field(file, 0, "forcing", some("forcing", T, X, Y), varies="t", space=both)
        add_field(file, 0, "speed", some("speed", n, X, Y), varies="s", space=both)
        add_field(file, 0, "floor", some("floor", X, Y), varies="", space=both)
        add_field(file, 0, "slope", some("slope", X), varies="", space=only_x)
        add_field(file, 1, "velocity", some("velocity", n, T, X, Y, 2), varies="st", space=both)
        add_field(file, 1, "gravity", some("gravity", X, Y, 2), varies="", space=both)
        add_field(file, 2, "D", some("D", n, T, X, Y, 2, 2), varies="st", space=both)
        add_field(file, 2, "E", some("E", n, T, X, Y, 4), varies="st", space=both)
        add_field(file, 2, "stress", some("stress", n, X, Y, 2, 2), varies="s", space=both)
        add_scalar(file, "alpha", np.float32(-1.0))
        add_scalar(file, "seed", np.arange(n), varies="s")
        add_scalar(file, "drive", some("drive", T), varies="t")
        add_scalar(file, "gain", some("gain", n, T), varies="st")
        add_boundary(file, "around", "PERIODIC", ["x"], ends(X))
        add_boundary(file, "below", "wall", ["y"], ends(Y, last=False))
        maze = np.zeros((X, Y), bool)
        maze[2:4, 1:3] = True
        add_boundary(file, "maze", "wall", ["x", "y"], maze)
    return path


CHANNELS_2D = (
    *("density", "profile", "forcing", "velocity_x", "velocity_y"),
    *(f"{name}_{pair}" for name in "DE" for pair in ("xx", "xy", "yx", "yy")),
)


def read_well_2d(file: h5py.File) -> Arrays:
    """All arrays of `write_well_2d`, axes (sample, time, y, x, channel or component)."""
    n = int(file.attrs["n_trajectories"])
    scalars, vectors, tensors = (file[f"t{order}_fields"] for order in range(3))
    whole = (n, T, X, Y, 1)
    pieces = [
        scalars["density"][...][..., None],
        np.broadcast_to(scalars["profile"][...][..., None, None], whole),
        np.broadcast_to(scalars["forcing"][...][..., None], whole),
        vectors["velocity"][...],
        tensors["D"][...].reshape(n, T, X, Y, 4),
        tensors["E"][...],
    ]

    def repeat(data: np.ndarray) -> np.ndarray:
        return np.broadcast_to(data, (n, *data.shape))

    slope = np.broadcast_to(scalars["slope"][...][:, None], (X, Y))
    return {
        "fields": np.concatenate(pieces, axis=-1).swapaxes(2, 3),
        "speed": scalars["speed"][...].swapaxes(1, 2),
        "floor": repeat(scalars["floor"][...].T),
        "slope": repeat(slope.T),
        "gravity": repeat(vectors["gravity"][...].swapaxes(0, 1)),
        "stress": tensors["stress"][...].swapaxes(1, 2),
        "bc_maze": repeat(file["boundary_conditions/maze/mask"][...].T.astype("f2")),
        "seed": file["scalars/seed"][...].astype("f8"),
        "drive": repeat(file["scalars/drive"][...]),
        "gain": file["scalars/gain"][...],
    }


def write_well_3d(path: Path) -> Path:
    with start_file(path, num_samples=2, dims=("x", "y", "z"), attrs={}) as file:
        add_field(file, 0, "rho", values("rho", (2, T, X, Y, Z)), varies="st", space=(True,) * 3)
        add_field(file, 1, "v", values("v", (2, T, X, Y, Z, 3)), varies="st", space=(True,) * 3)
    return path


def read_well_3d(file: h5py.File) -> Arrays:
    pieces = [file["t0_fields/rho"][...][..., None], file["t1_fields/v"][...]]
    return {"fields": np.concatenate(pieces, axis=-1).transpose(0, 1, 4, 3, 2, 5)}


def write_well_set(path: Path, orders: Mapping[str, int], boundary: Mapping[str, str], size: Size) -> Path:
    """A file as a set's are.

    Args:
        path: The file.
        orders: Tensor order of each field, by name.
        boundary: Type by dimension, all that there are.
        size: Of the file.
    """
    dims, num = tuple(boundary), size.num_samples
    lengths = dict(zip(dims, size.space, strict=False))
    whole = (num, size.frames, *lengths.values())
    file = start_file(path, num_samples=num, dims=dims, attrs={}, frames=size.frames, lengths=lengths)
    with file:
        for name, order in orders.items():
            data = values(f"{path}{name}", whole + (len(dims),) * order)
            add_field(file, order, name, data, varies="st", space=(True,) * len(dims))
        for dim, kind in boundary.items():
            add_boundary(file, dim, kind, [dim], ends(lengths[dim]))
    return path
