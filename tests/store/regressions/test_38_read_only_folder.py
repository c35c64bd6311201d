"""Number 38: a leftover spool in a read-only folder keeps nobody from the finished store."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store
from ups_store.system import files


def make() -> Iterator[dict[str, Any]]:
    for i in range(30):
        yield {"u": np.full((50, 50), i, "f4")}


@pytest.mark.parametrize("call", ["write", "cached"])
def test_reader_gets_the_store_beside_a_leftover_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path, remove = tmp_path / "a.zarr.zip", files.remove

    def killed(at: Path) -> None:
        if at.name == "a.zarr.zip.building" and path.exists():
            raise KeyboardInterrupt
        remove(at)

    with monkeypatch.context() as patched:
        patched.setattr(files, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            ups_store.write(path, make(), identity={"v": 1}, buffer_bytes=60_000)
    left = sorted(each.name for each in tmp_path.rglob("*"))
    assert left == ["a.zarr.zip", "a.zarr.zip.building"]

    really = os.open

    def read_only(at: Any, flags: int, *options: Any, **named: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(at))
        return really(at, flags, *options, **named)

    monkeypatch.setattr(os, "open", read_only)
    if call == "write":
        store = ups_store.write(path, make(), identity={"v": 1})
    else:
        store = ups_store.cached(path, {"v": 1}, make)
    assert len(store) == 30
    assert left == sorted(each.name for each in tmp_path.rglob("*"))
