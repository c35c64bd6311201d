"""Small stores for tests: values with every kind of array, specs from values, building in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import numpy.typing as npt

import ups_store
from ups_store import ArraySpec, StoreWriter
from ups_store.format.metadata import dtype_of
from ups_store.writing import commit as commit_module

Values = Mapping[str, npt.NDArray[Any]]
Dims = Mapping[str, Sequence[str]]

IDENTITY = {"task": "burgers1d", "split": "train", "latent": {"dim": 2, "len": 3}}
DIMS = {
    "fields": ("sample", "time", "x", "channel"),
    "latent": ("sample", "time", "token", "width"),
    "mask": ("sample", "x"),
    "t": ("time",),
}


class MakeStore(Protocol):
    """The fixture `make_store`: builds a store in the test's folder, of `mixed_values` by default."""

    def __call__(self, values: Values | None = None, *, name: str = ..., **options: Any) -> Path: ...


def mixed_values(num_samples: int = 4, *, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Arrays of every kind: slots (5120 bytes a sample), plain chunks of several dtypes, no elements."""
    rng = np.random.default_rng(seed)
    return {
        "fields": rng.standard_normal((num_samples, 5, 64, 4)).astype(np.float32),
        "latent": rng.standard_normal((num_samples, 5, 3, 2)).astype(dtype_of("bfloat16")),
        "mask": rng.random((num_samples, 64)) < 0.5,
        "nu": rng.random(num_samples),
        "nothing": np.zeros((num_samples, 0, 2), np.int16),
    }


def mixed_constants() -> dict[str, npt.NDArray[Any]]:
    """Coordinates that fit `mixed_values`."""
    return {"x": np.linspace(0, 1, 64), "t": np.arange(5, dtype=np.float32)}


def specs_of(values: Values, dims: Dims | None = None) -> dict[str, ArraySpec]:
    """What `create` needs to hold the values."""
    dims = dims or {}
    return {name: ArraySpec(v.shape, v.dtype, dims=dims.get(name)) for name, v in values.items()}


def begin(
    path: Path,
    values: Values,
    *,
    constants: Values | None = None,
    dims: Dims = DIMS,
    identity: Mapping[str, Any] = IDENTITY,
    **options: Any,
) -> StoreWriter:
    """`create` a store that can hold the values; options are `create`'s."""
    constants = constants or {}
    constant_dims = {name: dims[name] for name in constants if name in dims}
    specs = specs_of(values, dims)
    return ups_store.create(
        path, specs, constants=constants, dims=constant_dims, identity=identity, **options
    )


def build(path: Path, values: Values, **options: Any) -> Path:
    """Create, commit and finish a store of the values; options as for `begin`."""
    with begin(path, values, **options) as writer:
        writer.commit_many(np.arange(writer.num_samples), values)
        return writer.finish()


def sample_of(values: Values, index: int) -> dict[str, npt.NDArray[Any]]:
    """One sample of the values, by array."""
    return {name: value[index] for name, value in values.items()}


def samples_of(values: Values, indices: Sequence[int] | npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Some samples of the values, by array."""
    return {name: value[np.asarray(indices, np.int64)] for name, value in values.items()}


def assert_same_bits(found: Values, expected: Values) -> None:
    """Names, shapes, dtypes and bits agree: NaNs and signed zeros too."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert found[name].dtype == value.dtype, name
        assert found[name].tobytes() == value.tobytes(), name


def all_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Copies of every array with a sample axis, checked by `verify` first."""
    with ups_store.open(path) as store:
        report = store.verify()
        assert report.ok, report.problems
        return {name: store[name].copy() for name in store.arrays}


def names_in(folder: Path) -> list[str]:
    """File names in a folder, sorted."""
    return sorted(entry.name for entry in folder.iterdir())


def flip(path: Path, *offsets: int) -> None:
    """Change one bit of the bytes at `offsets` of a file."""
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


def damage(path: Path, array: str, sample: int) -> None:
    """Change one bit of a sample in a finished store."""
    with ups_store.open(path) as store:
        offset = path.read_bytes().index(store[array][sample].tobytes())
    flip(path, offset)


class StopAt:
    """A `progress` that presses Ctrl-C at one of its calls; `num_calls` counts them, also those after it."""

    def __init__(self, call: int) -> None:
        self.call, self.num_calls = call, 0

    def __call__(self, nbytes: int) -> None:
        self.num_calls += 1
        if self.num_calls == self.call:
            raise KeyboardInterrupt


def complete(writer: ups_store.StoreWriter) -> None:
    """Finish a file up to the rename, as a builder does that dies there."""
    with mock.patch.object(commit_module, "publish"):
        commit_module.finish(writer.building)
