"""Stores at URLs: the same values as on disk, by few requests, each chunk checked."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_server import Asked, Fault, ObjectServer
from ragged_stores import build_ragged, check_same, ragged_values
from remote_stores import DIMS, KEY, URL, some_values, upload
from small_stores import DIMS as MIXED_DIMS
from small_stores import assert_same_bits, mixed_constants, mixed_values, sample_of, samples_of

import ups_store
from ups_store.errors import (
    CorruptChunkError,
    FormatError,
    RemoteError,
    SampleIndexError,
    SpecError,
    StoreClosedError,
    StoreNotFoundError,
    StoreReplacedError,
    TruncatedError,
)
from ups_store.remote.client import RemoteObject
from ups_store.system.paths import partition_path


def test_every_kind_of_array_is_equal_to_the_bit(server: ObjectServer, tmp_path: Path) -> None:
    values, constants = mixed_values(), mixed_constants()
    path = upload(server, tmp_path, values, constants=constants, dims=MIXED_DIMS)
    with ups_store.open(URL) as store, ups_store.open(path) as local:
        assert (store.access, store.network, store.nbytes) == ("remote", "s3", local.nbytes)
        assert (store.fingerprint, store.identity) == (local.fingerprint, local.identity)
        assert_same_bits(store.gather([2, 0, 2, -1]), samples_of(values, [2, 0, 2, 3]))
        assert_same_bits(dict(store.sample(1)), sample_of(values, 1))
        assert_same_bits(store.constants, constants)


def test_opening_takes_two_requests_and_the_bytes_of_directory_and_metadata(
    server: ObjectServer, tmp_path: Path
) -> None:
    upload(server, tmp_path, some_values())
    ups_store.open(URL).close()
    assert len(server.asked) == 2
    end, metadata = server.asked
    assert end.range == (len(server.objects[KEY]) - (64 << 10), len(server.objects[KEY]))
    assert metadata.range[0] == 0
    assert server.num_bytes < 100_000
    (tmp_path / "a.zarr.zip").unlink()
    upload(server, tmp_path, some_values(2))
    server.forget()
    ups_store.open(URL).close()
    assert len(server.asked) == 1, "a small store comes with its end"


def test_sample_takes_a_request_an_array_and_its_bytes(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values()
    upload(server, tmp_path, values)
    with ups_store.open(URL) as store:
        server.forget()
        store.gather([7], ["u"])
        assert [asked.nbytes for asked in server.asked] == [8192 + 4]
        store.sample(37)
        assert len(server.asked) == 3
        store.sample(38)  # the small array is in memory by now
        assert len(server.asked) == 4


def test_array_that_does_not_come_takes_no_memory(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec 11.1: nothing is allocated in proportion to what a server claims to have."""
    upload(server, tmp_path, {"nu": np.zeros((4000, 250))}, dims={})  # 8 MB in one chunk
    with ups_store.open(URL) as store:
        monkeypatch.setattr(RemoteObject, "read", lambda *range_: raising(RemoteError("it doesn't come")))
        tracemalloc.start()
        try:
            with pytest.raises(RemoteError):
                store.gather([0])
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()


def raising(error: Exception) -> Any:
    raise error


def test_batch_takes_a_request_for_what_lies_together(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values(200)
    upload(server, tmp_path, values)
    with ups_store.open(URL) as store:
        server.forget()
        indices = [150, 3, 4, 2, 151, 3]
        assert_same_bits(store.gather(indices, ["u"]), samples_of({"u": values["u"]}, indices))
        stride = 8256
        ranges = sorted(asked.range for asked in server.asked)
        assert [end - first for first, end in ranges] == [2 * stride + 8196, stride + 8196]


def test_large_sample_is_fetched_in_pieces(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ups_store.remote.store._REQUEST_BYTES", 3000)
    values = some_values(5)
    upload(server, tmp_path, values)
    with ups_store.open(URL) as store:
        server.forget()
        assert_same_bits(store.gather([4, 0]), samples_of(values, [4, 0]))
        assert sorted(asked.nbytes for asked in server.asked) == [124, 2196, 2196, 3000, 3000, 3000, 3000]


def test_windows_are_cut_out_of_samples_that_are_kept(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values()
    upload(server, tmp_path, values)
    with ups_store.open(URL) as store:
        server.forget()
        for start in (0, 3):
            found = store.gather([5, 30], ["u"], start=[start, start + 1], length=2, stride=2)["u"]
            expected = [values["u"][5, start : start + 3 : 2], values["u"][30, start + 1 : start + 4 : 2]]
            assert np.array_equal(found, expected)
        assert sum(asked.nbytes > 0 for asked in server.asked) <= 2


def test_ragged_arrays(server: ObjectServer, tmp_path: Path) -> None:
    values = ragged_values()
    server.objects[KEY] = build_ragged(tmp_path / "a.zarr.zip").read_bytes()
    with ups_store.open(URL) as store:
        check_same(store.gather([4, 1, 2, 4]), values, [4, 1, 2, 4])
        assert store.lengths("points").tolist() == [len(value) for value in values["points"]]
        assert store.sample(0)["text"] == values["text"][0]
        padded = store.gather([0, 3], ["points"], ragged="padded")
        assert padded["points.lengths"].tolist() == [3, 1]


def test_partitions_open_as_here(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values(10)
    for number, part in enumerate((slice(0, 5), slice(5, 10))):
        some = {name: value[part] for name, value in values.items()}
        with ups_store.create(
            partition_path(tmp_path / "a.zarr.zip", number, 2),
            {name: ups_store.ArraySpec(v.shape, v.dtype, dims=DIMS[name]) for name, v in some.items()},
            identity={"of": "parts"},
            partition=(number, 2),
        ) as writer:
            writer.commit_many(np.arange(5), some)
            path = writer.finish()
        server.objects[f"bucket/{path.name}"] = path.read_bytes()
    with ups_store.open("s3://bucket/a-*-of-00002.zarr.zip") as store:
        assert_same_bits(store.gather([9, 0, 5]), samples_of(values, [9, 0, 5]))
        assert store.network == "s3"


def test_pattern_that_only_a_listing_could_resolve_is_refused_at_once() -> None:
    with pytest.raises(SpecError, match="in a list") as caught:
        ups_store.open("https://127.0.0.1:1/days-*.zarr.zip")
    assert caught.value.kind == "url"


def test_packed_store_is_refused_with_what_to_do(server: ObjectServer, tmp_path: Path) -> None:
    pytest.importorskip("numcodecs", reason="the extra [pack]")
    from ups_store.packed.pack import pack_store

    path = upload(server, tmp_path, some_values(3))
    with ups_store.open(path) as store:
        server.objects[KEY] = Path(pack_store(store, tmp_path / "p.packed.zarr.zip").path).read_bytes()
    with pytest.raises(FormatError, match="copy it here") as caught:
        ups_store.open(URL)
    assert caught.value.kind == "packed"


def test_bit_that_flips_on_the_way_is_fetched_again(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values()
    upload(server, tmp_path, values)
    with ups_store.open(URL) as store:
        left = [1]

        def fault(asked: Asked) -> Fault | None:
            left[0] -= 1
            return Fault(flip=True) if left[0] >= 0 else None

        server.fault = fault
        assert_same_bits(store.gather([3], ["u"]), samples_of({"u": values["u"]}, [3]))


def test_damaged_sample_is_an_error_that_names_it(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values()
    upload(server, tmp_path, values)
    data = bytearray(server.objects[KEY])
    data[data.index(values["u"][3].tobytes()) + 100] ^= 1
    server.objects[KEY] = bytes(data)
    with ups_store.open(URL) as store:
        with pytest.raises(CorruptChunkError) as caught:
            store.gather([2, 3], ["u"])
        assert (caught.value.array, caught.value.sample, caught.value.path) == ("u", 3, URL)
        report = store.verify()
        assert report.damaged == {"u": [3]}


def test_object_that_is_replaced_is_an_error(server: ObjectServer, tmp_path: Path) -> None:
    upload(server, tmp_path, some_values())
    store = ups_store.open(URL)
    (tmp_path / "a.zarr.zip").unlink()
    upload(server, tmp_path, some_values(seed=1))
    with pytest.raises(StoreReplacedError, match="open it again") as caught:
        store.gather([1])
    assert caught.value.path == URL


def test_pickle_opens_the_same_content_again(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values()
    upload(server, tmp_path, values)
    pickled = pickle.dumps(ups_store.open(URL))
    assert_same_bits(pickle.loads(pickled).gather([1]), samples_of(values, [1]))
    (tmp_path / "a.zarr.zip").unlink()
    upload(server, tmp_path, some_values(seed=1))
    with pytest.raises(StoreReplacedError, match="pickled"):
        pickle.loads(pickled)


@pytest.mark.parametrize("cut", [1, 70_000])
def test_object_that_is_cut_is_no_store(server: ObjectServer, tmp_path: Path, cut: int) -> None:
    upload(server, tmp_path, some_values())
    server.objects[KEY] = server.objects[KEY][:-cut]
    with pytest.raises(TruncatedError):
        ups_store.open(URL)


@pytest.mark.parametrize("data", [b"", bytes(100_000)])
def test_what_is_no_store_is_refused(server: ObjectServer, data: bytes) -> None:
    server.objects[KEY] = data
    with pytest.raises(FormatError):
        ups_store.open(URL, deadline_s=1)


def test_mistakes_are_the_errors_of_every_store(server: ObjectServer, tmp_path: Path) -> None:
    path = upload(server, tmp_path, some_values())
    with pytest.raises(StoreNotFoundError):
        ups_store.open("s3://bucket/none.zarr.zip")
    for options in ({"access": "map"}, {"deadline_s": 0}, {"cache_bytes": "many", "cache_dir": tmp_path}):
        with pytest.raises(SpecError):
            ups_store.open(URL, **options)
    with pytest.raises(SpecError, match="leave out deadline_s"):
        ups_store.open(path, deadline_s=3)
    store = ups_store.open(URL)
    with pytest.raises(SampleIndexError):
        store.gather([40])
    with pytest.raises(SpecError, match="when they are asked for"):
        store["u"]
    with pytest.raises(SpecError, match="preloaded"):
        store.preload("copy")
    assert store.preload("auto").mode == "mapped"
    store.close()
    with pytest.raises(StoreClosedError):
        store.gather([0])


def test_environment_says_the_deadline(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPS_STORE_DEADLINE_S", "0.2")
    server.fault = lambda asked: Fault(status=503)
    with pytest.raises(RemoteError, match=r"within 0\.2 s"):
        ups_store.open(URL)
    monkeypatch.setenv("UPS_STORE_DEADLINE_S", "soon")
    with pytest.raises(SpecError, match="UPS_STORE_DEADLINE_S"):
        ups_store.open(URL)


def test_store_behind_plain_http(server: ObjectServer, tmp_path: Path) -> None:
    values: dict[str, Any] = some_values()
    upload(server, tmp_path, values)
    url = f"{server.url}/{KEY}"
    with ups_store.open(f"{url}?key=secret") as store:
        assert str(store.path) == url
        assert store.path.name == "a.zarr.zip"
        assert_same_bits(store.gather([1]), samples_of(values, [1]))
