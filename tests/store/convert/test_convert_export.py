"""Export: every format holds the same bits, identity and attributes; nothing half-written is ever seen."""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from small_stores import MakeStore, build, damage, mixed_constants, mixed_values, names_in

import ups_store
from ups_store.convert import FORMATS, export_store
from ups_store.errors import (
    CorruptChunkError,
    DiskFullError,
    MissingExtraError,
    SpecError,
    StoreNotFoundError,
)
from ups_store.format.metadata import DTYPE_NAMES, dtype_of
from ups_store.system import files

ATTRS = {"channels": ["u", "v", "w", "p"], "length_x": 1.0, "note": "Grüße", "periodic": True, "none": None}
Arrays = dict[str, npt.NDArray[Any]]


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype_of("bfloat16"))
    return tensor.numpy()


def read_zarr(path: Path) -> Arrays:
    group = zarr.open_group(path, mode="r")
    return {name: np.asarray(array[...]) for name, array in group.arrays()}


def read_safetensors(path: Path) -> Arrays:
    with safe_open(path, framework="pt") as file:
        return {name: to_numpy(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def read_hdf5(path: Path) -> Arrays:
    with h5py.File(path) as file:
        return {name: read_dataset(dataset) for name, dataset in file.items()}


def read_dataset(dataset: h5py.Dataset) -> npt.NDArray[Any]:
    value = np.asarray(dataset[()])
    kind = dataset.id.get_type()
    is_bfloat16 = kind.get_class() == h5py.h5t.FLOAT and kind.get_size() == 2 and kind.get_ebias() == 127
    if not is_bfloat16:
        return value
    bits = np.zeros(dataset.shape, np.uint16)
    if bits.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, bits, kind)
    return bits.view(dtype_of("bfloat16"))


def read_kerchunk(path: Path) -> Arrays:
    """As any reader of Zarr whose chunks are ranges of a file."""
    document = json.loads(path.read_text())
    assert document["version"] == 1
    chunks: dict[str, bytes] = {}
    for key, value in document["refs"].items():
        if isinstance(value, str):
            chunks[key] = value.encode()
        else:
            url, first, nbytes = value
            raw = Path(url.replace("{{u}}", document["templates"]["u"])).read_bytes()
            chunks[key] = raw[first : first + nbytes]
    buffers = {key: zarr.core.buffer.cpu.Buffer.from_bytes(raw) for key, raw in chunks.items()}
    group = zarr.open_group(zarr.storage.MemoryStore(buffers), mode="r")  # type: ignore[arg-type]
    return {name: np.asarray(array[...]) for name, array in group.arrays()}


READ: dict[str, Callable[[Path], Arrays]] = {
    "zarr": read_zarr,
    "safetensors": read_safetensors,
    "hdf5": read_hdf5,
    "kerchunk": read_kerchunk,
}


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        assert found[name].tobytes() == value.tobytes(), name


@pytest.fixture(params=sorted(FORMATS))
def to(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@settings(max_examples=3)
@given(data=st.data())
def test_export_of_any_bits_reads_back_in_every_format(dtype: str, data: st.DataObject) -> None:
    """NaN payloads, signed zeros and infinities included; large and small arrays, constants, no samples."""
    num = data.draw(st.integers(1, 3), label="N")
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
    shape = data.draw(st.sampled_from([(), (3,), (2, 0), (3, 1400)]), label="shape")
    rng = np.random.default_rng(seed)
    kind = dtype_of(dtype)

    def bits(*shape: int) -> npt.NDArray[Any]:
        raw = rng.integers(0, 2 if dtype == "bool" else 256, int(np.prod(shape)) * kind.itemsize, np.uint8)
        return raw.view(kind).reshape(shape)

    values, constants = {"u": bits(num, *shape)}, {"c": bits(*shape)}
    with tempfile.TemporaryDirectory() as name:
        path = build(Path(name, "a.zarr.zip"), values, constants=constants, dims={})
        with ups_store.open(path) as store:
            for to, read in READ.items():
                target = export_store(store, Path(name, f"out_{to}"), to=to, verify=False)
                assert_same(read(target), values | constants)


def test_zarr_export_carries_dims_attrs_and_identity(make_store: MakeStore, tmp_path: Path) -> None:
    with ups_store.open(make_store(attrs=ATTRS)) as store:
        group = zarr.open_group(export_store(store, tmp_path / "out.zarr", to="zarr"), mode="r")
        attrs = dict(group.attrs)
        assert attrs.pop("ups_store") == {
            "config_hash": store.config_hash,
            "identity": store.identity_document,
        }
        assert attrs == ATTRS
        fields = group["fields"]
        assert isinstance(fields, zarr.Array)
        assert fields.metadata.dimension_names == ("sample", "time", "x", "channel")  # type: ignore[union-attr]


def test_safetensors_export_carries_identity_and_attrs(make_store: MakeStore, tmp_path: Path) -> None:
    with ups_store.open(make_store(attrs=ATTRS)) as store:
        target = export_store(store, tmp_path / "out.safetensors", to="safetensors")
        with safe_open(target, framework="np") as file:
            metadata = file.metadata()
        assert metadata["config_hash"] == store.config_hash
        assert json.loads(metadata["identity"]) == store.identity_document
        assert json.loads(metadata["attrs"]) == ATTRS
        assert json.loads(metadata["dims"])["fields"] == ["sample", "time", "x", "channel"]
        raw = target.read_bytes()
        header_nbytes = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + header_nbytes])
        for name in store.dims:
            assert (8 + header_nbytes + header[name]["data_offsets"][0]) % store[name].itemsize == 0, name


def test_hdf5_export_carries_labels_attrs_and_identity(make_store: MakeStore, tmp_path: Path) -> None:
    with (
        ups_store.open(make_store(attrs=ATTRS)) as store,
        h5py.File(export_store(store, tmp_path / "out.h5", to="hdf5")) as file,
    ):
        assert json.loads(file.attrs["ups_store.identity"]) == store.identity_document
        assert file.attrs["ups_store.config_hash"] == store.config_hash
        assert json.loads(file.attrs["ups_store.attrs"]) == ATTRS
        assert (file.attrs["length_x"], file.attrs["note"]) == (1.0, "Grüße")
        assert [dim.label for dim in file["fields"].dims] == ["sample", "time", "x", "channel"]
        # Readers without bfloat16 get the values.
        np.testing.assert_array_equal(
            file["latent"].astype("float32")[...], store["latent"].astype(np.float32)
        )


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_export_refuses_an_existing_target_without_force(
    make_store: MakeStore, tmp_path: Path, to: str
) -> None:
    target = tmp_path / "out"
    with ups_store.open(make_store()) as store:
        export_store(store, target, to=to)
        with pytest.raises(SpecError) as caught:
            export_store(store, target, to=to)
        assert caught.value.kind == "exists"
        export_store(store, target, to=to, force=True)
    assert_same(READ[to](target), mixed_values() | mixed_constants())
    assert names_in(tmp_path) == ["burgers1d_train.zarr.zip", "out"]


def test_export_never_replaces_a_folder_of_other_things(make_store: MakeStore, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with ups_store.open(make_store()) as store, pytest.raises(SpecError) as caught:
        export_store(store, tmp_path / "home", to="zarr", force=True)
    assert caught.value.kind == "exists"
    assert names_in(tmp_path / "home") == ["thesis.tex"]


@pytest.mark.parametrize("alias", ["same", "symlink", "hard_link"])
def test_export_onto_its_source_is_refused_by_any_name(
    make_store: MakeStore, tmp_path: Path, to: str, alias: str
) -> None:
    path = make_store()
    before, target = path.read_bytes(), tmp_path / alias
    if alias == "symlink":
        target.symlink_to(path)
    elif alias == "hard_link":
        target.hardlink_to(path)
    else:
        target = path
    with ups_store.open(path) as store, pytest.raises(SpecError) as caught:
        export_store(store, target, to=to, force=True)
    assert caught.value.kind == "same_file"
    assert path.read_bytes() == before


def test_export_that_fails_midway_leaves_nothing(
    make_store: MakeStore, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    with ups_store.open(make_store()) as store, pytest.raises(DiskFullError) as caught:
        export_store(store, tmp_path / "out", to=to, progress=full)
    assert caught.value.exit_code == 6
    assert caught.value.path == str(tmp_path / "out")
    assert "commit" not in str(caught.value)
    assert names_in(tmp_path) == ["burgers1d_train.zarr.zip"]


def test_interrupted_write_of_the_hdf5_library_is_an_interrupt(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised through the library, it made the next look for a method fail where Python hadn't kept it."""
    calls = failing = 0

    def interrupted(fd: int, offset: int, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            sys._clear_type_cache()
            raise KeyboardInterrupt
        os.pwrite(fd, data, offset)

    monkeypatch.setattr(files, "write_at", interrupted)
    with ups_store.open(make_store()) as store:
        while "out.h5" not in names_in(tmp_path):  # the last writes are of closing
            calls, failing = 0, failing + 1
            with suppress(KeyboardInterrupt):
                export_store(store, tmp_path / "out.h5", to="hdf5", verify=False)
        assert calls == failing - 1 > 10, "each of them was interrupted, and nothing appeared"


def test_export_without_force_never_replaces_a_file_that_appears_meanwhile(
    make_store: MakeStore, tmp_path: Path
) -> None:
    target = tmp_path / "out.h5"
    with ups_store.open(make_store()) as store, pytest.raises(SpecError) as caught:
        export_store(store, target, to="hdf5", progress=lambda nbytes: target.write_text("theirs"))  # type: ignore[arg-type, return-value]
    assert caught.value.kind == "exists"
    assert target.read_text() == "theirs"


def test_export_of_a_damaged_store_is_refused(make_store: MakeStore, tmp_path: Path, to: str) -> None:
    path = make_store()
    damage(path, "fields", 2)
    with ups_store.open(path) as store:
        with pytest.raises(CorruptChunkError) as caught:
            export_store(store, tmp_path / "out", to=to)
        assert (caught.value.array, caught.value.sample) == ("fields", 2)
        assert names_in(tmp_path) == [path.name]


def test_export_to_an_unknown_format_or_folder_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    with ups_store.open(make_store()) as store:
        for to, hint in (("parquet", None), ("arrow", "pyarrow.table"), ("pt", "torch.save")):
            with pytest.raises(SpecError, match=f"found {to}") as caught:
                export_store(store, tmp_path / "out", to=to)
            assert caught.value.kind == "format"
            assert caught.value.hint is hint or hint in (caught.value.hint or "")
        with pytest.raises(StoreNotFoundError):
            export_store(store, tmp_path / "nowhere" / "out", to="hdf5")


@pytest.mark.parametrize(("to", "package"), [("hdf5", "h5py"), ("zarr", "zarr")])
def test_export_without_its_library_is_refused_before_the_store_is_checked(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, package: str
) -> None:
    path = make_store()
    damage(path, "fields", 2)
    monkeypatch.setitem(sys.modules, package, None)
    with ups_store.open(path) as store, pytest.raises(MissingExtraError, match=f"ups-store.{to}."):
        export_store(store, tmp_path / "out", to=to)


def test_export_of_metadata_too_long_for_safetensors_is_refused(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ups_store.convert.export.MAX_HEADER_BYTES", 64)
    with ups_store.open(make_store()) as store, pytest.raises(SpecError) as caught:
        export_store(store, tmp_path / "out", to="safetensors")
    assert caught.value.kind == "limits"


@pytest.mark.parametrize("to", ["safetensors", "hdf5"])
def test_export_needs_memory_for_blocks_only(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"u": np.zeros((256, 64, 1024), np.float32)}  # 64 MiB
    path = build(tmp_path / "a", values, dims={}, durability="lazy")
    del values
    with ups_store.open(path) as store:
        tracemalloc.start()
        try:
            export_store(store, tmp_path / "out", to=to, verify=False)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 40 << 20


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_references_serve_a_copy_elsewhere_through_fsspec(make_store: MakeStore, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    path = make_store()
    with ups_store.open(path) as store:
        target = export_store(store, tmp_path / "references.json", to="kerchunk")
        assert target.stat().st_size < 32_000
    elsewhere = path.rename(tmp_path / "elsewhere.zip")
    options: dict[str, Any] = {"remote_protocol": "file", "asynchronous": True}
    there = {"u": str(elsewhere)}
    system = fsspec.filesystem("reference", fo=str(target), template_overrides=there, **options)
    group = zarr.open_group(zarr.storage.FsspecStore(system, read_only=True), mode="r")
    assert_same({name: np.asarray(a[...]) for name, a in group.arrays()}, mixed_values() | mixed_constants())


def test_references_of_a_ragged_store_name_rows_and_offsets(tmp_path: Path) -> None:
    points = [np.full((n, 2), n, np.float32) for n in (3, 0, 2)]
    with ups_store.write(tmp_path / "a.zarr.zip", [{"points": rows} for rows in points]) as store:
        found = read_kerchunk(export_store(store, tmp_path / "a.json", to="kerchunk"))
        with pytest.raises(SpecError, match="export it to kerchunk"):
            export_store(store, tmp_path / "a.h5", to="hdf5")
    assert found["points"].tobytes() == np.concatenate(points).tobytes()


def test_references_of_partitions_are_refused(make_store: MakeStore, tmp_path: Path) -> None:
    for number in range(2):
        with ups_store.create(
            tmp_path / f"p-0000{number}-of-00002.zarr.zip",
            {"u": ups_store.ArraySpec((1, 3), "float32")},
            identity={},
            partition=(number, 2),
        ) as writer:
            writer.commit(0, {"u": np.zeros(3, np.float32)})
            writer.finish()
    with ups_store.open(tmp_path / "p-*-of-00002.zarr.zip") as store, pytest.raises(SpecError) as caught:
        export_store(store, tmp_path / "p.json", to="kerchunk")
    assert caught.value.kind == "partitions"
