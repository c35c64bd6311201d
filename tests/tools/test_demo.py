"""What the demo tells, without running its steps: `make demo` does that."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from small_stores import MakeStore

from ups.cli import demo
from ups.config import load_config


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
    assert lines[1].endswith(f"ups-store info '{out}/cache/burgers1d_train.zarr.zip'")
    assert len(lines) == 3


def test_report_is_what_to_look_at_where_there_is_one(narrow: io.StringIO, tmp_path: Path) -> None:
    demo._show_next(tmp_path, tmp_path / "train.zarr.zip", "burgers1d", report=Path("reports/demo"))
    lines = narrow.getvalue().splitlines()
    assert lines[0].split() == ["look", "at", "reports/demo/report.html"]
    assert len(lines) == 4


def test_configuration_elsewhere_includes_the_demo_s(tmp_path: Path) -> None:
    assert demo._configuration(demo.CONFIGURED_OUT, quick=False) == demo.CONFIG
    plain, quick = load_config(demo.CONFIG), load_config(demo._configuration(tmp_path, quick=True))
    assert quick.checkpoint.dir == tmp_path / "checkpoints"
    assert quick.training.latent_cache_dir == tmp_path / "latents"
    assert quick.operator == plain.operator
    short, whole = quick.stage("operator"), plain.stage("operator")
    assert (short.epochs, short.budget.flops) == (1, 1e10)
    assert short.budget.flops < whole.budget.flops / 10
    assert quick.stage("operator").optimizer == plain.stage("operator").optimizer


def test_own_data_ends_with_the_stores(
    narrow: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(demo, "_run", lambda command: commands.append(command) or 0.0)
    monkeypatch.setattr(demo, "_open_with_zarr", lambda path: None)
    monkeypatch.setattr(demo, "_show_speed", lambda path, root: None)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "darcy2d_train.zarr.zip").touch()
    demo.demo(out=tmp_path, data=tmp_path / "mine", task="darcy2d")
    assert commands[0][2:] == [
        *("ups_store", "build", "--tasks", "darcy2d", "--root", str(tmp_path / "mine")),
        *("--cache-dir", str(tmp_path / "cache"), "--manifest", str(tmp_path / "manifest.json")),
    ]
    assert {command[2] for command in commands} == {"ups_store"}


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
    monkeypatch.setattr(demo, "_hdf5_seconds", lambda *args: (64 * 4000, 0.1))
    path = make_store({"fields": np.ones((3, 1000), np.float32)}, dims={})
    demo._show_speed(path, tmp_path)
    text = " ".join(narrow.getvalue().split())
    assert "store.gather" in text
    assert ("these numbers are noisy" in text) == is_small
