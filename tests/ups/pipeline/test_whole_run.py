"""`ups run` on real data: killed at every node it ends as if it hadn't been; gates; the best operator."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_runs import SETTINGS
from wandb_runs import STANDIN, Standin

from ups.data.solvers import make_dataset
from ups.trained.checkpoint import hash_tensors

REPO = Path(__file__).resolve().parents[3]
SHORT = {"epochs": 1, "steps_per_epoch": 5}
PROCESSES = (
    *("field-stores", "autoencoder", "latent-stores", "operator", "baselines"),
    *("small-evaluation", "full-evaluation"),
)
EVENTS = Path("checkpoints/run/run.jsonl")

pytestmark = [pytest.mark.slow, pytest.mark.multi_process, pytest.mark.timeout(1800)]


def prepare(folder: Path) -> None:
    make_dataset("burgers1d", folder / "data", num_samples=60, points=32, frames=9, nu=0.1)
    data = {"task": "burgers1d", "root": "data", "split_fractions": [0.2, 0.7, 0.1]}
    settings: dict[str, Any] = {**SETTINGS, "data": data}
    settings["training"] = {**SETTINGS["training"], "field_source": "store"}
    settings["stages"] = {"autoencoder": SHORT, "operator": SHORT}
    settings["evaluation"] = {"baseline_samples": 16}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(REPO), str(STANDIN)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ups", "run", "run.yaml", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(folder: Path, *words: str) -> tuple[int, str]:
    process = start(folder, *words)
    _, said = process.communicate(timeout=1000)
    return process.returncode, said


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / EVENTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_at(folder: Path, name: str, delay_s: float) -> None:
    """Run until a node has begun, and a while longer, and kill the run."""
    process = start(folder)
    while not any((one["event"], one["node"]) == ("begin", name) for one in events(folder)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def results(folder: Path) -> tuple[str, Any]:
    rows = json.loads((folder / "checkpoints/run/full-eval/report.json").read_text())["rows"]
    return (
        hash_tensors(folder / "checkpoints/best/operator.safetensors"),
        {name: row["nrmse"] for name, row in rows.items()},
    )


def test_run_that_is_killed_at_every_node_ends_as_one_that_is_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        prepare(folder)
    assert run(whole)[0] == 0
    moments = random.Random(0)
    for name in PROCESSES:
        kill_at(killed, name, moments.uniform(0, 3))
    code, said = run(killed)
    assert code == 0, said
    assert results(killed) == results(whole)
    before = len(events(killed))
    code, said = run(killed)
    assert (code, len(events(killed))) == (0, before), said  # nothing was done again
    ended = [one["node"] for one in events(killed) if one["event"] == "end" and one["exit_code"] == 0]
    assert len(ended) == len(set(ended))


def test_gates_are_missed_with_exit_code_10_and_the_best_stays(tmp_path: Path) -> None:
    prepare(tmp_path)
    gate = "pipeline.small.gates.ceilings={nrmse: 1e-9}"
    code, said = run(tmp_path, gate)
    assert code == 10, said
    assert "nrmse of burgers1d = " in said
    assert "expected at most 1e-09" in said
    assert (tmp_path / "checkpoints/operator.safetensors").exists()
    assert not (tmp_path / "checkpoints/best").exists()
    before = len(events(tmp_path))
    assert run(tmp_path, gate)[0] == 10
    assert {one["node"] for one in events(tmp_path)[before:]} == {"small-gate"}
    assert run(tmp_path)[0] == 0
    best = results(tmp_path)[0]
    # The same operator, hardly trained, can't be better.
    other = ["checkpoint.dir=other", "latent.checkpoint=checkpoints/autoencoder.safetensors"]
    other += ["pipeline.best_dir=checkpoints/best", "pipeline.dir=checkpoints/run"]
    other += ["stages.operator.optimizer.lr=1e-9", "--skip-small-eval"]
    improvement = "pipeline.full.gates.improvement=nrmse"
    code, said = run(tmp_path, *other, improvement)
    assert code == 10, said
    assert "nrmse minus the best operator's" in said
    rows = json.loads((tmp_path / "checkpoints/run/full-eval/report.json").read_text())["rows"]
    assert list(rows)[:2] == ["operator", "best"]
    assert hash_tensors(tmp_path / "checkpoints/best/operator.safetensors") == best
    code, said = run(tmp_path, *other, "pipeline.full.gates.throughput={operator: 1e9}")
    assert code == 10, said
    assert "samples a second of stage operator" in said


def test_seeds_share_the_stores_and_become_one_row_with_an_interval(tmp_path: Path) -> None:
    prepare(tmp_path)
    code, said = run(tmp_path, "--seeds", "0,1")
    assert code == 0, said
    logs = {seed: tmp_path / f"checkpoints/seed-{seed}/run/run.jsonl" for seed in (0, 1)}
    begun = {}
    for seed, log in logs.items():
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        begun[seed] = [line["node"] for line in lines if line["event"] == "begin"]
    assert [name for name in begun[0] if name not in begun[1]] == ["validate-data", "dry-run", "field-stores"]
    report = json.loads((tmp_path / "checkpoints/run/full-eval/report.json").read_text())
    assert report["rows"]["operator"]["seeds"] == [0, 1]
    before = tmp_path / "checkpoints/run/full-eval/report.json"
    made = before.stat().st_mtime_ns
    assert run(tmp_path, "--seeds", "0,1")[0] == 0
    assert before.stat().st_mtime_ns == made
    command = [sys.executable, "-m", "ups", "leaderboard", "checkpoints", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    places = json.loads(done.stdout)
    assert sorted(place["seeds"] for place in places) == [[0], [0, 1], [1]]
    assert all(place["low"] <= place["mean"] <= place["high"] for place in places)


def test_all_processes_write_one_run_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    wandb = Standin.installed(tmp_path, monkeypatch)
    code, said = run(tmp_path, "logging.wandb.enabled=true", "--skip-full-eval")
    assert code == 0, said
    begun = wandb.calls("init")
    jobs = ["autoencoder", "operator", "burgers1d_fno_samples", "burgers1d_unet_samples"]
    assert [call["job_type"] for call in begun] == [*jobs, "small-eval", "pipeline"]
    assert len({call["id"] for call in begun}) == 1
    steps = [call["step"] for call in wandb.calls("log")]
    assert steps == list(range(1, 1 + len(steps)))
    rows = [row for row in wandb.rows if "operator/startup/first_step_sec" in row]
    (startup,) = rows
    assert startup["startup/cache_reused"] == 0.0
    assert startup["startup/total_startup_time_min"] > startup["startup/cache_precompute_time_min"] > 0
    sent = {call["name"].partition("_")[2].partition("_")[2]: call for call in wandb.calls("log_artifact")}
    assert sent.keys() == {*jobs, "small-eval"}
    roles = [origin["role"] for origin in sent["operator"]["metadata"]["made_from"]]
    assert roles == ["training data of burgers1d", "autoencoder"]
    assert any("small-eval/burgers1d/operator/nrmse" in row for row in wandb.rows)
