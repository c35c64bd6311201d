"""Weights & Biases gets every checkpoint under a name of its own, and tables that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from wandb_runs import Standin

from ups.config.run import WandbConfig
from ups.train.flow import CorrectorStage
from ups.train.gated_file import GatedFile
from ups.train.student import StudentStage
from ups.train.tracking import WandbSink, open_wandb


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
    return Standin.installed(tmp_path, monkeypatch)


def opened(folder: Path, job: str) -> WandbSink:
    settings = WandbConfig(enabled=True, project="waves")
    sink = open_wandb(settings, folder, job=job, run_config={})
    assert sink is not None
    return sink


@pytest.mark.parametrize(
    ("job", "files", "names"),
    [
        ("joint", ("joint", "operator", "autoencoder"), {"joint", "operator", "autoencoder"}),
        ("prior", ("prior",), {"prior"}),
    ],
)
def test_files_of_a_stage_are_artifacts_of_their_own(
    tmp_path: Path, wandb: Standin, job: str, files: tuple[str, ...], names: set[str]
) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in files]
    for path in paths:
        path.write_bytes(b"weights")
    sink = opened(tmp_path, job)
    sink.write({"event": "end", "step": 1, "exports": {str(path): "operator" for path in paths}})
    sink.close(has_failed=False)
    sent = {call["name"] for call in wandb.calls("log_artifact")}
    assert sent == {f"run_{sink.run_id}_{name}" for name in names}


def test_table_of_gates_with_limits_and_ranges_has_columns_of_one_kind(
    tmp_path: Path, wandb: Standin
) -> None:
    sink = opened(tmp_path, "pipeline")
    rows = [("nrmse", 0.2, 0.5), ("coverage", 0.9, (0.85, 0.95)), ("speed", None, 2)]
    sink.log_table("pipeline/gates", columns=("gate", "number", "limit"), rows=rows)
    sink.close(has_failed=False)
    (row,) = wandb.rows
    assert [cells[2] for cells in row["pipeline/gates"]["data"]] == ["0.5", "0.85 to 0.95", "2"]
    assert [cells[1] for cells in row["pipeline/gates"]["data"]] == [0.2, 0.9, None]


@pytest.mark.parametrize(("kind", "name"), [(CorrectorStage, "corrector"), (StudentStage, "student")])
def test_what_passed_its_gates_is_among_what_is_sent(tmp_path: Path, kind: type, name: str) -> None:
    stage = object.__new__(kind)  # without a trained operator
    stage.file = GatedFile(tmp_path / f"{name}.safetensors", kind=name)
    assert stage.published() == {tmp_path / f"{name}.safetensors": name}
    assert stage.exports() == {}  # a better one of before is set aside by the file itself
