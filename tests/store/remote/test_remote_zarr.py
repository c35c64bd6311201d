"""Zarr readers open the same URL through stores of their own: no package of ours is needed there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from object_server import ObjectServer
from remote_stores import KEY, some_values, upload

zarr = pytest.importorskip("zarr", reason="the extra [zarr]")
fsspec = pytest.importorskip("fsspec", reason="fsspec")


def test_zarr_python_over_obstore_and_fsspec(server: ObjectServer, tmp_path: Path) -> None:
    """As in docs/guides/remote.md."""
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
    from obstore.fsspec import FsspecStore

    values = some_values()
    upload(server, tmp_path, values)
    bucket = FsspecStore("s3", client_options={"allow_http": True})
    archive = fsspec.filesystem("zip", fo=bucket.open(KEY, "rb"))
    store = zarr.storage.FsspecStore(
        AsyncFileSystemWrapper(archive, asynchronous=True), read_only=True, path=""
    )
    group = zarr.open_group(store, mode="r")
    assert set(group.array_keys()) == set(values)
    for name, value in values.items():
        assert np.array_equal(group[name][3:7], value[3:7])
