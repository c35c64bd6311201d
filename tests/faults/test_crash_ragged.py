"""A power loss at points of building ragged stores, of writing parts, merging them, and appending.

The disk is that of `test_crash_consistency.py`: after every loss, in every image that may be left, committed
samples and finished parts are there, nothing is half there, and going on gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_ragged import check_building, check_growing, check_merging

from ups_store.system import files

pytestmark = [pytest.mark.no_cover, pytest.mark.timeout(1800)]


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> int:
    """Every point of power loss, and every image of it, with --run-slow; without some of them."""
    return 1 if request.config.getoption("--run-slow") else 11


def test_power_loss_in_a_ragged_build_keeps_every_committed_sample(tmp_path: Path, stride: int) -> None:
    assert check_building(tmp_path / "a.zarr.zip", stride=stride) > 100 // stride


def test_power_loss_while_parts_are_written_and_merged_loses_no_part(
    tmp_path: Path, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec 15.4, 15.5: the store is there whole or not at all; parts that were finished are continued."""
    monkeypatch.setattr(files, "allocate", lambda fd, nbytes: None)
    assert check_merging(tmp_path / "a.zarr.zip", stride=stride) > 100 // stride


def test_power_loss_while_a_set_grows_leaves_the_set_or_the_longer_one(tmp_path: Path, stride: int) -> None:
    """Spec 15.3: the manifest is replaced in one step, and every part that it names is there."""
    assert check_growing(tmp_path / "a.zarr.zip", stride=stride) > 100 // stride
