"""What is committed comes from the file that was digested, whatever it becomes meanwhile."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, settings, write_burgers

import ups_store
from ups_store.errors import SourceError
from ups_store.read.recovery import building_path

SAMPLES = 40


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.multi_process)])
def test_no_sample_of_a_file_overwritten_in_place_is_committed(tmp_path: Path, num_workers: int) -> None:
    source = write_burgers(tmp_path / "source" / BURGERS, num_samples=SAMPLES)
    with h5py.File(source) as file:
        before, offset = file["tensor"][...], file["tensor"].id.get_offset()

    def overwrite(watcher: Recorder) -> None:
        if watcher.num_samples == 2:
            with source.open("r+b") as raw:
                raw.seek(offset)
                raw.write(np.full_like(before, 7).tobytes())

    config = settings(tmp_path, split="train", split_fractions=(1, 0, 0))
    reading = config.reading.model_copy(
        update={"num_workers": num_workers, "batch_size": 2, "on_error": "skip", "retries": 0}
    )
    config = config.model_copy(update={"reading": reading})
    with pytest.raises(SourceError):
        build(config, Recorder(on_advance=overwrite))
    with ups_store.open(building_path(config.cache.dir / "burgers1d_train.zarr.zip"), partial=True) as store:
        there = np.flatnonzero(store.committed)
        assert len(there)
        np.testing.assert_array_equal(store.gather(there)["fields"][..., 0], before[there])
