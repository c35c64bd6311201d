"""Tests of the training stack: one thread, since the test processes share the cores, and a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inline_readers import in_this_process
from noted import noted


@pytest.fixture(autouse=True)
def _repeatable_and_alone() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """Sentences that are said while the test runs, as commands show them."""
    with noted() as lines:
        yield lines


@pytest.fixture(autouse=True)
def _compiled_is_not_eager(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which the compiler gave up, unless it looks at what is said."""
    with noted() as lines:
        yield
    if "notes" not in request.fixturenames:
        assert not [line for line in lines if "going on without" in line]


@pytest.fixture(autouse=True, scope="module")
def _reads_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sources are read in the test's process, but for modules marked `multi_process`."""
    if request.node.get_closest_marker("multi_process"):
        yield
    else:
        yield from in_this_process()


@pytest.fixture(autouse=True)
def _drawn_but_not_rendered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are neither laid out nor rendered, which takes a second each, unless marked `rendered`."""
    if request.node.get_closest_marker("rendered"):
        return
    from matplotlib.figure import Figure

    def savefig(figure: Figure, out: Any, **options: Any) -> None:
        image = b"\x89PNG\r\n\x1a\n"
        out.write(image) if hasattr(out, "write") else Path(out).write_bytes(image)

    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(Figure, "draw_without_rendering", lambda figure: None)
