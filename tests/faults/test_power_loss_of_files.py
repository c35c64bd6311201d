"""A power loss at every operation of what makes a file or a folder: the target is absent, old, or whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_files import MAKERS, check_everywhere

ALL = [*MAKERS]
DEARER = {"zarr", "pt", "unpack", "split", "repair"}  # beside one of the same path


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in DEARER else ()) for name in ALL]
)
def test_power_loss_leaves_the_target_absent_old_or_whole(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    stride = 1 if request.config.getoption("--run-slow") else 8
    num_operations, num_images = check_everywhere(MAKERS[name], tmp_path, stride=stride)
    print(f"{name}: {num_operations} operations, {num_images} images")
    assert num_operations >= 2 * (1 if MAKERS[name].old is None else 2)
    assert num_images > num_operations
