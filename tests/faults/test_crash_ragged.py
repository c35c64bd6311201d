"""A power loss at points of building ragged stores, with lengths that are known, and by spools.

The disk is that of `test_crash_consistency.py`: after every loss, in every image that may be left, committed
samples are there, nothing is half there, and going on gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_ragged import Workload, check_building, check_spool, noted, spooled

from ups_store.system import files

pytestmark = [pytest.mark.no_cover, pytest.mark.timeout(1800)]


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> int:
    """Every point of power loss, and every image of it, with --run-slow; without some of them."""
    return 1 if request.config.getoption("--run-slow") else 11


def test_power_loss_in_a_ragged_build_keeps_every_committed_sample(tmp_path: Path, stride: int) -> None:
    assert check_building(tmp_path / "a.zarr.zip", stride=stride) > 100 // stride


@pytest.mark.parametrize(("workload", "room"), [(spooled, 2), (noted, 64)])
def test_power_loss_while_a_spool_is_written_and_copied_loses_no_synced_sample(
    tmp_path: Path, stride: int, monkeypatch: pytest.MonkeyPatch, workload: Workload, room: int
) -> None:
    """Spec 6.13: the store is there whole or not at all; samples that were synced are continued."""
    monkeypatch.setattr(files, "allocate", lambda fd, nbytes: None)
    assert check_spool(tmp_path / "a.zarr.zip", workload=workload, stride=stride, room=room) > 100 // stride
