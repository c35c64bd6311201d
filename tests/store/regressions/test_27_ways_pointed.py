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
def test_append_names_the_store_of_one_file_that_cannot_grow(tmp_path: Path, name: str) -> None:
    store = ups_store.save(tmp_path / "one.zarr.zip", x=np.zeros((4, 3)))
    with pytest.raises(ups_store.SpecError, match=r"can't grow.*concat.*write_parts") as caught:
        ups_store.append(tmp_path / name)
    assert (caught.value.kind, caught.value.path) == ("not_growing", str(store))
    with pytest.raises(StoreNotFoundError):
        ups_store.append(tmp_path / "nothing")


def test_doctor_of_an_unfinished_store_names_its_file(tmp_path: Path) -> None:
    with ups_store.create(tmp_path / "x.zarr.zip", SPECS, identity={"v": 1}) as writer:
        writer.commit(0, {"x": np.zeros(3, np.float32)})
        done = CliRunner().invoke(app, ["doctor", str(tmp_path / "x.zarr.zip")])
        assert "ask about x.zarr.zip.building" in str(done.exception)
        for i in range(1, 4):
            writer.commit(i, {"x": np.zeros(3, np.float32)})
        writer.finish()
