"""What the system reports names the file; a store that is published isn't reported as failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store
from ups_store.convert import export_store
from ups_store.packed.pack import pack_store


def failing(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int = errno.EIO) -> None:
    real, calls = getattr(os, name), [0]

    def call(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    monkeypatch.setattr(os, name, call)


def packed(store: Any, target: Path) -> object:
    return pack_store(store, target)


def exported(to: str) -> Callable[[Any, Path], object]:
    return lambda store, target: export_store(store, target, to=to)


@pytest.mark.parametrize("name", ["fsync", "link", "rename", "pwrite"])
@pytest.mark.parametrize("make", [packed, exported("safetensors"), exported("zarr")])
def test_copy_that_fails_names_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any, Path], object], name: str
) -> None:
    target, store = tmp_path / "target", ups_store.open(ups_store.save(tmp_path / "a.zarr.zip", u=np.ones(9)))
    with monkeypatch.context() as patch:
        failing(patch, name, 1)
        failed = ""
        try:
            make(store, target)
        except ups_store.StoreError as error:
            failed = str(error)
    assert str(target) in failed or not failed
    assert target.exists() != bool(failed)  # not all of them need every call
    assert len(os.listdir(tmp_path)) == 1 + (not failed)


def test_write_that_can_not_remove_its_spool_gives_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, calls = tmp_path / "a.zarr.zip", os.unlink, [0]

    def unlink(path: Any, **options: Any) -> None:
        if str(path).endswith(".building"):
            calls[0] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, **options)

    samples = [{"u": np.full((30, 30), i, "f4"), "t": "x" * (i % 3)} for i in range(30)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with ups_store.write(path, samples, identity={}, buffer_bytes=40_000) as store:
            assert store["u"][:, 0, 0].tolist() == list(range(30))
    assert calls[0]
    ups_store.write(path, samples, identity={}).close()
    assert os.listdir(tmp_path) == ["a.zarr.zip"]


@pytest.mark.parametrize("name", ["open", "mmap"])
def test_want_of_descriptors_names_the_store_and_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import mmap

    path = ups_store.save(tmp_path / "a.zarr.zip", u=np.ones(9))

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr({"open": os, "mmap": mmap}[name], name, refuse)
    with pytest.raises(
        ups_store.StoreError, match=r"a\.zarr\.zip: .*too many open files.*ulimit -n"
    ) as caught:
        ups_store.open(path)
    assert caught.value.kind == "open_files"
