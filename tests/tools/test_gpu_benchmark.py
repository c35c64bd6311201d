"""`python -m benchmarks.gpu`: rehearsed on the CPU; what a part has measured outlives its limit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.harness.report import Result
from benchmarks.peers.formats import Hdf5, PtFolder
from benchmarks.train.inputs import demo

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("run", "num"),
    [
        (gpu.run_precompute, 2 * 2),
        pytest.param(gpu.run_training, 2 * 5 * 4, marks=pytest.mark.slow),  # 20 s
    ],
)
def test_part_of_the_gpu_benchmark_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, num: int
) -> None:
    monkeypatch.setattr(gpu, "size", gpu.REHEARSAL)
    monkeypatch.setenv("UPS_BENCH_DIR", str(tmp_path))
    results = list(run())
    assert len(results) == num
    for result in results:
        unmeasured = (result.failure or "").startswith("not measured: no driver")
        assert unmeasured or (result.failure is None and result.value >= 0), result
    page = gpu.markdown(results, gpu.describe(rehearse=True))
    assert sum(line.count("|") >= 7 for line in page.splitlines()) > num / 4


@pytest.mark.slow  # it collects all tests; `markdown` is looked at above
@pytest.mark.multi_process
def test_command_writes_a_dated_file_and_a_page(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.gpu", "--rehearse", "--only", "tests", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=REPO, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("20??-??-??-*-gpu.json")
    test, tests, part = json.loads(path.read_text())["results"]
    assert test["failure"].startswith("skipped: ")
    assert (tests["title"], tests["value"]) == ("tests marked `gpu` that pass; 0 fail, 1 are skipped", 0.0)
    assert part["title"] == "part tests: all of it"
    assert part["value"] > 0
    assert "| part tests: all of it |" in (tmp_path / "gpu.md").read_text()


def test_part_that_overruns_is_killed_and_what_it_measured_counts() -> None:
    row = json.dumps(asdict(Result("gpu.precompute", "a row", {}, 2.0, "s")))
    code = "import os, sys, time; open(os.environ['UPS_GPU_ROWS'], 'w').write(sys.argv[1]); time.sleep(60)"
    found = gpu.part_in_time("precompute", [sys.executable, "-c", code, f'{row}\n{{"half'], limit_s=1.0)
    first, last = found
    assert (first.title, first.value) == ("a row", 2.0)
    assert last.failure == "failed: killed after 1 s"
    (failed,) = gpu.part_in_time("training", [sys.executable, "-c", "raise SystemExit(3)"], limit_s=30.0)
    assert failed.failure == "failed: ended with 3"


def test_limits_of_the_parts_leave_room_in_the_whole() -> None:
    assert sum(seconds for _, seconds in gpu.PARTS.values()) < gpu.TOTAL_S - 20 <= 520


@pytest.mark.multi_process
@pytest.mark.parametrize("kind", [pytest.param(PtFolder, marks=pytest.mark.slow), Hdf5])
def test_other_files_feed_training_with_the_batches_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(gpu, "size", gpu.REHEARSAL)
    ours, theirs = (demo().trainer("training.batch_size=8", "operator.noise=0") for _ in range(2))
    gpu.read_from(theirs, kind, tmp_path)
    for number in range(3):
        first, second = (one._batch(number, is_stopping=None) for one in (ours, theirs))
        assert torch.equal(first.states, second.states)
        assert torch.equal(first.parameters, second.parameters)
        torch.testing.assert_close(first.dt, second.dt)
    assert first.states.isfinite().all()
    for one in (ours, theirs):
        one.stage.loader.close()
