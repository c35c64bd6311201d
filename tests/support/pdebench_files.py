"""Tiny files in every layout, and what a plain h5py read of them, put in order by hand, looks like.

Grids are not square: PDEBench's are, which hides mistakes in the order of axes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

REAL_FILES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "pdebench"

T, X, Y, Z = 7, 10, 6, 4
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Size:
    """Of a file: of the points along x, y and z it has as many axes as its family."""

    num_samples: int = 5
    frames: int = T
    space: tuple[int, ...] = (X, Y, Z)


SMALL = Size()


def values(name: str, shape: tuple[int, ...], dtype: str = "<f4") -> np.ndarray:
    """Normal numbers that are the same in every run and differ by name."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(dtype)


def coordinate(length: int, start: float = 0.0) -> np.ndarray:
    return (start + np.linspace(0, 1, length)).astype("<f4")


def write(path: Path, datasets: Mapping[str, np.ndarray], attrs: Mapping[str, object] | None = None) -> Path:
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data
        file.attrs.update(attrs or {})
    return path


def edited(path: Path, edit: Callable[[h5py.File], object]) -> Path:
    """A file after a change of it; returns its path."""
    with h5py.File(path, "r+") as file:
        edit(file)
    return path


def reduced(arrays: Arrays, *, space: int, time: int) -> Arrays:
    """Every `space`-th point along each spatial axis, every `time`-th frame."""
    every_space, every_time = slice(None, None, space), slice(None, None, time)
    cut: dict[str, tuple[slice, ...]] = {
        "fields": (slice(None), every_time, *[every_space] * (arrays["fields"].ndim - 3)),
        "coefficient": (slice(None), every_space, every_space),
        "force": (slice(None), every_space, every_space),
    }
    return {name: array[cut[name]] for name, array in arrays.items()}


def write_scalar_1d(path: Path, size: Size = SMALL, *, attrs: Mapping[str, object] | None = None) -> Path:
    datasets = {
        "tensor": values("tensor", (size.num_samples, size.frames, size.space[0])),
        "x-coordinate": coordinate(size.space[0]),
        "t-coordinate": coordinate(size.frames + 1),
    }
    return write(path, datasets, {"Nu": 0.01} if attrs is None else attrs)


def write_advection(path: Path, size: Size = SMALL) -> Path:
    return write_scalar_1d(path, size, attrs={"beta": 0.4})


def write_reacdiff(path: Path, size: Size = SMALL) -> Path:
    return write_scalar_1d(path, size, attrs={"Nu": 0.5, "rho": 1.0})


def read_scalar_1d(file: h5py.File) -> Arrays:
    return {"fields": file["tensor"][...][:, :, :, None]}


def write_darcy(path: Path, size: Size = SMALL) -> Path:
    num, (x, y) = size.num_samples, size.space[:2]
    datasets = {
        "tensor": values("tensor", (num, 1, x, y)),
        "nu": values("nu", (num, x, y)),
        "x-coordinate": coordinate(x),
        "y-coordinate": coordinate(y),
        "t-coordinate": coordinate(10),
    }
    return write(path, datasets, {"beta": 1.0})


def read_darcy(file: h5py.File) -> Arrays:
    return {
        "fields": file["tensor"][...].transpose(0, 1, 3, 2)[..., None],
        "coefficient": file["nu"][...].transpose(0, 2, 1),
    }


def _write_cfd(path: Path, size: Size, attrs: Mapping[str, object], *, ndim: int) -> Path:
    names, space = ["density", "pressure", "Vx", "Vy", "Vz"][: 2 + ndim], size.space[:ndim]
    datasets = {name: values(name, (size.num_samples, size.frames, *space)) for name in names}
    datasets |= {f"{axis}-coordinate": coordinate(n) for axis, n in zip("xyz", space, strict=False)}
    return write(path, datasets | {"t-coordinate": coordinate(size.frames + 1)}, attrs)


def write_cfd1d(path: Path, size: Size = SMALL) -> Path:
    return _write_cfd(path, size, {"eta": 1e-8, "zeta": 1e-8}, ndim=1)


def write_cfd2d(path: Path, size: Size = SMALL) -> Path:
    return _write_cfd(path, size, {"eta": 0.01, "zeta": 0.01, "M": 0.1}, ndim=2)


def write_cfd3d(path: Path, size: Size = SMALL) -> Path:
    return _write_cfd(path, size, {"eta": 1e-8, "zeta": 1e-8, "M": 1.0}, ndim=3)


def write_shock_tube(path: Path) -> Path:
    """Without a sample axis, and float64, as Sod6 is published."""
    datasets = {name: values(name, (T, X), "<f8") for name in ("density", "pressure", "Vx")}
    return write(path, datasets | {"x-coordinate": coordinate(X), "t-coordinate": coordinate(T + 1)})


def read_cfd1d(file: h5py.File) -> Arrays:
    return {"fields": np.stack([file[n][...] for n in ("density", "pressure", "Vx")], axis=-1)}


def read_shock_tube(file: h5py.File) -> Arrays:
    return {"fields": read_cfd1d(file)["fields"][None]}


def read_cfd2d(file: h5py.File) -> Arrays:
    stacked = np.stack([file[n][...] for n in ("density", "pressure", "Vx", "Vy")], axis=-1)
    return {"fields": stacked.transpose(0, 1, 3, 2, 4)}


def read_cfd3d(file: h5py.File) -> Arrays:
    stacked = np.stack([file[n][...] for n in ("density", "pressure", "Vx", "Vy", "Vz")], axis=-1)
    return {"fields": stacked.transpose(0, 1, 4, 3, 2, 5)}


def write_navier_stokes(path: Path, size: Size = SMALL, *, latest_index: int | str | None = "last") -> Path:
    """`latest_index`: the frame that is said to be the last one written; None for a file that says none."""
    num, frames, space = size.num_samples, size.frames, size.space[:2]
    shapes = {
        "velocity": (num, frames, *space, 2),
        "particles": (num, frames, *space, 1),
        "force": (num, *space, 2),
    }
    with h5py.File(path, "w") as file:
        for name, shape in shapes.items():
            chunks = (1, 1, *shape[2:])
            data = values(name, shape)
            file.create_dataset(name, data=data, chunks=chunks, compression="lzf", shuffle=True)
        file.create_dataset("t", data=np.tile(coordinate(frames), (num, 1)), chunks=(1, 1))
        file.attrs["config"] = "NU: 0.01\n"
        if latest_index is not None:
            file.attrs["latestIndex"] = frames - 1 if latest_index == "last" else latest_index
    return path


def read_navier_stokes(file: h5py.File) -> Arrays:
    fields = np.concatenate([file["velocity"][...], file["particles"][...]], axis=-1)
    return {"fields": fields.transpose(0, 1, 3, 2, 4), "force": file["force"][...].transpose(0, 2, 1, 3)}


def _write_groups(
    path: Path,
    shape: tuple[int, ...],
    grid: Mapping[str, int],
    *,
    num_samples: int,
    chunks: tuple[int, ...] | None,
) -> Path:
    with h5py.File(path, "w") as file:
        for sample in range(num_samples):
            group = file.create_group(f"{sample:04d}")
            data = values(group.name, shape)
            group.create_dataset("data", data=data, chunks=chunks, compression="lzf" if chunks else None)
            group.attrs["config"] = "sim: {}\n"
            for axis, length in grid.items():
                group[f"grid/{axis}"] = coordinate(length)
    return path


def write_diffsorp(path: Path, size: Size = SMALL) -> Path:
    t, x = size.frames, size.space[0]
    return _write_groups(path, (t, x, 1), {"t": t, "x": x}, num_samples=size.num_samples, chunks=(3, 4, 1))


def write_diffreact(path: Path, size: Size = SMALL) -> Path:
    t, (x, y) = size.frames, size.space[:2]
    grid = {"t": t, "x": x, "y": y}
    return _write_groups(path, (t, y, x, 2), grid, num_samples=size.num_samples, chunks=(2, 3, 3, 1))


def write_shallow_water(path: Path, size: Size = SMALL) -> Path:
    t, (x, y) = size.frames, size.space[:2]
    grid = {"t": t, "x": x, "y": y}
    return _write_groups(path, (t, x, y, 1), grid, num_samples=size.num_samples, chunks=None)


def read_groups(file: h5py.File) -> Arrays:
    return {"fields": np.stack([file[name]["data"][...] for name in sorted(file)])}


def read_shallow_water(file: h5py.File) -> Arrays:
    return {"fields": read_groups(file)["fields"].transpose(0, 1, 3, 2, 4)}


def write_converted(path: Path) -> Path:
    """A user's file: compressed in chunks over several samples, big-endian, named as the user likes."""
    with h5py.File(path, "w") as file:
        data = values("data", (5, T, X, 1), ">f4")
        file.create_dataset("data", data=data, chunks=(2, 3, 4, 1), compression="gzip")
        file["x"] = coordinate(X, start=-1.0)
        file["t-coordinate"] = coordinate(T)
        file.attrs.update({"nu": np.array([0.02]), "comment": "made at home", "version": 3})
    return path


def write_converted_2d(path: Path) -> Path:
    """Without a channel axis."""
    return write(path, {"data": values("data", (5, T, Y, X)), "x": coordinate(X), "y": coordinate(Y)})


def read_converted(file: h5py.File) -> Arrays:
    return {"fields": file["data"][...].astype("=f4")}


def read_converted_2d(file: h5py.File) -> Arrays:
    return {"fields": file["data"][...][..., None]}


@dataclass(frozen=True)
class Family:
    """One layout: a file of it, how it is written, and how to read it without the package."""

    task: str
    file_name: str
    layout: str
    write: Callable[..., Path]
    read: Callable[[h5py.File], Arrays]

    def __str__(self) -> str:
        return self.file_name


FAMILIES = (
    Family("advection1d", "1D_Advection_Sols_beta0.4.hdf5", "pdebench-1d", write_advection, read_scalar_1d),
    Family("burgers1d", "1D_Burgers_Sols_Nu0.01.hdf5", "pdebench-1d", write_scalar_1d, read_scalar_1d),
    Family("reacdiff1d", "ReacDiff_Nu0.5_Rho1.0.hdf5", "pdebench-1d", write_reacdiff, read_scalar_1d),
    Family("diffsorp1d", "1D_diff-sorp_NA_NA.h5", "pdebench-groups", write_diffsorp, read_groups),
    Family(
        "cfd1d",
        "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_periodic_Train.hdf5",
        "pdebench-cfd",
        write_cfd1d,
        read_cfd1d,
    ),
    Family("cfd1d", "Sod6.hdf5", "pdebench-cfd", write_shock_tube, read_shock_tube),
    Family(
        "cfd2d",
        "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_64_Train.hdf5",
        "pdebench-cfd",
        write_cfd2d,
        read_cfd2d,
    ),
    Family(
        "cfd3d",
        "3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5",
        "pdebench-cfd",
        write_cfd3d,
        read_cfd3d,
    ),
    Family("darcy2d", "2D_DarcyFlow_beta1.0_Train.hdf5", "pdebench-darcy", write_darcy, read_darcy),
    Family("diffreact2d", "2D_diff-react_NA_NA.h5", "pdebench-groups", write_diffreact, read_groups),
    Family("shallow_water2d", "2D_rdb_NA_NA.h5", "pdebench-groups", write_shallow_water, read_shallow_water),
    Family(
        "navier_stokes2d",
        "ns_incom_inhom_2d_128-0.h5",
        "pdebench-ns-incom",
        write_navier_stokes,
        read_navier_stokes,
    ),
    Family("burgers1d", "burgers1d_train.h5", "converted", write_converted, read_converted),
    Family("shallow_water2d", "shallow_water2d_train.h5", "converted", write_converted_2d, read_converted_2d),
)
