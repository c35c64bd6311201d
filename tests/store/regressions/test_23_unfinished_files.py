"""Points 23 and 27: what an unfinished file holds is told rightly, also where its offsets are wrong."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import numpy as np
import pytest

import ups_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path, lengths = tmp_path / "clouds.zarr.zip", [1, 0, 3, 2]
    specs = {"p": ups_store.ArraySpec((4, None), "int8", lengths=lengths)}
    with ups_store.create(path, specs, identity={}) as writer:
        writer.commit_many([0, 1, 2], {"p": [np.ones(rows, "i1") for rows in lengths[:3]]})
    return path


@pytest.mark.parametrize("offsets", [(0, 1, 1, 2**60, 6), (0, 1, -1, 4, 6), (0, 4, 1, 4, 6)])
def test_sample_whose_offsets_are_wrong_isnt_committed(path: Path, offsets: tuple[int, ...]) -> None:
    building = path.with_name(f"{path.name}.building")
    raw = building.read_bytes()
    building.write_bytes(raw.replace(struct.pack("<5q", 0, 1, 1, 4, 6), struct.pack("<5q", *offsets)))
    expected = [0 <= first <= end <= 6 for first, end in itertools.pairwise(offsets[:4])]
    with ups_store.open(path, partial=True) as store:
        assert store.committed.tolist() == [*expected, False]
        for sample in np.flatnonzero(store.committed).tolist():
            store.sample(sample)
        with pytest.raises(ups_store.NotCommittedError):
            store.gather([2, 0, 1])


def test_verify_of_an_unfinished_store_says_that_it_is_one(path: Path) -> None:
    with ups_store.open(path, partial=True) as store:
        with pytest.raises(ups_store.NotCommittedError, match="under construction") as caught:
            store.verify()
        assert caught.value.kind == "building"
    with pytest.raises(ups_store.TruncatedError, match="it is being built") as opened:
        ups_store.open(f"{path}.building")
    assert "copy it again" not in str(opened.value)
