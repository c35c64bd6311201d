"""A server that fails in every way: each value is right, or there is a typed error before the deadline."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from object_server import Asked, Fault, ObjectServer
from remote_stores import URL, some_values, upload
from seaweed import BUCKET, serving_s3
from small_stores import assert_same_bits, build, samples_of

import ups_store
from ups_store.errors import CorruptChunkError, RemoteError, StoreReplacedError
from ups_store.remote import client

DEADLINE_S = 4.0


def fault_of(drawn: random.Random) -> Fault | None:
    """1 % each of 503, cut bodies, wrong ranges and flipped bits; now and then slow, or of another tag."""
    faults = {
        0.01: Fault(status=503),
        0.02: Fault(cut=drawn.randrange(4000)),
        0.03: Fault(shift=drawn.randrange(1, 4000)),
        0.04: Fault(flip=True),
        0.0405: Fault(tag='"stale"'),
        0.041: Fault(delay_s=2.0),
    }
    kind = drawn.random()
    return next((fault for below, fault in faults.items() if kind < below), None)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_requests", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_value_is_right_or_an_error_in_time(
    server: ObjectServer, tmp_path: Path, num_requests: int
) -> None:
    values = some_values(400)
    upload(server, tmp_path, values)
    rng, drawn, num_errors = np.random.default_rng(1), random.Random(1), 0
    store = ups_store.open(URL, deadline_s=DEADLINE_S)
    store.gather([0])
    server.fault = lambda asked: fault_of(drawn)
    server.forget()
    while len(server.asked) < num_requests:
        batch = rng.integers(0, 400, 8)
        begun = time.monotonic()
        try:
            assert_same_bits(store.gather(batch), samples_of(values, batch))
        except (RemoteError, StoreReplacedError, CorruptChunkError):
            num_errors += 1
        assert time.monotonic() - begun < 60  # it takes milliseconds, but a test may wait for a processor
    assert num_errors < num_requests // 100


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(flip=True), CorruptChunkError),
        (Fault(tag='"stale"'), StoreReplacedError),
        (Fault(status=503), RemoteError),
        (Fault(cut=10), RemoteError),
        (Fault(status=404), ups_store.StoreNotFoundError),
    ],
    ids=str,
)
def test_what_stays_wrong_is_a_typed_error(
    server: ObjectServer, tmp_path: Path, fault: Fault, error: type[Exception]
) -> None:
    upload(server, tmp_path, some_values())
    with ups_store.open(URL, deadline_s=0.5) as store:

        def always(asked: Asked) -> Fault:
            return fault

        server.fault = always
        with pytest.raises(error) as caught:
            store.gather([1, 30])
        assert caught.value.path == URL


@pytest.mark.slow
@pytest.mark.multi_process
def test_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests to open, values, a replaced object."""
    url, values = f"s3://{BUCKET}/a.zarr.zip", some_values(200)
    with serving_s3(tmp_path) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        client._client.cache_clear()
        put(url, build(tmp_path / "a.zarr.zip", values))
        with ups_store.open(url) as store:
            assert store.remote.num_requests == 2  # type: ignore[attr-defined]
            batch = np.random.default_rng(0).permutation(200)
            assert_same_bits(store.gather(batch), samples_of(values, batch))
            assert store.verify().ok
            put(url, build(tmp_path / "b.zarr.zip", some_values(3)))
            with pytest.raises(StoreReplacedError):
                store.gather([7])
    client._client.cache_clear()


def put(url: str, path: Path) -> None:
    import obstore

    place = client.Url.of(url)
    obstore.put(client.client_of(place), place.key, path.read_bytes())
