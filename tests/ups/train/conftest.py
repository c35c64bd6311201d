"""Runs for the tests of stages: `run` is a copy of `prepared`, which a module may make otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from operator_runs import own_copy, shared_run


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of three tasks, a trained autoencoder, stores of latents and fields, which no test changes."""
    return shared_run(tmp_path_factory)


@pytest.fixture
def run(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the working directory."""
    return own_copy(prepared, tmp_path, monkeypatch)
