"""The zarr-python data type `bfloat16`: every bit pattern, fill values, and how zarr-python finds it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from small_stores import build
from zarr.codecs import BloscCodec, BytesCodec
from zarr.storage import LocalStore, ZipStore

from ups_store.format.bfloat16 import BFloat16

DTYPE = np.dtype(ml_dtypes.bfloat16)
ALL_BITS = np.arange(1 << 16, dtype=np.uint16).reshape(16, 4096)
QUIET_BITS = ALL_BITS | ((ALL_BITS & 0x7F80 == 0x7F80) & (ALL_BITS & 0x7F != 0)) * np.uint16(0x40)


def scalar(bits: int) -> np.generic:
    value: np.generic = np.uint16(bits).view(DTYPE)
    return value


def bits_of(value: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    return np.asarray(value).view(np.uint16)


def test_zarr_reads_every_bit_pattern_of_store(tmp_path: Path) -> None:
    """Among them all NaNs, signalling ones too; in slots and in a plain chunk."""
    values = {"slots": ALL_BITS.view(DTYPE), "plain": ALL_BITS[:, :2000].view(DTYPE)}
    path = build(tmp_path / "patterns.zarr.zip", values, dims={})
    with ZipStore(path, mode="r") as store:
        group = zarr.open_group(store, mode="r")
        assert dict(group.arrays())["slots"].dtype == DTYPE
        for name, value in values.items():
            np.testing.assert_array_equal(bits_of(group[name][...]), bits_of(value))


@pytest.mark.parametrize(
    "options",
    [
        {"shards": (8, 4096)},
        {"compressors": [BloscCodec()]},
        {"serializer": BytesCodec(endian="big"), "compressors": None},
    ],
    ids=["shards", "blosc", "big endian"],
)
def test_zarr_reads_what_it_wrote_itself(tmp_path: Path, options: dict[str, Any]) -> None:
    """All but signalling NaNs: NumPy warns when zarr-python compares those with the fill value."""
    written = zarr.create_array(
        LocalStore(tmp_path), shape=(16, 4096), dtype=DTYPE, chunks=(4, 4096), **options
    )
    written[:] = QUIET_BITS.view(DTYPE)
    found = zarr.open_array(LocalStore(tmp_path), mode="r")[:]
    assert found.dtype == DTYPE
    np.testing.assert_array_equal(bits_of(found), QUIET_BITS)


def test_zarr_writes_registered_name_and_byte_order(tmp_path: Path) -> None:
    zarr.create_array(LocalStore(tmp_path), shape=(3,), dtype="bfloat16", compressors=None)
    document = json.loads((tmp_path / "zarr.json").read_text())
    assert document["data_type"] == "bfloat16"
    assert document["codecs"] == [{"name": "bytes", "configuration": {"endian": sys.byteorder}}]


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (0x0000, 0.0),
        (0x8000, -0.0),
        (0x3FC0, 1.5),
        (0x0001, 2.0**-133),
        (0x7F80, "Infinity"),
        (0xFF80, "-Infinity"),
        (0x7FC0, "NaN"),
        (0xFFC0, "0xffc0"),
        (0x7FA1, "0x7fa1"),
    ],
)
def test_fill_value_survives_json(tmp_path: Path, bits: int, text: float | str) -> None:
    zarr.create_array(LocalStore(tmp_path), shape=(2,), dtype=DTYPE, fill_value=scalar(bits))
    found = json.loads((tmp_path / "zarr.json").read_text())["fill_value"]
    assert (found, str(found)) == (text, str(text))  # 0.0 == -0.0
    opened = zarr.open_array(LocalStore(tmp_path), mode="r")
    assert bits_of(opened.fill_value) == bits
    assert (bits_of(opened[:]) == bits).all()


def test_fill_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a number"):
        BFloat16().cast_scalar("1.5")


@pytest.mark.parametrize("endianness", ["little", "big"])
def test_native_dtype_of_either_byte_order_round_trips(endianness: Any) -> None:
    data_type = BFloat16(endianness=endianness)
    assert BFloat16.from_native_dtype(data_type.to_native_dtype()) == data_type
    assert data_type.item_size == data_type.to_native_dtype().itemsize


def test_zarr_v2_is_refused(tmp_path: Path) -> None:
    """It would be stored as two raw bytes."""
    with pytest.raises(ValueError, match="zarr_format=3"):
        zarr.create_array(LocalStore(tmp_path), shape=(2,), dtype=DTYPE, zarr_format=2)


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_zarr_lists_group_with_bfloat16_where_only_zarr_is_imported(tmp_path: Path) -> None:
    path = build(tmp_path / "u.zarr.zip", {"u": ALL_BITS.view(DTYPE)}, dims={})
    program = """
import sys, zarr
group = zarr.open_group(zarr.storage.ZipStore(sys.argv[1], mode="r"), mode="r")
print([(name, str(array.dtype)) for name, array in group.arrays()])
"""
    assert run(program, str(path)) == "[('u', 'bfloat16')]"


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param("ml_dtypes", id="no ml_dtypes"),
        pytest.param("zarr.dtype", id="zarr before 3.1", marks=pytest.mark.slow),
    ],
)
def test_zarr_reads_other_types_where_what_bfloat16_needs_is_missing(tmp_path: Path, missing: str) -> None:
    path = build(tmp_path / "u.zarr.zip", {"u": np.arange(6, dtype=np.float32).reshape(2, 3)}, dims={})
    program = f"""
import sys, zarr
sys.modules[{missing!r}] = None
group = zarr.open_group(zarr.storage.ZipStore(sys.argv[1], mode="r"), mode="r")
print(group["u"][...].sum())
"""
    assert run(program, str(path)) == "15.0"


def test_entry_point_of_buffers_gives_zarrs_own_class() -> None:
    """Loading it again changes nothing but that the data type is registered."""
    (entry_point,) = importlib.metadata.entry_points(group="zarr.buffer", name="ups_store_bfloat16")
    assert entry_point.load() is zarr.core.buffer.cpu.Buffer
