"""Stores in a server of objects, for tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from object_server import Asked, Fault, ObjectServer, serving_objects, use_as_s3
from small_stores import build

from ups_store.remote import client

URL = "s3://bucket/a.zarr.zip"
KEY = "bucket/a.zarr.zip"
DIMS = {"u": ("sample", "time", "x"), "small": ("sample", "k")}


@contextmanager
def object_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A server that `s3://` means, tried again without pauses."""
    with serving_objects() as server:
        use_as_s3(server.url, monkeypatch)
        monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.001)
        client._client.cache_clear()
        if "obstore.fsspec" in sys.modules:  # which keeps file systems, those of an earlier server
            sys.modules["obstore.fsspec"].FsspecStore.clear_instance_cache()
        yield server
        client._client.cache_clear()


def some_values(num_samples: int = 40, *, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Slots of 8 KiB with a time axis, and a plain chunk."""
    rng = np.random.default_rng(seed)
    return {
        "u": rng.standard_normal((num_samples, 8, 256)).astype(np.float32),
        "small": rng.standard_normal((num_samples, 3)),
    }


def upload(
    server: ObjectServer, folder: Path, values: Mapping[str, Any], *, key: str = KEY, **options: Any
) -> Path:
    """Build a store of the values, and serve it; returns the local one."""
    path = build(folder / Path(key).name, values, **{"dims": DIMS, **options})
    server.objects[key] = path.read_bytes()
    return path


def use_small_parts(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have what is longer than that be uploaded in parts of so many bytes."""
    monkeypatch.setattr(client, "PUT_BYTES", nbytes)


def fail(
    server: ObjectServer, wanted: Callable[[Asked], bool], fault: Fault, *, num: float = float("inf")
) -> None:
    """Have the next `num` answers to such requests be wrong."""
    left = [num]

    def next_fault(asked: Asked) -> Fault | None:
        if not wanted(asked):
            return None
        left[0] -= 1
        return fault if left[0] >= 0 else None

    server.fault = next_fault


class Counted:
    """Hears how a transfer goes.

    Attributes:
        done: What was done, in order.
        nbytes: How many bytes it got on by.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.nbytes = 0

    def doing(self, what: str) -> None:
        self.done.append(what)

    def progressed(self, num: int = 0) -> None:
        self.nbytes += num
