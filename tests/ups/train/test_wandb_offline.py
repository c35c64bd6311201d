"""The real wandb, offline: two processes write one run, over axes of their own, with the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from noted import noted
from wandb_runs import read_offline

from ups.config.run import WandbConfig
from ups.data.origins import Origin
from ups.train.tracking import WandbContext, context_path, is_wandb_there, open_wandb

pytestmark = [
    pytest.mark.multi_process,
    pytest.mark.skipif(not is_wandb_there(), reason="wandb isn't installed"),
]
ORIGIN = Origin("training data of waves", "store", "waves.zarr.zip", "config_hash", "ab12")


def send(folder: Path, stage: str, losses: list[float]) -> None:
    """What a process of a stage sends."""
    settings = WandbConfig(enabled=True, project="waves", group="tests", timeout_s=150)
    with noted() as notes:
        _send(settings, folder, stage, losses)
    assert [note for note in notes if note.startswith("warning")] == []


def _send(settings: WandbConfig, folder: Path, stage: str, losses: list[float]) -> None:
    sink = open_wandb(settings, folder, job=stage, run_config={"seed": 3})
    assert sink is not None
    for step, loss in enumerate(losses, start=1):
        sink.write({"event": "step", "stage": stage, "time": 0.0, "step": step, "loss/error": loss})
    checkpoint = folder / f"{stage}.safetensors"
    checkpoint.write_bytes(stage.encode())
    sink.log_files(stage, kind="model", files=[checkpoint], about={"identity": "ff"}, made_from=[ORIGIN])
    sink.log_table(f"{stage}/errors", columns=["task", "nrmse"], rows=[("waves", 0.25)])
    sink.close(has_failed=False)


def whole(path: Path) -> list[Any]:
    """The records of a run that is over: wandb's service still writes them when `finish` returns."""
    records = read_offline(path)
    while "exit" not in {record.WhichOneof("record_type") for record in records}:
        time.sleep(0.1)
        records = read_offline(path)
    return records


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The records that each of two processes left, by stage."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DATA_DIR", str(folder / "data"))
        patch.setenv("WANDB_CACHE_DIR", str(folder / "cache"))
        patch.delenv("WANDB_CONTEXT_FILE", raising=False)
        found: dict[str, list[Any]] = {}
        for stage in ("autoencoder", "operator"):
            before = {*folder.glob("wandb/offline-run-*/*.wandb")}
            send(folder, stage, [0.5, 0.25])
            (path,) = {*folder.glob("wandb/offline-run-*/*.wandb")} - before
            found[stage] = whole(path)
        context = WandbContext.read(context_path(folder))
    assert context is not None
    assert (context.project, context.group, context.mode) == ("waves", "tests", "offline")
    assert context.step == 6
    found["context"] = [context]
    return found


def rows_of(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def test_processes_write_one_run_whose_rows_go_on(kept: dict[str, list[Any]]) -> None:
    (context,) = kept["context"]
    for stage, first in (("autoencoder", 1), ("operator", 4)):
        (run,) = [record.run for record in kept[stage] if record.WhichOneof("record_type") == "run"]
        assert (run.run_id, run.project, run.run_group, run.job_type) == (
            context.run_id,
            "waves",
            "tests",
            stage,
        )
        rows = rows_of(kept[stage])
        assert (
            [row["run/step"] for row in rows]
            == [row["_step"] for row in rows]
            == [first, first + 1, first + 2]
        )
        losses = [(row[f"{stage}/step"], row[f"{stage}/loss/error"]) for row in rows[:2]]
        assert losses == [(1, 0.5), (2, 0.25)]
        assert rows[2][f"{stage}/errors/_type"] == "table-file"


def test_each_stage_has_an_axis_of_its_own(kept: dict[str, list[Any]]) -> None:
    for stage in ("autoencoder", "operator"):
        metrics = [record.metric for record in kept[stage] if record.WhichOneof("record_type") == "metric"]
        axes = {metric.glob_name: metric.step_metric for metric in metrics if metric.glob_name}
        assert axes[f"{stage}/*"] == f"{stage}/step"
        assert axes["training/*"] == axes["startup/*"] == "run/step"


def test_checkpoint_is_an_artifact_that_names_what_it_was_made_from(kept: dict[str, list[Any]]) -> None:
    (context,) = kept["context"]
    artifacts = [
        record.request.log_artifact.artifact if record.HasField("request") else record.artifact
        for record in kept["operator"]
        if record.WhichOneof("record_type") == "artifact"
    ]
    (model,) = [artifact for artifact in artifacts if artifact.type == "model"]
    assert model.name == f"run_{context.run_id}_operator"
    assert json.loads(model.metadata) == {"identity": "ff", "made_from": [ORIGIN.to_json()]}


HANGING = """
import socket, sys, threading, time
from pathlib import Path
from ups.config.run import WandbConfig
from ups.train.tracking import open_wandb

server, connections = socket.create_server(("127.0.0.1", 0)), []
threading.Thread(target=lambda: [connections.append(server.accept()) for _ in range(99)], daemon=True).start()
import os
os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:%d" % server.getsockname()[1], "WANDB_API_KEY": "a" * 40}
sink = open_wandb(WandbConfig(enabled=True, timeout_s=2), Path("."), job="operator", run_config={})
sink.write({"event": "step", "step": 1, "time": 0.0, "loss/error": 1.0})
began = time.monotonic()
sink.close(has_failed=False)
assert time.monotonic() - began < 20
print("the command goes on")
"""


def test_endpoint_that_hangs_is_left_behind_and_the_process_ends(tmp_path: Path) -> None:
    """It takes connections and never answers."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-c", HANGING]
    found = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=True
    )
    assert found.stdout.endswith("the command goes on\n")
    assert "Weights & Biases" in found.stderr
