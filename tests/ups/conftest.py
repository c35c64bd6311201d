"""Tests of the training stack: one thread, since the test processes share the cores, and a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inline_readers import in_this_process


@pytest.fixture(autouse=True)
def _repeatable_and_alone() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _reads_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sources are read in the test's process, but for modules marked `multi_process`."""
    if request.node.get_closest_marker("multi_process"):
        yield
    else:
        yield from in_this_process()


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, but not rendered, which takes about a second each."""
    from matplotlib.figure import Figure

    def savefig(figure: Figure, out: Any, **options: Any) -> None:
        image = b"\x89PNG\r\n\x1a\n"
        out.write(image) if hasattr(out, "write") else Path(out).write_bytes(image)

    monkeypatch.setattr(Figure, "savefig", savefig)
