"""Tests of the training stack: one thread, since the test processes share the cores, and a fixed seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _repeatable_and_alone() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _reads_here(inline_readers: None) -> None:
    pass


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, but not rendered, which takes about a second each."""
    from matplotlib.figure import Figure

    def savefig(figure: Figure, out: Any, **options: Any) -> None:
        image = b"\x89PNG\r\n\x1a\n"
        out.write(image) if hasattr(out, "write") else Path(out).write_bytes(image)

    monkeypatch.setattr(Figure, "savefig", savefig)
