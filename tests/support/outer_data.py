"""Sources whose fields lie in other files: behind links, in raw bytes, or in virtual datasets."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from pdebench_files import T, X, coordinate, values

SAMPLES = 6
FIELDS = values("outer", (SAMPLES, T, X))


def write_source(path: Path, **items: object) -> Path:
    """A source of Burgers whose items are set as given: links, or data; `tensor` is needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["x-coordinate"], file["t-coordinate"] = coordinate(X), coordinate(T + 1)
        file.attrs["Nu"] = 0.01
        for name, item in items.items():
            file[name] = item
    return path


def write_fields(path: Path, fields: np.ndarray = FIELDS, **storage: object) -> Path:
    """An HDF5 file with one dataset `u`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("u", data=fields, **storage)
    return path


def write_linked(path: Path, outer: str, target: str = "/u") -> Path:
    """Fields behind an external link."""
    return write_source(path, tensor=h5py.ExternalLink(outer, target))


def write_raw(path: Path, outer: str, *, offset: int = 0, size: int = h5py.h5f.UNLIMITED) -> Path:
    """Fields whose bytes are those of another file."""
    write_source(path)
    with h5py.File(path, "a") as file:
        file.create_dataset("tensor", FIELDS.shape, "<f4", external=[(outer, offset, size)])
    return path


def write_virtual(path: Path, *outer: str, fields_each: int = 1, name: str = "u") -> Path:
    """Fields put together of so many samples of each of some files, in a virtual dataset."""
    write_source(path)
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((len(outer) * fields_each, T, X), "<f4")
        for i, each in enumerate(outer):
            source = h5py.VirtualSource(each, name, (fields_each, T, X))
            layout[i * fields_each : (i + 1) * fields_each] = source
        file.create_virtual_dataset("tensor", layout, fillvalue=-1)
    return path


def write_halves(folder: Path) -> tuple[str, str]:
    """The two halves of the fields as files; returns their names."""
    half = SAMPLES // 2
    for name, fields in (("a.h5", FIELDS[:half]), ("b.h5", FIELDS[half:])):
        write_fields(folder / name, fields)
    return "a.h5", "b.h5"
