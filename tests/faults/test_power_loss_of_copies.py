"""A power loss at every operation of a download: what bears the name is whole, and a next run ends right."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_copies import check_copying


@pytest.mark.no_cover
def test_power_loss_leaves_whole_copies_or_beginnings_that_are_theirs(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stride = 1 if request.config.getoption("--run-slow") else 8
    num_images = check_copying(tmp_path / "copies", stride=stride)
    print(f"copies: {num_images} images")
    assert num_images > 100
