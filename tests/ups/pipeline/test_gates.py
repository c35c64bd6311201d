"""Gates: each kind passed and missed, and what is said; promotion to the best; the leaderboard."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run_ups

from ups.config import RunConfig, load_config
from ups.config.after_training import METRICS, GatesConfig
from ups.errors import ConfigError, GateMissedError
from ups.eval.metrics import FIELD_METRICS
from ups.output import json_document
from ups.pipeline.best import best_path, promote, rival_of
from ups.pipeline.config_checks import check_config
from ups.pipeline.gates import judge
from ups.pipeline.run import open_run
from ups.trained.checkpoint import save_checkpoint


def configure(folder: Path = Path("checkpoints")) -> RunConfig:
    return load_config({"data": {"tasks": "burgers1d", "root": "data"}, "checkpoint": {"dir": str(folder)}})


def report(**nrmse_of_best: Any) -> dict[str, Any]:
    """Of two tasks; a best operator where one task's pair with it is given, as (low, high) and verdict."""
    tasks: dict[str, Any] = {}
    for task, mean in (("burgers1d", 0.02), ("advection1d", 0.03)):
        rows: dict[str, Any] = {"operator": {"nrmse": {"mean": mean, "low": 0.01, "high": 0.04}}}
        if nrmse_of_best:
            low, high, verdict = nrmse_of_best.get(task, (-0.01, 0.01, "can't be told"))
            difference = {"mean": (low + high) / 2, "low": low, "high": high}
            pair = {"nrmse": {"difference": difference, "verdict": verdict}}
            rows["best"] = {"nrmse": {"mean": mean + (low + high) / 2}, "paired": pair}
        tasks[task] = {"rows": rows}
    return {"split": "dev", "tasks": tasks}


def judged(gates: dict[str, Any], found: dict[str, Any], config: RunConfig | None = None) -> list[Any]:
    return judge(GatesConfig(**gates), found, config or configure(), what="full-eval")


def test_ceiling_is_about_every_task_or_about_one() -> None:
    passed = judged({"ceilings": {"nrmse": 0.03}}, report())
    assert [(one["what"], one["number"], one["limit"]) for one in passed] == [
        ("nrmse of burgers1d", 0.02, 0.03),
        ("nrmse of advection1d", 0.03, 0.03),
    ]
    assert len(judged({"ceilings": {"burgers1d/nrmse": 0.02}}, report())) == 1
    with pytest.raises(GateMissedError) as caught:
        judged({"ceilings": {"nrmse": 0.025}}, report())
    says = "gate after full-eval: nrmse of advection1d = 0.03, expected at most 0.025; nothing is removed"
    assert str(caught.value) == says
    assert caught.value.exit_code == 10
    assert [one["passed"] for one in caught.value.verdicts] == [True, False]


@pytest.mark.parametrize("name", ["vrmse", "darcy2d/nrmse"])
def test_ceiling_of_what_was_not_measured_is_missed(name: str) -> None:
    with pytest.raises(GateMissedError, match="no number"):
        judged({"ceilings": {name: 1.0}}, report())


def test_diverged_operator_misses_a_ceiling() -> None:
    found = report()
    found["tasks"]["burgers1d"]["rows"]["operator"]["nrmse"]["mean"] = None  # JSON's NaN
    with pytest.raises(GateMissedError, match="nrmse of burgers1d = no number"):
        judged({"ceilings": {"nrmse": 1e9}}, found)


def of_ensembles(**student: float) -> dict[str, Any]:
    found = report()
    ensemble = {"members": 64, **{name: {"mean": mean} for name, mean in student.items()}}
    found["tasks"]["burgers1d"]["rows"]["student"] = {"nrmse": {"mean": 0.1}, "ensemble": ensemble}
    return found


def test_gates_may_name_scores_of_ensembles() -> None:
    gates = {
        "ensemble_ceilings": {"burgers1d/student/crps": 0.2},
        "ensemble_ranges": {"burgers1d/student/spread_skill": (0.8, 1.2)},
    }
    passed = judged(gates, of_ensembles(crps=0.15, spread_skill=1.1))
    assert [(one["gate"], one["number"], tuple(np.atleast_1d(one["limit"]))) for one in passed] == [
        ("ensemble_ceiling", 0.15, (0.2,)),
        ("ensemble_range", 1.1, (0.8, 1.2)),
    ]
    with pytest.raises(GateMissedError, match=r"spread_skill of student on burgers1d = 0.7, expected 0.8 to"):
        judged(gates, of_ensembles(crps=0.15, spread_skill=0.7))
    with pytest.raises(GateMissedError, match="crps of student on advection1d = no number"):
        judged({"ensemble_ceilings": {"student/crps": 0.2}}, of_ensembles(crps=0.1))  # of all tasks


def test_improvement_needs_one_task_better_and_none_worse() -> None:
    gates = {"improvement": "nrmse"}
    assert judged(gates, report())[0]["says"] == "there is no best operator yet, or it is this one"
    better, worse = (0.001, 0.003, "behind"), (-0.003, -0.001, "ahead")
    (passed,) = judged(gates, report(burgers1d=better))
    assert passed["passed"] is True
    unclear = report(burgers1d=(-0.001, 0.002, "can't be told"))
    for found in (unclear, report(burgers1d=better, advection1d=worse)):
        with pytest.raises(GateMissedError, match="expected less than 0, with its interval"):
            judged(gates, found)
    with pytest.raises(GateMissedError) as caught:
        judged(gates, report(burgers1d=worse))
    assert "burgers1d 0.002 (95 % from 0.001 to 0.003)" in str(caught.value)


def test_throughput_is_that_of_the_training_log(tmp_path: Path) -> None:
    common = {"stage": "operator", "global_batch_size": 8}
    records = [
        {**common, "event": "start", "step": 0, "time": 0.0, "config": {}},
        {**common, "event": "step", "step": 10, "time": 5.0, "loss/a": 1.0, "training/samples_per_sec": 20.0},
    ]
    (tmp_path / "operator.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    config = configure(tmp_path)
    (passed,) = judged({"throughput": {"operator": 19.0}}, report(), config)
    assert passed["number"] == pytest.approx(20.0)
    with pytest.raises(GateMissedError, match="second of stage operator = 20, expected at least 21"):
        judged({"throughput": {"operator": 21.0}}, report(), config)
    with pytest.raises(GateMissedError, match="stage autoencoder = no number"):
        judged({"throughput": {"autoencoder": 1.0}}, report(), config)


@pytest.mark.parametrize(
    ("gates", "says"),
    [
        ({"ceilings": {"nrmsee": 1}}, "did you mean nrmse"),
        ({"ceilings": {"correlation_time": 1}}, "no metric of which less is better"),
        ({"improvement": "loss"}, "no metric"),
        ({"throughput": {"operatr": 1}}, "did you mean operator"),
    ],
)
def test_gates_of_nothing_known_are_refused(gates: dict[str, Any], says: str) -> None:
    values = {"data": {"tasks": "burgers1d", "root": "data"}, "pipeline": {"full": {"gates": gates}}}
    with pytest.raises(ConfigError, match=says):
        load_config(values)


@pytest.mark.parametrize(
    ("gates", "overrides", "says"),
    [
        (
            {"ceilings": {"burgers2d/nrmse": 1}},
            [],
            "expected burgers1d, found burgers2d; did you mean burgers1d",
        ),
        ({"ensemble_ceilings": {"student/crps": 1}}, [], "expected evaluation.members, found none"),
        (
            {"ensemble_ranges": {"darcy2d/student/spread_skill": [0.8, 1.2]}},
            ["evaluation.members=4"],
            "expected burgers1d, found darcy2d",
        ),
        ({"ceilings": {"burgers1d/nrmse": 1}}, ["evaluation.horizn=3"], "did you mean evaluation.horizon"),
        (
            {"ensemble_ceilings": {"student/crps": 1}},
            ["evaluation.members=4"],
            "student/crps: expected stage student, or what it left in "
            "checkpoints/student.safetensors, found stages autoencoder, operator; train it, by "
            "stages.student.epochs, or leave the gate out",
        ),
        (
            {"throughput": {"joint": 1}},
            [],
            "throughput.joint: expected stage joint, or what it left in checkpoints/joint.jsonl",
        ),
        ({"throughput": {"fno": 1}}, [], "train it, by `ups train --stage fno` before"),
    ],
)
def test_gates_that_no_report_could_pass_are_refused_before_a_run(
    gates: dict[str, Any], overrides: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"gates": gates, "overrides": overrides}
    values = {"data": {"tasks": "burgers1d", "root": "data"}, "pipeline": {"small": small}}
    Path("run.yaml").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=says):
        open_run(Path("run.yaml"), ())
    found = [check.text for check in check_config(Path("run.yaml")).problems if check.group == "evaluation"]
    assert any(says in text for text in found)


def test_gates_are_judged_by_what_an_earlier_training_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gates = {"ensemble_ceilings": {"student/crps": 1, "prior/crps": 1}, "throughput": {"joint": 1, "fno": 1}}
    full = {"gates": gates, "overrides": ["evaluation.members=4"]}
    values = {"data": {"tasks": "burgers1d", "root": "data"}, "pipeline": {"full": full}}
    values["stages"] = {"autoencoder": {"epochs": 0}, "operator": {"epochs": 0}}
    Path("run.yaml").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="found no stage") as caught:
        open_run(Path("run.yaml"), ())
    assert len(caught.value.problems) == 4
    Path("checkpoints").mkdir()
    for name in ("student", "prior"):
        Path(f"checkpoints/{name}.safetensors").touch()
    for stage in ("joint", "fno"):
        record = {"stage": stage, "event": "start", "step": 0, "time": 0.0, "config": {}}
        Path(f"checkpoints/{stage}.jsonl").write_text(json.dumps(record) + "\n")
    open_run(Path("run.yaml"), ())


def test_gates_know_the_metrics_of_reports() -> None:
    of_less = {metric.name for metric in FIELD_METRICS if metric.better != "more" and metric.over_steps}
    assert {*METRICS} == of_less


# --- the best operator --------------------------------------------------------------------------------------


def save_operator(folder: Path, value: float) -> Path:
    path = folder / "operator.safetensors"
    save_checkpoint(path, {"weight": torch.tensor([value])}, kind="operator", document={"spec": {}})
    return path


def promoted(operator: Path, best: Path, found: dict[str, Any]) -> bool:
    path = operator.parent / "report.json"
    path.write_text(json.dumps(found))
    return bool(promote(operator, best, report=path, folder_of_run=operator.parent)["promoted"])


def test_best_is_replaced_by_what_is_better_and_says_what_it_replaced(tmp_path: Path) -> None:
    first, second = (save_operator(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 2.0)))
    best = tmp_path / "best"
    assert rival_of(best, "any") is None
    assert promoted(first, best, report())
    one = json_document(best / "provenance.json")
    assert rival_of(best, one["operator"]) is None
    assert not promoted(second, best, report(burgers1d=(-0.005, -0.001, "ahead")))
    assert best_path(best).read_bytes() == first.read_bytes()
    assert promoted(second, best, report(burgers1d=(0.001, 0.005, "behind")))
    two = json_document(best / "provenance.json")
    assert best_path(best).read_bytes() == second.read_bytes()
    assert (two["replaced"], two["from"]) == (one["operator"], str(second))
    assert two["nrmse"] == {"burgers1d": 0.02, "advection1d": 0.03}
    # The evaluation beside the first one stays valid for the second, and not for others.
    assert rival_of(best, two["operator"]) == one["operator"]
    assert rival_of(best, "another's") == two["operator"]


def test_promotion_that_was_killed_between_its_renames_goes_on(tmp_path: Path) -> None:
    first, second = (save_operator(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 2.0)))
    best = tmp_path / "best"
    promoted(first, best, report())
    one = json_document(best / "provenance.json")["operator"]
    best_path(best).write_bytes(second.read_bytes())  # the first rename; the provenance is the old one's
    found = report(burgers1d=(0.001, 0.005, "behind"))
    assert promoted(second, best, found)
    assert json_document(best / "provenance.json")["replaced"] == one


# --- leaderboard --------------------------------------------------------------------------------------------


def write_metadata(folder: Path, mean: float | None, **values: Any) -> None:
    nrmse = {"mean": mean, "low": None if mean is None else mean / 2, "high": mean}
    document = {
        "kind": "ups_run",
        "written_at": "2026-01-01T00:00:00+00:00",
        "seed": 3,
        "code": {"commit": "abc"},
        "seconds": 7200.0,
        "cost": None,
        "results": {"full-eval": {"split": "dev", "tasks": {"burgers1d": {"nrmse": nrmse}}}},
        "gates": {"small-gate": [{"what": "nrmse of burgers1d", "passed": mean is not None}]},
        "promotion": {"promoted": False},
        **values,
    }
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps(document))


def test_leaderboard_lists_runs_best_first_with_interval_and_cost(tmp_path: Path) -> None:
    write_metadata(tmp_path / "runs" / "diverged" / "run", None)
    write_metadata(tmp_path / "runs" / "bad" / "run", 0.2, cost=0.5)
    write_metadata(tmp_path / "runs" / "good" / "run", 0.1)
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "metadata.json").write_text("{}")  # somebody else's
    (tmp_path / "runs" / "cut").mkdir()
    (tmp_path / "runs" / "cut" / "metadata.json").write_text('{"kind"')
    table = tmp_path / "table.csv"
    done = run_ups("leaderboard", tmp_path / "runs", "--csv", table, "--price-per-hour", "1.5")
    assert done.exit_code == 0, done.output
    assert "cut/metadata.json is left out" in done.stderr.replace("\n", "")
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [Path(row["run"]).parts[-2] for row in rows] == ["good", "bad", "diverged"]
    assert [row["mean"] for row in rows] == ["0.1", "0.2", ""]
    assert [row["cost"] for row in rows] == ["3.0", "0.5", "3.0"]
    assert rows[0]["low"] == "0.05"
    assert rows[2]["gates"] == "missed: nrmse of burgers1d"
    assert done.stdout.index("good") < done.stdout.index("bad")
    assert "0.05 to 0.1" in done.stdout
    wrong = run_ups("leaderboard", tmp_path / "runs", "--metric", "vrmse")
    assert (wrong.exit_code, "has vrmse: expected nrmse" in wrong.stderr) == (2, True)
