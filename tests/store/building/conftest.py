"""Tests of builds: sources are read in the test's process, except in tests marked `multi_process`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from inline_readers import in_this_process


@pytest.fixture(autouse=True)
def _reads_here(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("multi_process"):
        yield
    else:
        yield from in_this_process()
