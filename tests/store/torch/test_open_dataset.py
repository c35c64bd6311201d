"""`open_dataset`: preloaded, mapped, encoded on demand; what is chosen, and that the log says why."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import MakeStore, begin, samples_of

from ups_store.errors import NotCommittedError
from ups_store.read import preload
from ups_store.system import memory
from ups_store.torch import StoreDataset, Window, open_dataset

VALUES = {"latent": np.arange(6.0 * 4 * 20 * 8).reshape(6, 4, 20, 8)}


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    path = tmp_path / "burgers1d_train.zarr.zip"
    with begin(path, VALUES) as writer:
        writer.commit_many([0, 1], samples_of(VALUES, [0, 1]))
    return path


@pytest.mark.parametrize(("available", "rung"), [(10**9, "preloaded"), (1000, "mapped")])
def test_complete_store_is_preloaded_if_it_fits_into_memory(
    make_store: MakeStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    available: int,
    rung: str,
) -> None:
    monkeypatch.setattr(preload, "available_bytes", lambda: available)
    monkeypatch.setattr(memory, "resident_nbytes", lambda mapping, nbytes: 0)  # as after a restart
    path = make_store(VALUES)
    with caplog.at_level(logging.INFO, "ups_store.torch"):
        opened = open_dataset(path, window=Window(horizon=2))
    assert opened.rung == rung
    assert isinstance(opened.dataset, StoreDataset)
    assert np.array_equal(opened.dataset[1]["z0"], VALUES["latent"][0, 1])
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ups_store.torch.dataset"]
    assert line == f"{path}: {rung}: {opened.reason}"
    assert f"{available:,}" in opened.reason
    assert f"{path.stat().st_size:,} bytes" in opened.reason


def test_incomplete_store_without_an_encoder_is_refused_with_what_to_run(unfinished: Path) -> None:
    with pytest.raises(NotCommittedError) as caught:
        open_dataset(unfinished)
    assert caught.value.found == "2 committed"
    assert "ups-store build" in str(caught.value)


@pytest.mark.parametrize("is_there", [True, False])
def test_incomplete_store_is_encoded_on_demand(
    tmp_path: Path, unfinished: Path, is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = unfinished if is_there else tmp_path / "other_train.zarr.zip"
    asked: list[Path] = []

    def encode(of: Path) -> Any:
        asked.append(of)
        return [{"z0": 1}]

    with caplog.at_level(logging.INFO, "ups_store.torch"):
        opened = open_dataset(path, encode=encode)
    assert (opened.rung, opened.dataset[0], asked) == ("on-demand", {"z0": 1}, [path])
    assert ("expected a finished store of 6 samples, found 2 committed" in opened.reason) == is_there
    assert opened.reason in caplog.text


def test_snippets_of_the_loader_page_run(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(VALUES)
    (path.parent / "cache").mkdir()
    shutil.copy(path, path.parent / "cache" / "advection1d_train.zarr.zip")
    path.rename(path.parent / "cache" / path.name)
    monkeypatch.chdir(path.parent)
    page = (Path(__file__).parents[3] / "docs" / "guides" / "load.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 6
    left: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet.replace("num_workers=2", "num_workers=0"), "docs/guides/load.md", "exec"), left)
    assert set(left["batch"]) >= {"z0", "z1", "params", "dt", "t", "index", "task"}
    assert left["opened"].rung == "preloaded"
    assert len(left["sampler"]) == 1
    assert len(left["loader"]) == 100
    assert left["loader"].order.counts.tolist() == [4800, 1600]
