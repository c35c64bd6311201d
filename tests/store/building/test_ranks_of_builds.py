"""Who builds what: the places of processes on machines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ups_store import ConfigError
from ups_store.build import BuildRank

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def ranks(*values: object) -> BuildRank:
    return BuildRank.from_environment(dict(zip(NAMES, map(str, values), strict=True)))


def test_ranks_without_variables_are_one_process_alone() -> None:
    alone = BuildRank.from_environment({})
    assert alone == BuildRank()
    assert alone.is_builder
    assert alone.path(Path("a.zarr.zip")) == Path("a.zarr.zip")
    assert alone.samples(7) == range(7)


def test_ranks_of_one_machine_share_a_file_and_part_its_samples() -> None:
    places = [ranks(rank, 4, rank, 4) for rank in range(4)]
    missing = np.array([0, 1, 2, 5, 6, 9, 10, 11, 12])
    assert [place.is_builder for place in places] == [True, False, False, False]
    assert {place.path(Path("a.zarr.zip")) for place in places} == {Path("a.zarr.zip")}
    np.testing.assert_array_equal(np.concatenate([place.share(missing, 13) for place in places]), missing)


def test_ranks_of_two_machines_write_two_parts() -> None:
    places = [ranks(rank, 4, rank % 2, 2) for rank in range(4)]
    assert [place.machine for place in places] == [0, 0, 1, 1]
    assert [str(place.path(Path("a.zarr.zip"))) for place in places[1:3]] == [
        "a-00000-of-00002.zarr.zip",
        "a-00001-of-00002.zarr.zip",
    ]
    assert [place.samples(5) for place in places[1:3]] == [range(2), range(2, 5)]


@pytest.mark.parametrize(
    "values",
    [(4, 4, 0, 2), (-1, 4, 0, 2), (1, 4, 0, 2), (0, 3, 0, 2), (0, 4, 0, 0), ("x", 4, 0, 2), ("", 1, 0, 1)],
)
def test_ranks_that_contradict_each_other_are_refused(values: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError):
        ranks(*values)
