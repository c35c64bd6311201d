"""Number 37: a path is looked at once, so what takes a store's place at any moment does no harm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_ups_store

import ups_store
from ups_store.system import files

IDENTITY = {"v": 1}


def make() -> list[dict[str, Any]]:
    return [{"u": np.full((30, 30), i, "f4")} for i in range(8)]


@pytest.fixture
def forms(tmp_path: Path) -> list[Path]:
    """A store, mapped and packed."""
    mapped, packed = tmp_path / "mapped.zarr.zip", tmp_path / "packed.zarr.zip"
    ups_store.write(mapped, make(), identity=IDENTITY).close()
    assert run_ups_store("pack", mapped, packed).exit_code == 0
    return [mapped, packed]


def replacing(path: Path, forms: list[Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Have another form of the store take the place of what is there whenever that has been opened."""
    really, looks = files.open_existing, [0]

    def opened(at: Path, **options: Any) -> int:
        fd = really(at, **options)
        if at == path:
            looks[0] += 1
            shutil.copy(forms[looks[0] % 2], path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
        return fd

    monkeypatch.setattr(files, "open_existing", opened)
    return lambda: looks[0]


def test_store_that_is_packed_anew_meanwhile_is_opened(
    forms: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zarr.zip"
    shutil.copy(forms[1], path)
    replacing(path, forms[::-1], monkeypatch)
    for _ in range(3):
        with ups_store.open(path) as store:
            assert store.gather([3])["u"][0, 0, 0] == 3


def test_cached_makes_no_store_that_is_there_all_the_time(
    forms: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zarr.zip"
    shutil.copy(forms[1], path)
    looks = replacing(path, forms, monkeypatch)

    def fail() -> None:
        raise AssertionError("it is there")

    for _ in range(4):
        ups_store.cached(path, IDENTITY, fail).close()
    assert looks() >= 4


def test_store_that_is_published_between_two_looks_is_opened(
    forms: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, really = tmp_path / "a.zarr.zip", files.exists

    def published(at: Path) -> bool:
        monkeypatch.setattr(files, "exists", really)
        shutil.copy(forms[0], path)
        return really(at)

    monkeypatch.setattr(files, "exists", published)
    with ups_store.open(path, partial=True) as store:
        assert len(store) == 8
