"""Number 7: a push says "there already" only of the same content, by fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import run_ups_store
from remote_stores import object_server

import ups_store


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "folder":
        (tmp_path / "shared").mkdir()
        yield str(tmp_path / "shared")
        return
    with object_server(monkeypatch):
        yield "s3://bucket/shared"


@pytest.mark.parametrize("num_samples", [20, 21])
def test_other_content_of_the_same_identity_is_an_error(place: str, tmp_path: Path, num_samples: int) -> None:
    path = tmp_path / "a.zarr.zip"

    def store(num: int, value: float) -> None:
        path.unlink(missing_ok=True)
        ups_store.write(path, [{"x": np.full(500, value)} for _ in range(num)], identity={"v": 1}).close()

    store(20, 1.0)
    assert "pushed" in run_ups_store("push", path, place).stdout
    assert "there already" in run_ups_store("push", path, place).stdout
    store(num_samples, 2.0)
    refused = run_ups_store("push", path, place)
    assert refused.exit_code == 7
    assert "another store of the same identity" in refused.stderr
    assert "pushed" in run_ups_store("push", path, place, "--force").stdout
    assert "there already" in run_ups_store("push", path, place).stdout
