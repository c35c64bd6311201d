"""A metric of one's own: the guide as it stands, and what is refused."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_ups
from small_simulators import configure, make_data, make_simulator
from torch import Tensor

import ups
from ups.config import dump_config, load_config
from ups.data.windows import open_trajectories
from ups.errors import ConfigError, GateMissedError, ShapeError
from ups.eval.evaluate import evaluate
from ups.eval.metrics import MetricContext, own_metrics
from ups.eval.runs import Run
from ups.pipeline.gates import check_judgeable, judge
from ups.train.checks import later_checks, tried
from ups.trained.simulator import save_simulator

GUIDE = Path(__file__).parents[3] / "docs/guides/metrics.md"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and an untrained operator: it repeats what it is given."""
    root = make_data(tmp_path_factory.mktemp("run"))
    config = configure(root, **{"training.device": "cpu"})
    (root / "run.yaml").write_text(dump_config(config))
    path, values = root / "checkpoints" / "operator.safetensors", config.model_dump(mode="json")
    save_simulator(path, make_simulator(config), config=values, report={})
    return root


@pytest.fixture
def mine(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's module in the present folder, and its configuration."""
    blocks = dict(re.findall(r"^```(python|yaml)\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mylab", "mylab.metrics"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("mylab").mkdir()
    Path("mylab/metrics.py").write_text(blocks["python"])
    values = {"include": str(root / "run.yaml"), **yaml.safe_load(blocks["yaml"])}
    Path("mine.yaml").write_text(yaml.safe_dump(values))
    return Path("mine.yaml")


def test_metric_of_the_guide_is_in_every_form_of_the_report_and_in_gates(root: Path, mine: Path) -> None:
    done = run_ups("evaluate", "--config", mine, "--out", "report")
    assert done.exit_code == 0, done.output
    report = json.loads(Path("report/report.json").read_text())
    (batch,) = open_trajectories(configure(root).build, "burgers1d", "dev").batches()
    error = (batch.given.amax(1)[:, None] - batch.truth.amax(2)).abs()  # (B, T, C)
    for row in ("operator", "persistence"):
        assert report["rows"][row]["peak"]["mean"] == pytest.approx(error.mean().item(), rel=1e-4)
        by_step = report["rows"][row]["by_step"]["peak"]["mean"]
        assert by_step == pytest.approx(error.mean((0, 2)).tolist(), rel=1e-4)
    assert report["rows"]["mean"]["paired"]["peak"]["verdict"] == "can't be told"
    with Path("report/report.csv").open() as file:
        assert sum(line["metric"] == "peak" for line in csv.DictReader(file)) == 3 * (1 + 5)
    assert "<th>peak</th>" in Path("report/report.html").read_text()
    config = load_config(mine)
    gates = config.pipeline.full.gates
    check_judgeable("full", config, evaluated=config)
    (verdict,) = judge(gates, report, config, what="full-eval")
    assert (verdict["number"], verdict["passed"]) == (report["rows"]["operator"]["peak"]["mean"], True)
    report["tasks"]["burgers1d"]["rows"]["operator"]["peak"]["mean"] = 0.6
    with pytest.raises(GateMissedError, match=r"peak.* = 0\.6, expected at most 0\.5"):
        judge(gates, report, config, what="full-eval")
    bare = load_config(mine, overrides=["evaluation.metrics=[]"])
    with pytest.raises(ConfigError, match=r"found none; say evaluation\.metrics"):
        check_judgeable("full", bare, evaluated=bare)


def test_checkpoint_brings_no_metrics_along(root: Path, mine: Path) -> None:
    config = load_config(mine, overrides=["training.device=cpu"])
    path = Path("operator.safetensors")
    save_simulator(path, make_simulator(config), config=config.model_dump(mode="json"), report={})
    done = run_ups("evaluate", "--checkpoint", path, "--out", "report")
    assert done.exit_code == 0, done.output
    assert "mylab.metrics" not in sys.modules
    given = "evaluation.metrics=[mylab.metrics:peak]"
    assert run_ups("evaluate", "--checkpoint", path, "--out", "report", given).exit_code == 0
    assert "peak" in json.loads(Path("report/report.json").read_text())["rows"]["operator"]


def test_registered_metric_says_that_more_is_better(root: Path) -> None:
    @ups.register_metric("motion")
    def motion(predicted: Tensor, truth: Tensor, context: MetricContext) -> Tensor:
        assert context.t.shape == truth.shape[1:2]
        return (predicted - context.given[:, None]).abs().flatten(1).mean(1)  # of each trajectory

    motion.better = "more"  # type: ignore[attr-defined]
    over = {"data.split_fractions": "[1.0, 0.0, 0.0]", "evaluation.metrics": "[motion, nrmse]"}
    config = configure(root, **over)
    (task,) = evaluate(config, [Run(make_simulator(config))], split="train").tasks
    operator, _, mean = task.rows
    assert operator.scores.metrics["motion"].mean < 1e-5  # it repeats what it is given
    assert mean.paired["motion"].verdict == "ahead"
    assert "motion" not in operator.scores.by_step


def wrong(predicted: Tensor, truth: Tensor, context: MetricContext) -> Tensor:
    return predicted[0]


@pytest.mark.parametrize(
    ("metrics", "kind"),
    [
        (["peek"], "unknown_metric"),
        (["no_such_module:peak"], "no_code"),
        ([f"{__name__}:nothing"], "no_code"),
        ([f"{__name__}:wrong", f"{__name__}:wrong"], "metric_name"),
    ],
)
def test_metric_that_is_not_there_is_refused_before_a_training(
    tmp_path: Path, metrics: list[str], kind: str
) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.metrics") as caught:
        own_metrics(metrics)
    assert caught.value.kind == kind
    values = {"data": {"tasks": "burgers1d"}, "evaluation": {"metrics": metrics}}
    checks = later_checks(load_config(values), report_folder=tmp_path)
    assert kind in {error.kind for _, check in checks for error in tried(check)}


def test_metric_of_another_shape_is_named(root: Path) -> None:
    options: dict[str, Any] = {"evaluation.metrics": f"[{__name__}:wrong]"}
    config = configure(root, **options)
    with pytest.raises(ShapeError, match=r"metric wrong: expected \(1,\), \(1, 5\) or \(1, 5, 1\)"):
        evaluate(config, [Run(make_simulator(config))])
