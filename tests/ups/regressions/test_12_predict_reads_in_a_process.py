"""Issue 32, 12: `ups predict FILE.hdf5` reads in a process that can be given up, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from latent_runs import write_burgers

import ups_store.sources.source
from ups.data.predictions import Where, read_given
from ups_store.build import BuildConfig, DataConfig

pytestmark = pytest.mark.multi_process


def test_states_of_an_hdf5_file_are_read_by_a_reader_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_burgers(tmp_path, nu=0.01, num_samples=5)

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("HDF5 was opened in the main process")

    monkeypatch.setattr(ups_store.sources.source, "open_source", refuse)
    config = BuildConfig(data=DataConfig(tasks=("burgers1d",), root=tmp_path))
    where = Where((32,), 0.5, num_after=2, split="all")
    (path,) = tmp_path.glob("*.hdf5")
    given = read_given(path, "burgers1d", where, config=config)
    assert (given.values.shape, given.after.shape) == ((5, 32, 1), (5, 2, 32, 1))
    assert len(np.unique(given.values)) == 160
