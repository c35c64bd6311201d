"""A store of every dtype and rank, whose values are random bits: what other readers are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from small_stores import Values, build

from ups_store.format.metadata import DTYPE_NAMES, dtype_of

NUM_SAMPLES = 7
LARGE, SMALL, GRID = "large", "small", "grid"  # of each dtype: with slots, a number per sample, a constant
DIMS = {"flow": ("sample", "time", "z", "y", "x"), "mask": ("sample", "x")}
ATTRS = {"pde": "compressible flow", "boundary": ["periodic", "wall"], "length": 2.5}


def random_bits(shape: tuple[int, ...], dtype: str, *, seed: int = 0) -> npt.NDArray[Any]:
    """Every bit pattern is as likely as any other, NaNs of every payload included; bools are 0 or 1."""
    target = dtype_of(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, target.itemsize), np.uint8)
    return (raw & 1 if dtype == "bool" else raw).view(target).reshape(shape)


def reference_values(num_samples: int = NUM_SAMPLES) -> dict[str, npt.NDArray[Any]]:
    """Arrays with a sample axis: two of each dtype, five dimensions, two dimensions, no elements."""
    values = {
        "flow": random_bits((num_samples, 2, 4, 8, 32), "float32", seed=1),
        "mask": random_bits((num_samples, 32), "bool", seed=2),
        "nothing": np.zeros((num_samples, 0, 2), np.int16),
    }
    for seed, dtype in enumerate(DTYPE_NAMES):
        values[f"{LARGE}_{dtype}"] = random_bits((num_samples, 3, 1400), dtype, seed=seed)
        values[f"{SMALL}_{dtype}"] = random_bits((num_samples,), dtype, seed=seed)
    return values


def reference_constants() -> dict[str, npt.NDArray[Any]]:
    """Arrays without a sample axis: one of each dtype, coordinates, no dimension, no elements."""
    constants = {
        "x": np.linspace(0, 1, 32),
        "time": np.arange(2, dtype=np.float32),
        "dt": np.array(0.25),
        "is_steady": np.array(True),
        "no_probes": np.zeros((0, 3), np.float64),
    }
    for seed, dtype in enumerate(DTYPE_NAMES):
        constants[f"{GRID}_{dtype}"] = random_bits((4, 5), dtype, seed=100 + seed)
    return constants


def reference_arrays(num_samples: int = NUM_SAMPLES) -> dict[str, npt.NDArray[Any]]:
    """All of them."""
    return {**reference_values(num_samples), **reference_constants()}


def build_reference(path: Path, num_samples: int = NUM_SAMPLES) -> Path:
    """Build the store of `reference_arrays`."""
    values: Values = reference_values(num_samples)
    constants = reference_constants()
    return build(path, values, constants=constants, dims=DIMS, attrs=ATTRS)
