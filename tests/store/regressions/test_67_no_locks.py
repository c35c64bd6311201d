"""Issue 32, 67: on a file system without locks the error speaks of locks, and says where to write instead."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store

LOCK_COMMANDS = {fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW, fcntl.F_OFD_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW}
SPECS = {"x": ups_store.ArraySpec((10, 3), "float32")}


def samples() -> Any:
    return ({"x": np.full(3, i, np.float32)} for i in range(10))


WAYS: dict[str, Callable[[Path], object]] = {
    "write": lambda path: ups_store.write(path, samples(), identity={"v": 1}),
    "create": lambda path: ups_store.create(path, SPECS, identity={"v": 1}),
    "save": lambda path: ups_store.save(path, x=np.zeros((10, 3))),
    "cached": lambda path: ups_store.cached(path, {"v": 1}, samples),
}


def without_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = fcntl.fcntl

    def call(fd: int, command: int, *arguments: Any) -> Any:
        if command in LOCK_COMMANDS:
            raise OSError(number, "as the system says it")
        return real(fd, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", call)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("way", WAYS)
def test_writing_without_locks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, number: int
) -> None:
    without_locks(monkeypatch, number)
    with pytest.raises(ups_store.CommitError, match=r"no locks on this file system.*local disk") as caught:
        WAYS[way](tmp_path / "x.zarr.zip")
    assert caught.value.kind == "no_locks"


def test_reading_needs_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ups_store.save(tmp_path / "x.zarr.zip", x=np.arange(10.0))
    without_locks(monkeypatch, errno.ENOSYS)
    with ups_store.open(path) as store:
        assert store["x"].tolist() == [*range(10)]
        assert store.verify().ok
        store.preload()
