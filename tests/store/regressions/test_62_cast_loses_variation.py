"""Point 62: 101325 +- 20 as bfloat16, or 300 +- 0.02 as float16, was one value, without a word."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from build_helpers import Recorder, build, settings
from inline_readers import in_this_process

read_here = pytest.fixture(autouse=True)(in_this_process)
WAVE = np.sin(np.arange(20 * 3 * 8)).reshape(20, 3, 8)


@pytest.mark.parametrize(
    ("dtype", "lost", "kept"),
    [
        ("bfloat16", 101325 + 20 * WAVE, 300 + 20 * WAVE),
        ("float16", 300 + 0.02 * WAVE, np.full(WAVE.shape, 300.0)),
        ("float32", 1e8 + WAVE, WAVE),
    ],
)
def test_cast_that_loses_what_varies_in_a_channel_is_noted(
    tmp_path: Path, dtype: str, lost: np.ndarray, kept: np.ndarray
) -> None:
    (tmp_path / "source").mkdir()
    with h5py.File(tmp_path / "source" / "cfd1d_train.h5", "w") as file:
        for name, values in (("density", kept), ("pressure", lost), ("Vx", kept)):
            file[name] = values.astype("f8")
        file["x-coordinate"] = np.arange(8.0)
    watcher = Recorder()
    report = build(settings(tmp_path, tasks="cfd1d", split="train", cache_dtype=dtype), watcher)
    (note,) = [note for note in watcher.notes if "loses what varies" in note]
    assert "channel 'pressure' of samples with 480 values" in note
    assert report.stores[0].to_json()["statistics"]["fields"]["num_flat"] == [0, 480]
