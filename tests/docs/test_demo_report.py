"""The demo, from nothing to the report, with the commands that it shows: its short form, and all of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from build_helpers import BURGERS, write_burgers
from command_line import run_build, run_ups_store

import ups
import ups_store
from ups.cli import demo
from ups_store.console import PrintableConsole

REPO = Path(__file__).resolve().parents[2]


def run_demo(folder: Path, *flags: str, threads: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ups", "demo", *flags, "--out", str(folder / "out")]
    done = subprocess.run(
        [*command, "--report", str(folder / "report")],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def expect_shown(text: str, folder: Path) -> list[str]:
    """What a newcomer sees: that the store is sound and fast, a picture, and what to do now; returns that."""
    assert "last sample equal to ours: True" in text
    for row in ("memcpy of as many contiguous", "store.gather, reused buffer", "the HDF5 file it came from"):
        line = next(line for line in text.splitlines() if row in line)
        assert re.search(r" \d+\.\d\d +\S +[\d,]+ ", line), line  # GB/s, samples/s
    assert (folder / "out" / "preview.png").read_bytes().startswith(b"\x89PNG")
    return text.partition("\nNext\n")[2].splitlines()


def test_stores_of_the_demo_are_built_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first half, with data of one's own, in this process."""

    def run_here(command: list[str]) -> float:
        run = run_build if command[3] == "build" else run_ups_store
        done = run(*command[4 if run is run_build else 3 :])
        assert done.exit_code == 0, done.output
        return 0.1

    write_burgers(tmp_path / "data" / BURGERS)
    monkeypatch.setattr(demo, "_run", run_here)
    monkeypatch.setattr(demo, "console", PrintableConsole(width=200))
    demo.demo(out=tmp_path / "out", data=tmp_path / "data", task="burgers1d")
    following = expect_shown(capsys.readouterr().out, tmp_path)
    assert [line[:12].strip() for line in following] == ["look at", "inspect", "your data"]


@pytest.mark.slow  # two minutes: what it runs has tests in `tests/ups/pipeline`
@pytest.mark.multi_process
@pytest.mark.timeout(900)
def test_quick_demo_ends_with_a_report_of_all_rows(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--quick", threads=1)
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    rows = ["operator", "fno_flops", "unet_flops", "persistence", "mean", "autoencoder_floor"]
    assert list(found["rows"]) == rows
    for name in rows:
        nrmse = found["rows"][name]["nrmse"]
        assert (nrmse["mean"] > 0, nrmse["low"], nrmse["high"]) == (True, None, None), name  # 2 trajectories
    assert (found["split"], found["test_uses"]) == ("dev", 0)
    assert set(found["stages"]) == {"operator"}  # its autoencoder is a basis, which needs no training
    assert {"data", "field stores", "latent-stores", "evaluation"} <= set(found["seconds"])
    assert 0 <= found["data_wait_share"] < 1
    assert re.fullmatch(r"FNO \(9\.\d+e\+09 FLOP\)", found["rows"]["fno_flops"]["label"])  # whole steps
    following = expect_shown(done.stdout, tmp_path)
    assert following[0].split() == ["look", "at", str(tmp_path / "report" / "report.html")]
    assert [line[:12].strip() for line in following[1:4]] == ["inspect", "compare", "your data"]
    with (
        ups_store.open(tmp_path / "out" / "cache" / "burgers1d_test.zarr.zip") as fields,
        ups_store.open(tmp_path / "out" / "latents" / "burgers1d_test.zarr.zip") as latents,
    ):
        assert "fields" in fields
        assert "latent" in latents
        given = fields["fields"][:, 0].copy()
    simulator = ups.load(tmp_path / "out" / "checkpoints" / "operator.safetensors")
    assert simulator.rollout(given, 3).shape == (4, 3, 256, 1)


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.timeout(3600)
def test_demo_learns_what_docs_say_that_it_does(tmp_path: Path) -> None:
    """At its own settings, which takes minutes; docs/results/accuracy.md has what was measured."""
    run_demo(tmp_path, threads=ups_store.num_cores())
    rows = json.loads((tmp_path / "report" / "report.json").read_text())["rows"]
    error = {name: row["nrmse"]["mean"] for name, row in rows.items()}
    assert error["operator"] <= 0.005
    assert error["operator"] <= 1.1 * error["fno_flops"]
    assert error["operator"] <= error["persistence"] / 5
