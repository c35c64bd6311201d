"""Write the golden files of the present format version: stores of every dtype and rank with JSON twins.

python tools/make_golden.py [FOLDER]

Deterministic: the same program writes the same bytes, which `tests/store/format/test_golden.py` compares.
A twin says what must be read from its store, without this package's reader: shape, dtype, dimension names and
the payload as a pattern of bytes that is repeated up to its length, with its sha256. Files of a published
version are never written again; a new version gets a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

import ups_store
from ups_store.format.metadata import DTYPE_NAMES, dtype_of

FOLDER = Path(__file__).parents[1] / "tests" / "store" / "data" / "golden" / "v1.0"

PATTERN_ITEMS = 37  # odd and prime: no two samples or rows are equal
FLOAT_BITS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}
SLOT_DTYPES = ("bool", "bfloat16", "float32", "int64")  # one of each size: slots know bytes, not dtypes


@dataclass(frozen=True)
class Array:
    """One array of a golden store."""

    shape: tuple[int, ...]  # whole shape, N first where there is a sample axis
    dtype: str  # zarr data type name
    dims: tuple[str, ...]  # dimension names; "sample" first where there is a sample axis

    @property
    def is_constant(self) -> bool:
        return self.dims[:1] != ("sample",)

    @property
    def values(self) -> npt.NDArray[Any]:
        dtype, pattern = dtype_of(self.dtype), pattern_of(self.dtype)
        nbytes = math.prod(self.shape) * dtype.itemsize
        raw = (pattern * (nbytes // len(pattern) + 1))[:nbytes]
        return np.frombuffer(raw, dtype).reshape(self.shape)


@dataclass(frozen=True)
class Case:
    """One golden store: its arrays by name, constants included, and attributes of the root."""

    arrays: Mapping[str, Array]
    attrs: Mapping[str, Any] = field(default_factory=dict)


def pattern_of(dtype: str) -> bytes:
    """Bytes of 37 items: the extremes of the dtype, NaN payloads included, then any bits."""
    itemsize = dtype_of(dtype).itemsize
    bits = 8 * itemsize
    if dtype == "bool":
        items = [i * i % 3 % 2 for i in range(PATTERN_ITEMS)]
    else:
        edges = _float_edges(*FLOAT_BITS[dtype]) if dtype in FLOAT_BITS else _integer_edges(bits)
        any_bits = (i * 0x9E3779B97F4A7C15 % (1 << bits) for i in range(1, PATTERN_ITEMS + 1))
        items = [*edges, *any_bits][:PATTERN_ITEMS]
    return b"".join(item.to_bytes(itemsize, "little") for item in items)


def _integer_edges(bits: int) -> list[int]:
    return [0, 1, (1 << bits) - 1, (1 << (bits - 1)) - 1, 1 << (bits - 1)]


def _float_edges(exponent_bits: int, mantissa_bits: int) -> list[int]:
    """Zeros, ones, subnormals, the largest, infinities; NaNs: quiet, with payload, negative, signalling."""
    sign, infinity = 1 << (exponent_bits + mantissa_bits), ((1 << exponent_bits) - 1) << mantissa_bits
    one, quiet = ((1 << (exponent_bits - 1)) - 1) << mantissa_bits, 1 << (mantissa_bits - 1)
    finite = [0, sign, one, sign | one, 1, (1 << mantissa_bits) - 1, 1 << mantissa_bits, infinity - 1]
    nans = [infinity | quiet, infinity | quiet | 5, sign | infinity | quiet | 5, infinity | 1]
    return [*finite, infinity, sign | infinity, *nans]


def cases() -> dict[str, Case]:
    """Every golden store by name."""
    found = {f"{dtype}_{rank}": case for dtype in DTYPE_NAMES for rank, case in _ranks(dtype).items()}
    for dtype in SLOT_DTYPES:
        row = 4099 // dtype_of(dtype).itemsize + 1  # from 4096 bytes a sample on, and not a multiple of 64
        found[f"{dtype}_slots"] = Case({"u": Array((2, row), dtype, ("sample", "x"))})
    found["no_arrays"] = Case({}, {"title": "no arrays"})
    found["only_constants"] = Case({"x": Array((3,), "float64", ("x",))})
    found["sorted_by_name"] = Case(  # not by the names of their entries (2.2)
        {name: Array((2,), "int16", ("sample",)) for name in ("u.b", "u-b", "u", "u_b", "U", "u0")}
    )
    found["every_dtype"] = Case(
        {f"a_{dtype}": Array((2, 3), dtype, ("sample", "x")) for dtype in DTYPE_NAMES},
        {"title": "every dtype, in ünicode", "numbers": [0.1, 1e21, -3, None, True]},
    )
    return found


def _ranks(dtype: str) -> dict[str, Case]:
    grid = ("sample", "time", "z", "y", "x", "channel")
    return {
        "no_samples": Case({"u": Array((0, 4), dtype, ("sample", "x"))}),
        "one_sample": Case({"u": Array((1, 40), dtype, ("sample", "x"))}),
        "scalar": Case(
            {
                "nu": Array((3,), dtype, ("sample",)),
                "x": Array((5,), dtype, ("x",)),
                "length": Array((), dtype, ()),
                "nothing": Array((0,), dtype, ("none",)),
            }
        ),
        "2d": Case({"u": Array((3, 5), dtype, ("sample", "x"))}),
        "5d": Case({"u": Array((2, 2, 1, 3, 2, 2), dtype, grid), "e": Array((2, 0), dtype, ("sample", "k"))}),
    }


def write_store(path: Path, case: Case) -> Path:
    """Write a golden store; the last sample first, which changes nothing."""
    varying = {name: array for name, array in case.arrays.items() if not array.is_constant}
    constants = {name: array for name, array in case.arrays.items() if array.is_constant}
    with ups_store.create(
        path,
        {name: ups_store.ArraySpec(a.shape, a.dtype, dims=a.dims) for name, a in varying.items()},
        constants={name: array.values for name, array in constants.items()},
        dims={name: array.dims for name, array in constants.items()},
        identity={"golden": path.name.removesuffix(".zarr.zip")},
        attrs=case.attrs,
        durability="lazy",  # the finished file is the same
    ) as writer:
        for i in reversed(range(writer.num_samples)):
            writer.commit(i, {name: array.values[i] for name, array in varying.items()})
        return writer.finish()


def twin_of(path: Path, case: Case) -> dict[str, Any]:
    """What must be read from a golden store, as JSON values."""
    raw = path.read_bytes()
    arrays = {
        name: {
            "shape": array.shape,
            "dtype": array.dtype,
            "dims": array.dims,
            "repeated_bytes": pattern_of(array.dtype)[: array.values.nbytes].hex(),
            "sha256": hashlib.sha256(array.values.tobytes()).hexdigest(),
        }
        for name, array in sorted(case.arrays.items())
    }
    return {
        "format_version": "1.0",
        "file": {"nbytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()},
        "attrs": case.attrs,
        "arrays": arrays,
    }


def write_golden(folder: Path) -> None:
    """Write every golden store and its twin."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases().items():
        path = write_store(folder / f"{name}.zarr.zip", case)
        text = json.dumps(twin_of(path, case), indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n")


def main(folder: Annotated[Path, typer.Argument(help="made if missing")] = FOLDER) -> None:
    """Write the golden files of the present format version."""
    write_golden(folder)


if __name__ == "__main__":
    typer.run(main)
