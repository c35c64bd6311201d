"""zarr-python, xarray, `zipfile` and `unzip` read what we write."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xarray as xr
import zarr
from reference_store import (
    ATTRS,
    DIMS,
    GRID,
    LARGE,
    NUM_SAMPLES,
    SMALL,
    build_reference,
    reference_arrays,
)
from zarr.storage import LocalStore, ZipStore

import ups_store
from ups_store.format.metadata import DTYPE_NAMES

EXPECTED = reference_arrays()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_reference(tmp_path_factory.mktemp("reference") / "reference.zarr.zip")


@pytest.fixture(scope="module")
def group(path: Path) -> Iterator[zarr.Group]:
    with ZipStore(path, mode="r") as store:
        yield zarr.open_group(store, mode="r")


@pytest.fixture(scope="module")
def folder(path: Path) -> Path:
    """The archive, unpacked."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(path.with_suffix(""))
    return path.with_suffix("")


def read(group: zarr.Group, name: str, selection: Any = ...) -> npt.NDArray[Any]:
    array = group[name]
    assert isinstance(array, zarr.Array)
    return np.asarray(array[selection])


def assert_same_bits(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


# --- zarr-python --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_zarr_reads_every_dtype_and_part_of_a_late_sample(group: zarr.Group, dtype: str) -> None:
    for kind in (LARGE, SMALL, GRID):
        assert_same_bits(read(group, f"{kind}_{dtype}"), EXPECTED[f"{kind}_{dtype}"])
    selection = (NUM_SAMPLES - 1, slice(1, None), slice(3, 700, 2))
    expected = EXPECTED[f"{LARGE}_{dtype}"][selection]
    assert_same_bits(read(group, f"{LARGE}_{dtype}", selection), expected)


def test_zarr_reads_every_rank(group: zarr.Group) -> None:
    """Five axes, two, one of length 0, none at all."""
    for name in ("flow", "mask", "nothing", "dt", "is_steady", "no_probes", "x"):
        assert_same_bits(read(group, name), EXPECTED[name])


@pytest.mark.parametrize("num_samples", [0, 1])
def test_zarr_reads_store_of_few_samples(tmp_path: Path, num_samples: int) -> None:
    path = build_reference(tmp_path / "few.zarr.zip", num_samples)
    with ZipStore(path, mode="r") as store:
        group = zarr.open_group(store, mode="r")
        for name, expected in reference_arrays(num_samples).items():
            assert_same_bits(read(group, name), expected)


def test_zarr_lists_exactly_our_arrays(group: zarr.Group) -> None:
    assert {name for name, _ in group.members(max_depth=None)} == EXPECTED.keys()


def test_zarr_finds_attributes_and_identity(group: zarr.Group, path: Path) -> None:
    attrs = dict(group.attrs)
    ours = attrs.pop("ups_store")
    assert attrs == ATTRS
    with ups_store.open(path) as store:
        assert ours == {
            "config_hash": store.config_hash,
            "format_version": "1.0",
            "identity": store.identity_document,
            "requires": [],
        }


def test_zarr_finds_dimension_names_of_every_array(group: zarr.Group, path: Path) -> None:
    with ups_store.open(path) as store:
        expected = store.dims
    assert expected["flow"] == DIMS["flow"]
    found = {name: tuple(array.metadata.dimension_names) for name, array in group.arrays()}
    assert found == expected


def test_zarr_finds_chunk_per_sample_in_one_shard(group: zarr.Group) -> None:
    flow = group["flow"]
    assert (flow.chunks, flow.shards) == ((1, 2, 4, 8, 32), (NUM_SAMPLES, 2, 4, 8, 32))
    assert group["small_float32"].shards is None


# --- xarray -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(path: Path) -> Iterator[xr.Dataset]:
    with ZipStore(path, mode="r") as store, xr.open_zarr(store, consolidated=False) as dataset:
        yield dataset


def test_xarray_finds_dimensions_and_coordinates(dataset: xr.Dataset) -> None:
    assert {name: dataset.sizes[name] for name in DIMS["flow"]} == {
        "sample": NUM_SAMPLES,
        "time": 2,
        "z": 4,
        "y": 8,
        "x": 32,
    }
    assert dataset["flow"].dims == DIMS["flow"]
    assert set(dataset.coords) == {"x", "time"}
    assert dataset.attrs["boundary"] == ATTRS["boundary"]


def test_xarray_reads_arrays_bit_by_bit(dataset: xr.Dataset) -> None:
    """No value is masked and no dtype changed: a fill value isn't a missing value."""
    for name, expected in EXPECTED.items():
        assert_same_bits(dataset[name].values, expected)


def test_xarray_selects_by_coordinate(dataset: xr.Dataset) -> None:
    found = dataset["flow"].sel(x=EXPECTED["x"][20]).isel(sample=-1).values
    assert_same_bits(found, EXPECTED["flow"][-1, ..., 20])


# --- ZIP ----------------------------------------------------------------------------------------------


def test_zipfile_finds_no_damage(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "zarr.json"
        assert archive.comment == b"ups_store: a Zarr v3 hierarchy"


@pytest.mark.skipif(shutil.which("unzip") is None, reason="no unzip")
def test_unzip_finds_no_damage(path: Path) -> None:
    result = subprocess.run(["unzip", "-t", str(path)], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert "No errors detected" in result.stdout


@pytest.mark.skipif(shutil.which("unzip") is None, reason="no unzip")
def test_unzip_and_zipfile_unpack_same_folder(path: Path, folder: Path, tmp_path: Path) -> None:
    subprocess.run(["unzip", "-q", str(path), "-d", str(tmp_path)], check=True, timeout=60)
    assert files_of(tmp_path) == files_of(folder)


def test_unpacked_folder_is_zarr_hierarchy(folder: Path) -> None:
    group = zarr.open_group(LocalStore(folder, read_only=True), mode="r")
    assert {name for name, _ in group.members(max_depth=None)} == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        assert_same_bits(read(group, name), expected)


def test_zarr_refuses_changed_byte(folder: Path, tmp_path: Path) -> None:
    """Every chunk carries a crc32c that zarr-python checks."""
    damaged = shutil.copytree(folder / "flow", tmp_path / "flow")
    chunk = damaged / "c/0/0/0/0/0"
    raw = bytearray(chunk.read_bytes())
    raw[0] ^= 1
    chunk.write_bytes(raw)
    array = zarr.open_array(LocalStore(damaged, read_only=True), mode="r")
    assert_same_bits(np.asarray(array[1:]), EXPECTED["flow"][1:])
    with pytest.raises(ValueError, match="checksum"):
        array[0]


def test_unpacked_folder_holds_metadata_and_one_chunk_file_per_array(folder: Path) -> None:
    expected = {"zarr.json", *(f"{name}/zarr.json" for name in EXPECTED)}
    for name, value in EXPECTED.items():
        if value.size:
            expected.add("/".join([name, "c", *["0"] * value.ndim]))
    assert files_of(folder).keys() == expected


def test_stream_reader_finds_every_entry_before_directory(path: Path) -> None:
    """Local headers follow one another without gaps (spec 2.2), so a pipe is enough."""
    with zipfile.ZipFile(path) as archive:
        expected = [(name, archive.read(name)) for name in archive.namelist()]
    assert list(stream(path.read_bytes())) == expected


def stream(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Entries in file order, found by their local headers alone (APPNOTE 4.3.7)."""
    position = 0
    while raw[position : position + 4] == b"PK\3\4":
        len_name, len_extra = np.frombuffer(raw, "<u2", 2, position + 26).tolist()
        extra = position + 30 + len_name
        data = extra + len_extra
        assert raw[extra : extra + 4] == b"\1\0\20\0"  # ZIP64 record with both sizes
        (size,) = np.frombuffer(raw, "<u8", 1, extra + 4).tolist()
        yield raw[position + 30 : extra].decode(), raw[data : data + size]
        position = data + size
    assert raw[position : position + 4] == b"PK\1\2"  # the central directory


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
