"""A server of objects for the tests of this folder; some have one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from object_server import ObjectServer
from remote_stores import object_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(monkeypatch) as state:
        yield state
