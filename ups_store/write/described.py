"""Arrays as xarray, Zarr and HDF5 have them: with attributes, some of which say how numbers are encoded."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.canonical import plain_json
from ups_store.sources.cf import ATTRIBUTES, CfEncoding

TIME_UNITS = {"M": "nanoseconds since 1970-01-01", "m": "nanoseconds"}  # as xarray decodes them
_OF_LIBRARIES = {  # how dimensions are named, which `dims` keeps, and links within an HDF5 file
    *("CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST", "_ARRAY_DIMENSIONS"),
    *("_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties", "_nc3_strict", "ups_store"),
}


@dataclass(frozen=True)
class Described:
    """An array and what is said of it; its numbers are decoded as they are read."""

    array: Any  # what `array[a:b]` can be asked of
    attrs: Mapping[str, Any]  # what else is said, as JSON values
    encoding: CfEncoding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its numbers, decoded."""
        if self.array.dtype.kind in TIME_UNITS:
            return np.dtype(np.int64)
        return self.encoding.dtype(self.array.dtype) if self.encoding else self.array.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
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
    """Return an array with its attributes; itself if it has none.

    Raises:
        SpecError: Kind "attrs", of attributes that make no sense, or that JSON can't hold.
        SourceError: Kind "not_written", of HDF5 with parts that were never written.
    """
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
    numbers = {key: _number(attrs[key]) for key in ATTRIBUTES if key in attrs}
    try:
        encoding = CfEncoding.of(numbers, array.dtype)
    except ValueError as error:
        raise SpecError(str(error), kind="attrs", array=name, hint="mend it, or remove it") from None
    return Described(array, kept, encoding) if kept or encoding else array


def _number(value: Any) -> Any:
    """A fill value as a number: in Zarr 3 xarray writes floats as base64 of their bytes."""
    try:
        is_text = isinstance(value, str)
        return np.frombuffer(base64.b64decode(value, validate=True), "<f8")[0] if is_text else value
    except ValueError:
        return value


def json_attrs(attrs: Mapping[Any, Any], *, of: str = "") -> dict[str, Any]:
    """Return attributes as JSON values, but those that are another library's own.

    Raises:
        SpecError: Kind "attrs", for what JSON can't hold.
    """
    kept = {}
    for key, value in attrs.items():
        if key in _OF_LIBRARIES:
            continue
        plain = value.tolist() if hasattr(value, "tolist") else value
        plain = plain.decode("utf-8", "replace") if isinstance(plain, bytes) else plain
        try:
            kept[str(key)] = plain_json(plain, what="attrs")
        except SpecError as error:
            problem, found = f"attribute {str(key)!r} can't be stored", type(value).__name__
            hint, array = "convert it to numbers or text, or remove it", of or None
            raise SpecError(
                problem, kind="attrs", array=array, expected="JSON", found=found, hint=hint
            ) from error
    return kept
