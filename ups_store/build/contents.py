"""What a store holds, for what its sources hold: arrays and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ups_store.format.array_spec import ArraySpec
from ups_store.format.metadata import dtype_of
from ups_store.sources.contents import SourceInfo
from ups_store.sources.tasks import Task

PARAMETER_DTYPE = "float64"  # parameters are attributes of float64 in PDEBench's files


def arrays_of(infos: Sequence[SourceInfo], num_samples: int, dtype: str) -> dict[str, ArraySpec]:
    """Arrays of N samples of some files, those in space in one dtype."""
    arrays = {}
    for name, array in infos[0].arrays.items():
        attrs = {"channels": list(infos[0].channels)} if name == "fields" else {}
        is_in_space = not {"x", "y", "z"}.isdisjoint(array.dims)  # else it is a parameter, or the time
        arrays[name] = ArraySpec(
            (num_samples, *array.shape),
            dtype if is_in_space else PARAMETER_DTYPE,
            dims=("sample", *array.dims),
            attrs=attrs,
        )
    for name in sorted(infos[0].parameters):
        arrays[name] = ArraySpec((num_samples,), PARAMETER_DTYPE, dims=("sample",))
    return arrays


def attrs_of(info: SourceInfo, task: Task, split: str) -> dict[str, Any]:
    """Attributes of the root group."""
    axes = {axis: points for axis, points in info.constants.items() if axis != "t" and len(points) > 1}
    # Coordinates are cell centres: n cells of the grid's spacing make the domain.
    lengths = {
        axis: round(float(len(points) * (points[-1] - points[0]) / (len(points) - 1)), 6)
        for axis, points in axes.items()
    }
    return {
        "task": task.name,
        "split": split,
        "channels": list(info.channels),
        "boundary": dict(info.boundary),
        "domain_lengths": lengths,
        **info.attrs,
    }


def payload_nbytes(arrays: Mapping[str, ArraySpec]) -> int:
    """Bytes of one sample of all arrays."""
    return sum(
        int(np.prod(spec.shape[1:], dtype=np.int64)) * dtype_of(spec.dtype).itemsize
        for spec in arrays.values()
    )
