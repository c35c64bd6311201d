"""Arrays as xarray, Zarr and HDF5 have them: with attributes, some of which say how numbers are encoded."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.canonical import plain_json
from ups_store.sources.cf_encoding import ATTRIBUTES, CfEncoding

TIME_UNITS = {"M": "nanoseconds since 1970-01-01", "m": "nanoseconds"}  # as xarray decodes them
_OF_LIBRARIES = {  # how dimensions are named, which `dims` keeps, and links within an HDF5 file
    *("CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST", "_ARRAY_DIMENSIONS"),
    *("_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties", "_nc3_strict", "ups_store"),
}


@dataclass(frozen=True)
class Described:
    """An array with its attributes; its numbers are decoded as they are read."""

    array: Any  # what `array[a:b]` can be asked of
    attrs: Mapping[str, Any]  # those that don't say how numbers are encoded, as JSON values
    encoding: CfEncoding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the numbers, decoded."""
        if self.array.dtype.kind in TIME_UNITS:
            return np.dtype(np.int64)
        return self.encoding.dtype(self.array.dtype) if self.encoding else self.array.dtype

    @property
    def nbytes(self) -> int:
        """Count the bytes of the numbers."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        values = np.asarray(self.array[key])
        if values.dtype.kind in TIME_UNITS:
            return values.astype(f"{values.dtype.kind}8[ns]").view(np.int64)
        return self.encoding.decode(values) if self.encoding else values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[...], dtype)


def described(name: str, array: Any) -> Any:
    """Return an array with its attributes, which have to make sense; itself if it has none."""
    if isinstance(array, Described) or not (hasattr(array, "dtype") and hasattr(array, "shape")):
        return array
    if type(array).__module__.startswith("h5py"):
        from ups_store.sources.hdf5 import check_written  # which imports h5py

        check_written(array, array.name, (slice(None),) * array.ndim, path=array.file.filename)
    attributes: Any = getattr(array, "attrs", None)
    attrs = dict(attributes) if hasattr(attributes, "keys") else {}
    metadata = getattr(array, "metadata", None)
    if getattr(metadata, "zarr_format", 3) == 2 and "_ARRAY_DIMENSIONS" in attrs:
        fill = getattr(metadata, "fill_value", None)  # where xarray keeps it in this version of Zarr
        attrs |= {} if fill is None else {"_FillValue": fill}
    kept = json_attrs({key: value for key, value in attrs.items() if key not in ATTRIBUTES}, of=name)
    kind = getattr(array.dtype, "kind", "")
    if kind in TIME_UNITS:
        return Described(array, {**kept, "units": TIME_UNITS[kind]})
    numbers = {key: attrs[key] for key in ATTRIBUTES if key in attrs}
    for key, value in numbers.items():
        if isinstance(value, str):  # of floats in Zarr 3 xarray writes base64
            with contextlib.suppress(ValueError):
                numbers[key] = np.frombuffer(base64.b64decode(value, validate=True), "<f8")[0]
    try:
        encoding = CfEncoding.of(numbers, array.dtype)
    except ValueError as error:
        raise SpecError(str(error), kind="attrs", array=name, hint="mend it, or remove it") from None
    return Described(array, kept, encoding) if kept or encoding else array


def json_attrs(attrs: Mapping[Any, Any], *, of: str = "") -> dict[str, Any]:
    """Return attributes as JSON values, but those that are another library's own."""
    kept = {}
    for key, value in attrs.items():
        if key in _OF_LIBRARIES:
            continue
        plain = value.tolist() if hasattr(value, "tolist") else value
        plain = plain.decode("utf-8", "replace") if isinstance(plain, bytes) else plain
        try:
            kept[str(key)] = plain_json(plain, what="attrs")
        except SpecError as error:
            problem = f"attribute {str(key)!r} can't be stored"
            facts: dict[str, Any] = {"array": of or None, "expected": "JSON", "found": type(value).__name__}
            hint = "convert it to numbers or text, or remove it"
            raise SpecError(problem, kind="attrs", hint=hint, **facts) from error
    return kept
