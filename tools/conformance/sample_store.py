"""The store that most files of the corpus are made from: every kind of array, a few kilobytes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store

NUM_SAMPLES = 3
LARGE, SMALL, FLAGS, EMPTY = "u", "nu", "mask", "empty"
CONSTANT, EMPTY_CONSTANT = "x", "y"


Values = dict[str, npt.NDArray[Any]]


def sample_values() -> tuple[Values, Values]:
    """The values of its arrays with samples, and those of its constants."""
    values = {
        LARGE: (np.arange(NUM_SAMPLES * 40 * 32) % 64).astype(np.float32).reshape(NUM_SAMPLES, 40, 32),
        SMALL: np.array([0.1, 0.01, 0.001]),
        FLAGS: np.arange(NUM_SAMPLES * 4).reshape(NUM_SAMPLES, 4) % 3 == 0,
        EMPTY: np.zeros((NUM_SAMPLES, 0), np.int16),
    }
    return values, {CONSTANT: np.linspace(0.0, 1.0, 32), EMPTY_CONSTANT: np.zeros(0)}


def write_sample_store(path: Path) -> Path:
    """Write it: 3 samples, a large array, small ones, a boolean one, one without elements, two constants.

    One of the constants has no elements.
    """
    arrays = {
        LARGE: ups_store.ArraySpec((NUM_SAMPLES, 40, 32), "float32", dims=("sample", "time", "x")),
        SMALL: ups_store.ArraySpec((NUM_SAMPLES,), "float64", attrs={"units": "m2 s-1"}),
        FLAGS: ups_store.ArraySpec((NUM_SAMPLES, 4), "bool"),
        EMPTY: ups_store.ArraySpec((NUM_SAMPLES, 0), "int16"),
    }
    values, constants = sample_values()
    with ups_store.create(
        path, arrays, constants=constants, identity={"task": "sample"}, attrs={"title": "sample"}
    ) as writer:
        writer.commit_many(range(NUM_SAMPLES), values)
        return writer.finish()


@functools.cache
def sample_store() -> tuple[bytes, Values, Values]:
    """Its bytes, and the values as `sample_values` has them."""
    with tempfile.TemporaryDirectory() as folder:
        return write_sample_store(Path(folder) / "sample.zarr.zip").read_bytes(), *sample_values()
