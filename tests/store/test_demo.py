"""What the demo tells, without running its steps: `make demo` does that."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from small_stores import MakeStore

from scripts import demo


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 40 columns."""
    out = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=out, width=40))
    return out


def test_commands_to_type_next_are_whole_lines(narrow: io.StringIO) -> None:
    out = Path("a folder[1]") / "with a name that is longer than the terminal"
    demo._show_next(out, out / "cache" / "burgers1d_train.zarr.zip", "burgers1d")
    lines = narrow.getvalue().splitlines()
    assert lines[0].endswith(str(out / "preview.png"))
    assert lines[1].endswith(f"ups_store info '{out}/cache/burgers1d_train.zarr.zip'")
    assert len(lines) == 5


@pytest.mark.parametrize("is_small", [True, False])
def test_speed_of_small_batches_is_called_noisy(
    is_small: bool,
    narrow: io.StringIO,
    make_store: MakeStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "SMALL_NBYTES", 64 * 4000 + is_small)
    monkeypatch.setattr(demo, "NUM_ROUNDS", 2)
    monkeypatch.setattr(demo, "_hdf5_rate", lambda *args: 1e9)
    path = make_store({"fields": np.ones((3, 1000), np.float32)}, dims={})
    demo._show_speed(path, tmp_path)
    text = " ".join(narrow.getvalue().split())
    assert "store.gather" in text
    assert ("these numbers are noisy" in text) == is_small
