"""Issue 32, 27: messages point to what is the matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ups_store
from ups_store.cli.app import app
from ups_store.errors import StoreNotFoundError

SPECS = {"x": ups_store.ArraySpec((4, 3), "float32")}


@pytest.mark.parametrize("name", ["one.zarr.zip", "one.zarr.json", "one"])
def test_append_says_what_takes_more_stores(tmp_path: Path, name: str) -> None:
    ups_store.save(tmp_path / "one.zarr.zip", x=np.zeros((4, 3)))
    with pytest.raises(ups_store.SpecError, match=r"-\*\.zarr\.zip") as caught:
        ups_store.append(tmp_path / name, [{"x": 1}])
    assert caught.value.kind in ("path", "set")
    with pytest.raises(StoreNotFoundError):
        ups_store.append(tmp_path / "nothing" / "a-*.zarr.zip", [{"x": 1}])


def test_doctor_of_an_unfinished_store_names_its_file(tmp_path: Path) -> None:
    with ups_store.create(tmp_path / "x.zarr.zip", SPECS, identity={"v": 1}) as writer:
        writer.commit(0, {"x": np.zeros(3, np.float32)})
        done = CliRunner().invoke(app, ["doctor", str(tmp_path / "x.zarr.zip")])
        assert "ask about x.zarr.zip.building" in str(done.exception)
        for i in range(1, 4):
            writer.commit(i, {"x": np.zeros(3, np.float32)})
        writer.finish()
