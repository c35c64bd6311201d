"""The short form of the demo, from nothing to the report, with the commands that it shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ups
import ups_store

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.multi_process
@pytest.mark.timeout(900)
def test_quick_demo_ends_with_a_report_of_all_rows(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/demo.py", "--quick", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--report", str(tmp_path / "report")],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    rows = ["operator", "fno", "unet", "persistence", "mean", "autoencoder_floor"]
    assert list(found["rows"]) == rows
    for name in rows:
        interval = found["rows"][name]["nrmse"]
        assert interval["low"] <= interval["mean"] <= interval["high"], name
    assert set(found["stages"]) == {"autoencoder", "operator"}
    assert {"data", "field stores", "latent stores", "evaluation"} <= set(found["seconds"])
    assert 0 <= found["data_wait_share"] < 1
    assert found["rows"]["fno"]["label"] == "FNO (2 s)"
    assert str(tmp_path / "report" / "report.html") in done.stdout
    with (
        ups_store.open(tmp_path / "out" / "cache" / "burgers1d_test.zarr.zip") as fields,
        ups_store.open(tmp_path / "out" / "latents" / "burgers1d_test.zarr.zip") as latents,
    ):
        assert "fields" in fields
        assert "latent" in latents
        given = fields["fields"][:, 0].copy()
    simulator = ups.load(tmp_path / "out" / "checkpoints" / "operator.safetensors")
    assert simulator.rollout(given, 3).shape == (4, 3, 256, 1)
