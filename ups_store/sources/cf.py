"""Numbers that a dataset keeps encoded, by the conventions that NetCDF, Zarr and xarray share (CF)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ATTRIBUTES = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")


@dataclass(frozen=True)
class CfEncoding:
    """What attributes say of stored numbers: `stored * scale + offset`, and which of them mean "none".

    Attributes:
        scale: `scale_factor`.
        offset: `add_offset`.
        fills: `_FillValue` and `missing_value`, but NaN, as numbers of the stored dtype.
        is_unsigned: `_Unsigned`: the bits of integers are those of numbers without a sign.
        names: Those of the attributes that have an effect.
    """

    scale: float
    offset: float
    fills: tuple[Any, ...]
    is_unsigned: bool
    names: tuple[str, ...]

    @classmethod
    def of(cls, attrs: Mapping[str, Any], dtype: np.dtype[Any]) -> CfEncoding | None:
        """The encoding that attributes describe; None where the numbers are what they say."""
        said = {name: np.asarray(attrs[name]) for name in ATTRIBUTES if name in attrs}
        numbers = {
            name: _number(name, said[name], neutral) if name in said else neutral
            for name, neutral in (("scale_factor", 1.0), ("add_offset", 0.0))
        }
        is_unsigned = dtype.kind == "i" and str(said.get("_Unsigned", "")).lower() == "true"
        read_as = np.dtype(f"u{dtype.itemsize}") if is_unsigned else dtype
        fills = {
            name: _fills(name, said[name], dtype) for name in ("_FillValue", "missing_value") if name in said
        }
        names = [
            name for name, neutral in (("scale_factor", 1.0), ("add_offset", 0.0)) if numbers[name] != neutral
        ]
        names += [name for name, values in fills.items() if values.size] + ["_Unsigned"] * is_unsigned
        if not names:
            return None
        every = tuple(value for values in fills.values() for value in values.view(read_as))
        return cls(numbers["scale_factor"], numbers["add_offset"], every, is_unsigned, tuple(names))

    def dtype(self, stored: npt.DTypeLike) -> np.dtype[Any]:
        """The floating dtype that decoded numbers have: float32 where it holds what is stored exactly."""
        stored = np.dtype(stored)
        return np.dtype("float32" if stored.itemsize <= 2 or stored == np.float32 else "float64")

    def decode(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The numbers, NaN where there are none; new memory."""
        if self.is_unsigned:
            stored = stored.view(f"{stored.dtype.byteorder}u{stored.dtype.itemsize}")
        is_scaled = (self.scale, self.offset) != (1.0, 0.0)
        exact = stored * np.float64(self.scale) + self.offset if is_scaled else stored
        numbers: npt.NDArray[Any] = np.array(exact, self.dtype(stored.dtype))
        for fill in self.fills:
            numbers[stored == fill] = np.nan
        return numbers


def _number(name: str, value: npt.NDArray[Any], neutral: float) -> float:
    if value.size != 1 or value.dtype.kind not in "fiu" or not np.isfinite(value).all():
        raise ValueError(f"attribute {name!r}: expected one number, found {value.tolist()!r}")
    return float(value.item())


def _fills(name: str, value: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Fill values as stored numbers; those that no stored number can be are left out."""
    if dtype.kind == "b":
        return np.zeros(0, bool)
    if value.dtype.kind not in "fiu":
        raise ValueError(f"attribute {name!r}: expected numbers, found {value.tolist()!r}")
    value = value.reshape(-1)
    with np.errstate(all="ignore"):
        stored = value.astype(dtype.newbyteorder("="))
    is_whole = dtype.kind in "iu"
    usable: npt.NDArray[Any] = stored[stored == value if is_whole else ~np.isnan(stored)]
    return usable
