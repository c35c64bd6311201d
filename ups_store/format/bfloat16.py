"""`bfloat16` for zarr-python: the registered extension name, held as `ml_dtypes.bfloat16` (spec 4.7).

zarr-python 3.4.1 and newer load it by the entry point group `zarr.data_type`. Older versions collect that
group but never load it: there `ups_store.format.zarr_entry` registers it as soon as zarr-python reads, and to
create the first array of this type you `import ups_store.format.bfloat16`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, SupportsFloat, SupportsIndex, overload

import numpy as np

from ups_store.errors import MissingExtraError, needs
from ups_store.format.metadata import dtype_of

with needs("zarr"):
    # The codecs `bytes` and `blosc` look for these.
    from zarr.core.dtype.common import HasEndianness, HasItemSize
    from zarr.dtype import ZDType, data_type_registry

    try:
        from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined, unused-ignore]
    except ImportError:  # before zarr 3.3
        from zarr.dtype import DataTypeValidationError

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.common import DTypeJSON, DTypeSpec_V2

_EXPONENT_BITS = 0x7F80  # all set: an infinity or a NaN
_BITS_OF = {"NaN": 0x7FC0, "Infinity": 0x7F80, "-Infinity": 0xFF80}
_NAME_OF = {bits: name for name, bits in _BITS_OF.items()}


def _native_class() -> type[np.dtype[Any]]:
    try:
        return type(dtype_of("bfloat16"))
    except MissingExtraError:  # zarr-python loads this module for arrays of any type: here none is this one
        return np.dtype


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[np.dtype[Any], np.generic], HasEndianness, HasItemSize):
    """Zarr v3 data type `bfloat16`: the upper half of a float32. Every bit pattern survives, NaNs too.

    `endianness` is the byte order in memory; in the file the codec `bytes` decides.
    """

    dtype_cls: ClassVar[type[np.dtype[Any]]] = _native_class()
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"

    @property
    def item_size(self) -> int:
        """Bytes per element."""
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """Wrap the NumPy dtype `ml_dtypes.bfloat16` of either byte order."""
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"dtype {dtype}: expected {cls._zarr_v3_name}")
        is_little = dtype == dtype_of("bfloat16").newbyteorder("<")
        return cls(endianness="little" if is_little else "big")

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the NumPy dtype, in this byte order."""
        return dtype_of("bfloat16").newbyteorder("<" if self.endianness == "little" else ">")

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        raise DataTypeValidationError(f"data type {data!r}: Zarr v2 has no bfloat16")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"data type {data!r}: expected {cls._zarr_v3_name!r}")
        return cls()

    @overload
    def to_json(self, zarr_format: Literal[2]) -> DTypeSpec_V2: ...

    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...

    def to_json(self, zarr_format: ZarrFormat) -> DTypeSpec_V2 | str:
        """Return the value of the key `data_type`."""
        if zarr_format == 2:  # it would keep raw bytes only
            raise ValueError("bfloat16: Zarr v2 has no name for it; create the array with zarr_format=3")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, SupportsFloat | SupportsIndex)

    def cast_scalar(self, data: object) -> np.generic:
        """Return the nearest bfloat16; what is a bfloat16 already keeps its bits."""
        if not self._check_scalar(data):
            raise TypeError(f"{data!r}: expected a number, to become a bfloat16")
        scalar: np.generic = dtype_of("bfloat16").type(data)
        return scalar

    def default_scalar(self) -> np.generic:
        """Return zero."""
        return _from_bits(0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """Read a fill value: a number, "NaN", "Infinity", "-Infinity", or the bits as in "0x7fc1"."""
        if isinstance(data, int | float):
            return self.cast_scalar(data)
        if isinstance(data, str) and data in _BITS_OF:
            return _from_bits(_BITS_OF[data])
        if isinstance(data, str) and re.fullmatch("0x[0-9a-fA-F]{4}", data):
            return _from_bits(int(data, 16))
        expected = "a number, 'NaN', 'Infinity', '-Infinity' or '0x' and 4 hexadecimal digits"
        raise TypeError(f"fill value {data!r}: expected {expected}")

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> JSON:
        """Write a fill value so that reading it gives the same bits."""
        scalar = self.cast_scalar(data)
        bits = int(scalar.view(np.uint16))
        if bits & _EXPONENT_BITS == _EXPONENT_BITS:
            return _NAME_OF.get(bits, f"0x{bits:04x}")
        return float(scalar)


def _from_bits(bits: int) -> np.generic:
    scalar: np.generic = np.uint16(bits).view(dtype_of("bfloat16"))
    return scalar


data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)
