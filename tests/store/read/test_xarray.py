"""Stores as xarray data sets: the same values of every kind of store; what `open_dataset` opens."""

from __future__ import annotations

import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from entry_points import install_entry_points
from object_server import ObjectServer
from ragged_stores import LENGTHS, TEXTS, build_ragged, ragged_values
from remote_stores import object_server
from small_stores import DIMS, MakeStore, build, damage, mixed_constants, mixed_values
from test_any_store import CONSTANTS, REMOTE_KINDS, VALUES, made

import ups_store
from ups_store import ArrayNotFoundError, NotCommittedError, SpecError, StoreClosedError
from ups_store.read import xarray as xarray_module
from ups_store.read.xarray import StoreBackend

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with pytest.MonkeyPatch.context() as monkeypatch, object_server(monkeypatch) as state:
        yield state


@pytest.fixture
def ragged_sets(tmp_path: Path) -> dict[str, ups_store.AnyStore]:
    """The values of `ragged_values`, in a file, mapped and read, and in stores of a pattern."""
    values = ragged_values()
    path = build_ragged(tmp_path / "a.zarr.zip", values)
    samples = [{name: values[name][i] for name in ("points", "text")} for i in range(len(LENGTHS))]
    for some in (samples[:2], samples[2:]):
        options = {"ragged": ["points"], "dims": {"points": ("point", "xyz")}} if some == samples[:2] else {}
        ups_store.append(tmp_path / "b-*.zarr.zip", some, identity={}, **options).close()
    return {
        "mapped": ups_store.open(path),
        "pread": ups_store.open(path, access="pread"),
        "set": ups_store.open(tmp_path / "b-*.zarr.zip"),
    }


@pytest.mark.parametrize("kind", ["mapped", "pread", "packed partitions", "remote"])
def test_every_kind_of_store_gives_the_values_that_it_holds(
    kind: str, tmp_path: Path, server: ObjectServer
) -> None:
    with made(kind, tmp_path, server) as store:
        dataset = store.to_xarray()
        for name, expected in (VALUES | CONSTANTS).items():
            variable = dataset[name]
            assert variable.dims == store.dims[name]
            assert (variable.shape, variable.dtype) == (expected.shape, expected.dtype)
            assert variable.values.tobytes() == expected.tobytes(), name
        assert dataset.attrs == store.attrs
        assert list(dataset.coords) == ["x"]


@pytest.mark.parametrize("kind", ["mapped", "packed partitions"])
@pytest.mark.parametrize(
    "key",
    [
        {"sample": 2},
        {"sample": -1, "x": [5, 3]},
        {"sample": slice(5, 1, -2), "time": 1},
        {"sample": [4, 0, 4], "channel": slice(1, 3), "time": [0, 2]},
        {"sample": slice(3, 3)},
        {"sample": xr.DataArray([1, 3], dims="z"), "x": xr.DataArray([0, 9], dims="z")},
    ],
    ids=str,
)
def test_parts_are_those_of_numpy(kind: str, key: dict[str, Any], tmp_path: Path) -> None:
    in_memory = xr.Dataset({"fields": (DIMS["fields"], VALUES["fields"])})
    with made(kind, tmp_path) as store:
        found = store.to_xarray(["fields"])["fields"].isel(key)
        xr.testing.assert_identical(found, in_memory["fields"].isel(key))


def test_values_of_a_mapped_store_are_views_of_it(make_store: MakeStore) -> None:
    with ups_store.open(make_store()) as store:
        fields = store.to_xarray()["fields"]
        part = fields.isel(sample=2, time=slice(1, 3)).values
        assert np.shares_memory(fields.values, store["fields"])
        assert np.shares_memory(part, store["fields"])
        assert not part.flags.writeable


def test_assigning_changes_a_copy(make_store: MakeStore) -> None:
    with ups_store.open(make_store()) as store:
        dataset = store.to_xarray()
        dataset["nu"][1] = 7.0
        assert dataset["nu"][1].item() == 7.0
        np.testing.assert_array_equal(store["nu"], mixed_values()["nu"])


@pytest.mark.parametrize("kind", ["mapped", "pread", "set"])
def test_ragged_arrays_are_rows_and_offsets_and_text_is_str(
    kind: str, ragged_sets: dict[str, ups_store.AnyStore]
) -> None:
    dataset, values = ragged_sets[kind].to_xarray(["points", "text"]), ragged_values()
    rows = np.concatenate(values["points"])
    offsets = dataset["points.offsets"].values
    assert dataset["points"].dims == ("point", "xyz")
    np.testing.assert_array_equal(offsets, np.cumsum([0, *LENGTHS]))
    np.testing.assert_array_equal(dataset["points"].values, rows)
    np.testing.assert_array_equal(dataset["points"][offsets[2] : offsets[3]].values, values["points"][2])
    np.testing.assert_array_equal(dataset["points"].isel(point=[6043, 3, 6003]), rows[[6043, 3, 6003]])
    np.testing.assert_array_equal(dataset["points"].isel(point=-1, xyz=0), rows[-1, 0])
    assert dataset["points"].isel(point=slice(7, 7)).values.shape == (0, 3)
    with pytest.raises(IndexError):
        dataset["points"].isel(point=[0, len(rows)]).values  # noqa: B018
    assert dataset["text"].values.tolist() == list(TEXTS)
    assert dataset["text"][3].item() == TEXTS[3]


def test_names_choose_and_what_there_is_not_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    with ups_store.open(make_store()) as store:
        assert list(store.to_xarray(["nu", "x"]).variables) == ["nu", "x"]
        with pytest.raises(ArrayNotFoundError, match="no array 'pressure'"):
            store.to_xarray(["pressure"])
    with pytest.raises(StoreClosedError):
        store.to_xarray()
    with made("device", tmp_path) as there, pytest.raises(SpecError) as caught:
        there.to_xarray()
    assert caught.value.kind == "unsupported"


def test_closing_either_keeps_views_and_ends_reading(make_store: MakeStore) -> None:
    path = make_store()
    with ups_store.open(path) as store:
        mine = store.to_xarray()
        mine.close()
        assert store.gather([0], ["nu"])["nu"][0] == mine["nu"][0]
    opened = xr.open_dataset(path, engine=StoreBackend, cache=False)
    view = opened["fields"].values
    opened.close()
    np.testing.assert_array_equal(view, mixed_values()["fields"])
    with pytest.raises(StoreClosedError):
        opened["mask"].values  # noqa: B018


def test_pickled_data_sets_open_the_store_again(make_store: MakeStore) -> None:
    path = make_store({"u": np.arange(40000.0).reshape(4, -1)}, dims={})
    with ups_store.open(path) as store, xr.open_dataset(path, engine=StoreBackend, chunks={}) as chunked:
        for dataset in (store.to_xarray(), chunked):
            raw = pickle.dumps(dataset)
            assert len(raw) < 20000 < store["u"].nbytes
            with pickle.loads(raw) as copy:
                np.testing.assert_array_equal(copy["u"].values, store["u"])


def test_chunks_of_dask_are_of_whole_samples_and_alike(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_store()
    monkeypatch.setattr(xarray_module, "CHUNK_BYTES", 3 * 5120)
    with xr.open_dataset(path, engine=StoreBackend, chunks={}) as dataset:
        assert dataset.chunksizes["sample"] == (3, 1)
        assert dataset.chunksizes["time"] == (5,)
        mean = dataset["fields"].mean("sample").compute(scheduler="synchronous")
        np.testing.assert_allclose(mean, mixed_values()["fields"].mean(0), rtol=1e-5, atol=1e-6)


def test_open_dataset_takes_options_and_leaves_variables_out(make_store: MakeStore) -> None:
    path = make_store()
    options: dict[str, Any] = {"engine": StoreBackend, "access": "pread"}
    with xr.open_dataset(path, drop_variables="latent", **options) as dataset:
        assert set(dataset.variables) == {*mixed_values(), *mixed_constants()} - {"latent"}
    with xr.open_dataset(path, drop_variables=["nu", "x"], **options) as dataset:
        assert not {"nu", "x"} & set(dataset.variables)


@pytest.mark.parametrize("kind", ["packed partitions", "remote"])
def test_open_dataset_takes_patterns_packed_stores_and_urls(
    kind: str, tmp_path: Path, server: ObjectServer
) -> None:
    with made(kind, tmp_path, server) as store:
        where = store.path if kind not in REMOTE_KINDS else f"s3://b/{store.path.name}"
    with xr.open_dataset(where, engine=StoreBackend, chunks={}) as dataset:
        for name, expected in VALUES.items():
            found = dataset[name].isel(sample=[5, 0]).compute(scheduler="threads")
            assert found.values.tobytes() == expected[[5, 0]].tobytes()


def test_it_is_guessed_for_our_stores_only(make_store: MakeStore, tmp_path: Path) -> None:
    guess = StoreBackend().guess_can_open
    path = make_store()
    cut, foreign, other = (tmp_path / f"{name}.zarr.zip" for name in ("cut", "foreign", "other"))
    cut.write_bytes(path.read_bytes()[:-100])
    other.write_bytes(b"no archive")
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("zarr.json", "{}")
    (tmp_path / "table.zarr.json").write_text('{"rows": 3}')
    assert guess(path)
    assert guess(str(path))
    assert guess(cut)
    assert guess(tmp_path / "nowhere.zarr.zip")
    assert not guess(foreign)
    assert not guess(other)
    assert not guess(tmp_path / "table.zarr.json")
    assert not guess(path.rename(tmp_path / "a.zip"))
    assert not guess("s3://bucket/a.zarr.zip")
    assert not guess(3)


@pytest.mark.multi_process
def test_xarray_finds_the_backend_by_its_entry_point(tmp_path: Path) -> None:
    """As it is installed: the project's entry points beside an interpreter that has it on its path."""
    path = build(tmp_path / "a.zarr.zip", {"u": np.arange(6.0).reshape(2, 3)}, dims={})
    site = install_entry_points(tmp_path / "site", "xarray.backends")
    code = (
        "import sys, xarray as xr\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        f"for options in ({{}}, {{'engine': 'ups_store'}}):\n"
        f"    print(xr.open_dataset({str(path)!r}, **options)['u'].sum().item())\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == ["15.0", "15.0"], done.stderr


def test_touch_checks_what_xarray_reads(make_store: MakeStore) -> None:
    path = make_store()
    damage(path, "fields", 2)
    with ups_store.open(path, verify="touch") as store:
        fields = store.to_xarray()["fields"]
        np.testing.assert_array_equal(fields[1].values, mixed_values()["fields"][1])
        with pytest.raises(ups_store.CorruptChunkError):
            fields[2].values  # noqa: B018


def test_an_unfinished_store_is_refused(tmp_path: Path) -> None:
    arrays = {"u": ups_store.ArraySpec((2, 3), "float32")}
    with ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={}) as writer:
        writer.commit(0, {"u": [1, 2, 3]})
        with (
            ups_store.open(tmp_path / "a.zarr.zip", partial=True) as store,
            pytest.raises(NotCommittedError),
        ):
            store.to_xarray()
