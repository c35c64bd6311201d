"""Fixtures of the store's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_disk import mounted


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of `tiny_disk.DISK_BYTES`."""
    with mounted(tmp_path / "disk") as place:
        yield place
