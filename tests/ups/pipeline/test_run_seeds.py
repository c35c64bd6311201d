"""`ups run --seeds`: what seeds share is done once, a missed gate stops one seed, all become one row."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ups.config.seeds import without_seed
from ups.data.identities import file_identity
from ups.errors import GateMissedError, UpsError
from ups.pipeline import run as run_module
from ups.pipeline.graph import Graph, Group, Node
from ups.pipeline.leaderboard import read_rows, to_csv
from ups.pipeline.nodes import Run, declare_graph
from ups.pipeline.run import Options, joint_graph, open_run, open_seeds, run_seeds

SETTINGS: dict[str, Any] = {"data": {"tasks": "burgers1d", "root": "data"}, "checkpoint": {"dir": "out"}}
NRMSE = {"mean": 0.1, "low": 0.05, "high": 0.2}
_WRITE = """
import sys
from pathlib import Path
path = Path(sys.argv[1])
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(sys.argv[2])
with open("done.txt", "a") as file: file.write(sys.argv[1] + "\\n")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "declare_graph", graph_of)
    monkeypatch.setattr(run_module, "joint_graph", joint)
    Path("run.yaml").write_text(json.dumps(SETTINGS))
    return tmp_path


def opened(*seeds: int, overrides: tuple[str, ...] = ()) -> tuple[Run, Mapping[int, Run]]:
    run = open_run(Path("run.yaml"), overrides)
    return run, open_seeds(run, seeds, config_path=Path("run.yaml"), overrides=overrides)


def execute(*seeds: int, **options: Any) -> dict[str, Any]:
    run, runs = opened(*seeds)
    return run_seeds(run, runs, Options(**options))


def done() -> list[str]:
    return Path("done.txt").read_text().split() if Path("done.txt").exists() else []


def writing(name: str, path: Path, text: str, *after: str, group: Group = "training") -> Node:
    command = [sys.executable, "-c", _WRITE, str(path), text]
    outputs = lambda: {str(path): file_identity(path)}  # noqa: E731
    return Node(name, group, after, lambda: {"text": text}, outputs, command=lambda restart: command)


# As `ups train` does when a generative stage missed its gates: a line in the log, and exit code 10, which
# `torchrun` turns into 1.
_MISS = """
import json, sys, time
verdicts = [{"what": "crps", "says": "crps = 2, expected less than 1", "passed": False}]
line = {"event": "gate_missed", "stage": "corrector", "time": time.time(), "verdicts": verdicts}
failed = {**line, "event": "failed", "error": "a gate"}
with open(sys.argv[1], "a") as file:
    for each in (line, failed): file.write(json.dumps(each) + "\\n")
sys.exit(int(sys.argv[2]))
"""


def missing_a_gate(run: Run, code: str) -> Node:
    command = [sys.executable, "-c", _MISS, str(run.config.checkpoint.dir / "corrector.jsonl"), code]
    name = "corrector"
    return Node(name, "training", ("operator",), dict, command=lambda restart: command, stage=name)


def graph_of(run: Run) -> Graph:
    """Stores that all seeds share, an operator of each, a corrector that misses its gates, and a gate."""
    config = run.config
    misses = Path(f"stage-misses-{config.seed}")
    correctors = [missing_a_gate(run, misses.read_text())] if misses.exists() else []

    def judge() -> dict[str, Any]:
        if Path(f"misses-{config.seed}").exists():
            error = GateMissedError(f"seed {config.seed} is bad")
            error.verdicts = ({"what": "nrmse", "passed": False},)
            raise error
        return {"gates": [{"what": "nrmse", "passed": True}]}

    return Graph(
        [
            writing("stores", Path("stores.txt"), "fields"),
            writing("operator", config.checkpoint.dir / "operator.txt", str(config.seed), "stores"),
            *correctors,
            Node("full-gate", "full-eval", ("operator",), dict, work=judge),
        ]
    )


def joint(run: Run, runs: Mapping[int, Run]) -> Graph:
    text = json.dumps({"tasks": {"burgers1d": {"rows": {"operator": {"nrmse": NRMSE}}}}})
    path = run.report_folder("full-eval") / "report.json"
    return Graph([writing("full-evaluation", path, text, group="full-eval")])


def test_seeds_share_what_they_would_do_alike_and_nothing_runs_twice(notes: list[str]) -> None:
    found = execute(0, 1)
    own = [f"out/seed-{seed}/operator.txt" for seed in (0, 1)]
    assert done() == ["stores.txt", *own, "out/run/full-eval/report.json"]
    assert [Path(path).read_text() for path in own] == ["0", "1"]
    assert found["seeds"] == [0, 1]
    assert found["by_seed"][1]["seeds"] == [1]
    nodes = found["by_seed"][1]["nodes"]
    assert nodes["stores"] == {"is_valid": True, "seconds": 0.0}  # counted to seed 0
    spent = sum(document["seconds"] for document in found["by_seed"].values())
    assert found["seconds"] > spent > 0
    execute(0, 1, 2)
    assert done()[4:] == ["out/seed-2/operator.txt"]
    execute(0)
    assert "seed 0: stores: valid" in notes
    Path("stores.txt").unlink()
    execute(1, 2)
    assert done()[5:] == ["stores.txt"]


def test_leaderboard_has_a_row_of_all_seeds_with_their_interval() -> None:
    execute(0, 2)
    places = read_rows(Path("out"), metric="nrmse")
    (of_all,) = [place for place in places if place.seeds == (0, 2)]
    assert (of_all.mean, of_all.low, of_all.high) == (0.1, 0.05, 0.2)
    assert of_all.gates == "passed"
    assert ",0 2," in to_csv(places)


def test_missed_gate_of_a_seed_leaves_the_others_their_turn_and_ends_the_run() -> None:
    Path("misses-0").touch()
    with pytest.raises(GateMissedError, match="seed 0 is bad"):
        execute(0, 1)
    assert Path("out/seed-1/operator.txt").exists()
    document = json.loads(Path("out/run/metadata.json").read_text())
    gates = document["gates"]
    assert [gates[f"seed {seed}, full-gate"][0]["passed"] for seed in (0, 1)] == [False, True]
    (place,) = read_rows(Path("out"), metric="nrmse")
    assert place.gates == "missed: nrmse"


@pytest.mark.parametrize("code", ["10", "1"])
def test_missed_gate_of_a_stage_leaves_the_other_seeds_their_turn_and_says_what_helps(code: str) -> None:
    Path("stage-misses-0").write_text(code)
    with pytest.raises(GateMissedError, match=r"crps = 2, expected less than 1.*--export-anyway") as caught:
        execute(0, 1)
    assert "continues" not in str(caught.value)
    assert Path("out/seed-1/operator.txt").exists()
    gates = json.loads(Path("out/run/metadata.json").read_text())["gates"]
    assert [gate["passed"] for gate in gates["seed 0, corrector"]] == [False]
    (place,) = read_rows(Path("out"), metric="nrmse")
    assert place.gates == "missed: crps"


def test_dry_run_only_and_from_are_about_each_seed() -> None:
    plan = execute(0, 1, dry_run=True)["plan"]
    assert plan["seed 1"] == {"stores": "run", "operator": "unknown", "full-gate": "unknown"}
    assert plan["all seeds"] == {"full-evaluation": "run"}
    assert not Path("out").exists()
    execute(0, 1, only="operator")
    assert done() == ["out/seed-0/operator.txt", "out/seed-1/operator.txt"]
    with pytest.raises(UpsError, match="--from"):
        execute(0, first="nowhere")


def test_folders_of_records_and_reports_are_the_seeds_own() -> None:
    run, runs = opened(0, 1, overrides=("pipeline.dir=records", "pipeline.report_dir=reports"))
    assert run.folder == Path("records")
    assert [own.folder for own in runs.values()] == [Path("records/seed-0"), Path("records/seed-1")]
    assert runs[1].report_folder("full-eval") == Path("reports/seed-1")
    (small, full) = joint_graph(run, runs)
    assert small.command is not None
    assert full.command is not None
    assert full.command(False)[-2:] == ["--seeds", "0,1"]
    assert full.outputs().keys() == {f"reports/report.{end}" for end in ("json", "csv", "html")}


def test_checks_of_the_data_depend_on_no_seed() -> None:
    Path("data").mkdir()
    _, runs = opened(0, 1)
    documents = [without_seed(own.config.model_dump(mode="json")) for own in runs.values()]
    assert documents[0] == documents[1]
    names = ("validate-config", "validate-data", "dry-run")
    graphs = [declare_graph(own) for own in runs.values()]
    nodes = [[one for one in graph if one.name in names] for graph in graphs]
    texts = [[json.dumps(dict(one.inputs())["config"], default=str) for one in found] for found in nodes]
    assert [one == other for one, other in zip(*texts, strict=True)] == [False, True, True]
