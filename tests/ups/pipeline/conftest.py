"""Data and configuration of a tiny run: made once a file, a copy for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_runs import make_small_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_small_run(folder)
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a copy of the run, in the current folder."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("run.yaml")
