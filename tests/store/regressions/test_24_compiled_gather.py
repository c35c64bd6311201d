"""Found by attack: the compiled gather takes no index that isn't aligned, and no run behind the samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ups_store
from ups_store.system import runs


def test_indices_that_are_not_aligned_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    ups_store.save(path, a=np.arange(6))
    indices = np.frombuffer(bytearray(8 * 4 + 1), np.uint8)[1:].view(np.int64)
    indices[:] = [3, 1, 4, 1]
    assert not indices.flags.aligned
    with ups_store.open(path) as store:
        assert store.gather(indices)["a"].tolist() == [3, 1, 4, 1]


@pytest.mark.skipif(runs.compiled is None, reason="not compiled")
@pytest.mark.parametrize(("samples", "within"), [([0], [64 * 20]), ([0], [64])])
def test_run_behind_the_last_sample_is_refused(samples: list[int], within: list[int]) -> None:
    memory, checked, out = np.zeros(64 * 40, np.uint8), np.zeros(1, bool), np.empty(60, np.uint8)
    # 40 samples lie there, and the caller says 1: `checked` has a byte for that.
    args = (memory, 1, 64, 40, 64, np.array(samples), 60, np.array([0]), np.array([20]), out, checked, 60)
    assert runs.compiled.gather(*args) is False  # type: ignore[union-attr]
    args = (memory, 1, 64, 1, 64, np.array(within), 60, np.array([0]), np.array([0]), out, checked, 60)
    assert runs.compiled.gather(*args) is False  # type: ignore[union-attr]
