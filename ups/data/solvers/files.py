"""Writers of PDEBench's HDF5 layouts, irregularities included.

Fields and coordinates are little-endian float32. Writers take batches, so a set may be larger than memory.
Letters: N samples, T time steps, X and Y cells, C channels.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ups.data.solvers.problem import Trajectories
from ups_store.errors import ConfigError, needs

with needs("train"):
    import h5py
    import yaml

_FLOAT32 = np.dtype("<f4")
# Steady Darcy flow has no times, yet its files hold this many values in `t-coordinate`.
_DARCY_TIMES = 0.25 * np.arange(10)
_METADATA_BYTES = 1 << 20  # room for what libhdf5 holds back until it closes
_MAX_GROUPS = 10_000  # names have four digits and readers sort them as text


def write_single_file(
    path: Path, batches: Iterable[Trajectories], *, num_samples: int, attrs: Mapping[str, float]
) -> None:
    """Write a single-file layout: `tensor`, coordinates, and of Darcy flow its coefficient `nu`.

    In 1D these are `tensor` (N, T, X), `x-coordinate` (X,) and `t-coordinate` (T + 1,); of Darcy flow
    `tensor` (N, 1, X, Y), `nu` (N, X, Y), and all three coordinates.

    Args:
        path: New file.
        batches: At least one, each on the same grid.
        num_samples: N, the samples of all batches together.
        attrs: Root attributes, stored as float64 scalars.
    """
    with _root(path, attrs) as file:
        last = _write_samples(
            file, batches, {"tensor": "fields", "nu": "coefficient"}, num_samples=num_samples
        )
        is_line = last.y is None
        times = np.append(last.t, 2 * last.t[-1] - last.t[-2]) if is_line else _DARCY_TIMES
        coordinates = {"t-coordinate": times, "x-coordinate": last.x, "y-coordinate": last.y}
        for name, centres in coordinates.items():
            if centres is not None:
                file.create_dataset(name, data=centres, dtype=_FLOAT32)


def write_converted(
    path: Path, batches: Iterable[Trajectories], *, num_samples: int, attrs: Mapping[str, float]
) -> None:
    """Write `data` (N, T, Y, X) with coordinates `t`, `y` and `x`, which a build reads as any converted file.

    Args:
        path: New file.
        batches: At least one, each on the same grid.
        num_samples: N, the samples of all batches together.
        attrs: Root attributes, stored as float64 scalars.
    """
    with _root(path, attrs) as file:
        last = _write_samples(file, batches, {"data": "fields"}, num_samples=num_samples)
        for name, values in {"t": last.t, "y": last.y, "x": last.x}.items():
            file.create_dataset(name, data=values, dtype=_FLOAT32)


@contextlib.contextmanager
def _root(path: Path, attrs: Mapping[str, float]) -> Iterator[h5py.File]:
    """Open a new file; attributes follow what is written to it."""
    with h5py.File(path, "w") as file:
        yield file
        for name, value in attrs.items():
            file.attrs[name] = np.float64(value)


def _write_samples(
    file: h5py.File, batches: Iterable[Trajectories], arrays: Mapping[str, str], *, num_samples: int
) -> Trajectories:
    """Write attributes of batches to datasets, where they aren't None, and return the last batch."""
    first = 0
    for batch in batches:
        for name, attribute in arrays.items():
            values = getattr(batch, attribute)
            if values is None:
                continue
            if first == 0:
                file.create_dataset(name, shape=(num_samples, *values.shape[1:]), dtype=_FLOAT32)
            file[name][first : first + len(values)] = values
        first += len(batch.fields)
    assert first == num_samples, f"{first} samples came, {num_samples} were announced"
    return batch


def write_groups(
    path: Path,
    batches: Iterable[Trajectories],
    *,
    num_samples: int,
    settings: Mapping[str, object],
    name: str = "2d_diff-react",
    compression: str | None = "lzf",
) -> None:
    """Write the group-per-sample layout: `0000/data` (T, Y, X, C) and `0000/grid/{x,y,t}`.

    Chunk shapes of compressed data are h5py's choice, as in PDEBench.

    Args:
        path: New file.
        batches: Each with `fields` (n, T, Y, X, C), or (n, T, X, Y, C).
        num_samples: N, the samples of all batches together.
        settings: Stored with the sample number as YAML text in the attribute `config` of every group.
        name: Of the generator, stored there too.
        compression: h5py's filter; None for contiguous data.
    """
    if num_samples > _MAX_GROUPS:
        expected = f"at most {_MAX_GROUPS}, as group names have four digits"
        raise ConfigError(f"num_samples = {num_samples}", kind="setting_out_of_range", expected=expected)
    index = 0
    with h5py.File(path, "w") as file:
        for batch in batches:
            for data in batch.fields:
                _check_room(path, data.size * _FLOAT32.itemsize)
                group = file.create_group(f"{index:04d}")
                arrays = {"data": data, "grid/x": batch.x, "grid/y": batch.y, "grid/t": batch.t}
                for key, values in arrays.items():
                    group.create_dataset(key, data=values, dtype=_FLOAT32, compression=compression)
                sim = {**settings, "n": 1, "seed": index}
                document = {"name": name, "sim": sim}
                group.attrs["config"] = yaml.safe_dump(document, allow_unicode=True, sort_keys=False)
                index += 1


def square(*, start: float, end: float, points: int) -> dict[str, float]:
    """Settings of a square domain, as PDEBench's generators name them."""
    return {
        "x_left": start,
        "x_right": end,
        "xdim": points,
        "y_bottom": start,
        "y_top": end,
        "ydim": points,
    }


def _check_room(path: Path, nbytes: int) -> None:
    """Fail before libhdf5 does: closing a file of groups on a full disk ends the process with a SIGSEGV."""
    if shutil.disk_usage(path.parent).free < nbytes + _METADATA_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
