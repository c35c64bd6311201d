"""Numbers that are kept encoded, by the conventions that NetCDF, Zarr and xarray share (CF)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ATTRIBUTES = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")


@dataclass(frozen=True)
class CfEncoding:
    """How stored numbers are decoded: `stored * scale + offset`, and which of them mean "none"."""

    scale: float  # `scale_factor`
    offset: float  # `add_offset`
    fills: tuple[Any, ...]  # `_FillValue` and `missing_value`, but NaN, as numbers of the stored dtype
    is_unsigned: bool  # `_Unsigned`: the bits of integers are those of numbers without a sign
    names: tuple[str, ...]  # those of the attributes that have an effect

    @classmethod
    def of(cls, attrs: Mapping[str, Any], dtype: np.dtype[Any]) -> CfEncoding | None:
        """Return the encoding that attributes describe; None where the numbers are what they say."""
        names, linear = list[str](), {"scale_factor": 1.0, "add_offset": 0.0}
        for name, neutral in tuple(linear.items()):
            value = np.asarray(attrs.get(name, neutral))
            if value.size != 1 or value.dtype.kind not in "fiu" or not np.isfinite(value).all():
                raise ValueError(f"attribute {name!r}: expected one number, found {value.tolist()!r}")
            linear[name] = float(value.item())
            names += [name] * (linear[name] != neutral)
        is_unsigned = dtype.kind == "i" and str(np.asarray(attrs.get("_Unsigned", ""))).lower() == "true"
        native = dtype.newbyteorder("=")
        read_as = np.dtype(f"u{dtype.itemsize}") if is_unsigned else native
        fills = list[Any]()
        for name in ("_FillValue", "missing_value"):
            if name not in attrs or dtype.kind == "b":
                continue
            value = np.asarray(attrs[name]).reshape(-1)
            if value.dtype.kind not in "fiu":
                raise ValueError(
                    f"attribute {name!r}: expected numbers, found {np.asarray(attrs[name]).tolist()!r}"
                )
            with np.errstate(all="ignore"):
                stored = value.astype(native)
            # Those that no stored number can be mean nothing, and NaN is itself.
            usable = stored[stored == value if dtype.kind in "iu" else ~np.isnan(stored)]
            names += [name] * bool(usable.size)
            fills.extend(usable.view(read_as))  # not `+=`, by which NumPy would add up numbers
        names += ["_Unsigned"] * is_unsigned
        if not names:
            return None
        return cls(linear["scale_factor"], linear["add_offset"], tuple(fills), is_unsigned, tuple(names))

    def dtype(self, stored: npt.DTypeLike) -> np.dtype[Any]:
        """Return the floating dtype of decoded numbers: float32 where it holds what is stored exactly."""
        stored = np.dtype(stored)
        return np.dtype("float32" if stored.itemsize <= 2 or stored == np.float32 else "float64")

    def decode(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers, NaN where there are none; new memory."""
        if self.is_unsigned:
            stored = stored.view(f"{stored.dtype.byteorder}u{stored.dtype.itemsize}")
        is_scaled = (self.scale, self.offset) != (1.0, 0.0)
        exact = stored * np.float64(self.scale) + self.offset if is_scaled else stored
        numbers: npt.NDArray[Any] = np.array(exact, self.dtype(stored.dtype))
        for fill in self.fills:
            numbers[stored == fill] = np.nan
        return numbers
