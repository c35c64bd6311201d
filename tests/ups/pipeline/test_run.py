"""`run_pipeline`: nothing twice, going on after a kill at any node, one run at a time, missed gates."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_pipeline
import torch
from command_line import run_ups
from tiny_pipeline import NAMES, begun, execute, make_graph, result, tiny_run
from wandb_runs import Standin

from ups.errors import CheckpointError, GateMissedError, OutputError, UpsError
from ups.pipeline.best import check_loadable
from ups.pipeline.graph import Graph, Node
from ups.pipeline.records import RunFolder
from ups.trained.checkpoint import save_checkpoint

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text("a")
    return tmp_path


def started(seconds: float) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    paths = os.pathsep.join([str(REPO), str(REPO / "tests" / "support")])
    command = [sys.executable, str(tiny_pipeline.__file__), str(seconds)]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True
    )


def wait_for(name: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while begun()[-1:] != [name]:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_runs_twice_and_what_changed_decides_what_runs() -> None:
    execute(make_graph())
    assert begun() == [*NAMES]
    assert Path("third.txt").read_text() == "afirstsecondthird"
    assert execute(make_graph()) == [f"{name}: valid" for name in NAMES]
    Path("second.txt").unlink()
    execute(make_graph())
    assert begun() == [*NAMES, "second"]  # it left the same, so the third stayed valid
    Path("input.txt").write_text("b")
    execute(make_graph())
    assert begun()[4:] == [*NAMES]
    execute(make_graph(), restart=True, only="second")
    assert begun()[7:] == ["second"]
    seconds = json.loads(Path("run/metadata.json").read_text())["nodes"]
    assert [seconds[name]["is_valid"] for name in NAMES] == [True] * 3


def test_from_takes_what_is_before_as_it_is() -> None:
    Path("first.txt").write_text("x")
    execute(make_graph(), first="second", skipped=["full-eval"])
    assert begun() == ["second"]
    assert Path("second.txt").read_text() == "xsecond"


def test_node_that_fails_ends_the_run_with_its_exit_code_and_the_next_goes_on() -> None:
    Path("fails").write_text("second")
    with pytest.raises(UpsError, match="second ended with exit code 3") as caught:
        execute(make_graph())
    assert (caught.value.exit_code, caught.value.kind) == (3, "node")
    Path("fails").unlink()
    execute(make_graph())
    assert begun() == ["first", "second", "second", "third"]
    ended = [json.loads(line) for line in Path("run/run.jsonl").read_text().splitlines()]
    codes = [(line["node"], line["exit_code"]) for line in ended if line["event"] == "end"]
    assert codes == [("first", 0), ("second", 3), ("second", 0), ("third", 0)]


def test_node_whose_exit_code_says_a_missed_gate_isnt_said_to_be_continued() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(10)"]
    for _ in range(2):  # it isn't valid the second time, either
        with pytest.raises(GateMissedError, match=r"^check missed a gate; number and limit stand above$"):
            execute(Graph([Node("check", "training", (), dict, command=lambda restart: command)]))


def test_export_anyway_is_a_flag_of_the_run(folder: Path) -> None:
    data = {"data": {"tasks": "burgers1d", "root": "data"}, "checkpoint": {"dir": "out"}}
    Path("run.yaml").write_text(json.dumps(data))
    done = run_ups("run", "run.yaml", "--export-anyway", "--only", "small-gate")
    assert done.exit_code == UpsError.exit_code, done.output  # there is no report yet
    assert "export_anyway: true" in Path("out/run/train.yaml").read_text()


def test_configuration_is_a_word_a_flag_or_that_of_a_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.yaml").write_text(json.dumps({"data": {"tasks": "burgers1d", "root": "data"}}))
    listed = run_ups("run", "run.yaml", "seed=1", "--dry-run")
    assert listed.stdout.split()[::2][:2] == ["validate-config", "validate-data"]
    assert run_ups("run", "--config", "run.yaml", "seed=1", "--dry-run").stdout == listed.stdout
    refused = run_ups("run", "seed=1", "--dry-run")
    assert (refused.exit_code, "CONFIG: expected" in refused.output) == (2, True)
    monkeypatch.setenv("TRAIN_CONFIG", "run.yaml")
    assert run_ups("run", "seed=1", "--dry-run").stdout == listed.stdout
    assert run_ups("run", "other.yaml", "--dry-run").exit_code == 2  # the word goes first


def test_dry_run_lists_nodes_and_writes_nothing() -> None:
    check = Node("check", "validation", (), dict, command=lambda restart: ["false"])
    found = result(make_graph(extra=(check,)), dry_run=True)
    plan = {"first": "run", "second": "unknown", "third": "unknown", "check": "run"}
    assert found["plan"] == plan
    assert sorted(path.name for path in Path().iterdir()) == ["input.txt"]


@pytest.mark.multi_process
def test_killed_at_each_node_it_goes_on_and_leaves_no_process_behind() -> None:
    for name in NAMES:
        process = started(60.0)
        wait_for(name, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        notes = execute(make_graph(), only=name)  # waits until the child of the killed run is gone
        assert notes[-1].startswith(f"{name}: done")
        assert Path(f"{name}.txt").exists()
    assert begun() == [name for name in NAMES for _ in range(2)]
    assert Path("third.txt").read_text() == "afirstsecondthird"
    process = started(0.0)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert said.splitlines()[-1] == "[]"  # nothing heavy was imported
    assert len(begun()) == 6


@pytest.mark.multi_process
def test_sigterm_goes_to_the_node_and_the_run_says_that_it_was_stopped() -> None:
    process = started(60.0)
    wait_for("first", process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert "stopped by SIGTERM during first" in said
    assert not Path("first.txt").exists()


def test_second_run_of_a_folder_is_refused_while_the_first_works(notes: list[str]) -> None:
    first, second = RunFolder(Path("run")), RunFolder(Path("run"))
    with (
        first.locked(),
        pytest.raises(UpsError, match=f"process {os.getpid()} of") as caught,
        second.locked(timeout_s=0.1),
    ):
        pass
    assert caught.value.kind == "run_locked"
    assert len(notes) == 1
    with second.locked():
        pass


def test_full_disk_under_a_lock_is_an_error_about_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", write)
    with pytest.raises(OutputError, match="run/lock: can't be written") as caught:
        execute(make_graph())
    assert (caught.value.exit_code, begun()) == (6, [])


def test_missed_gate_is_judged_again_without_running_anything_again() -> None:
    limits = [1.0]

    def judge() -> dict[str, object]:
        if limits[0] < 2:
            error = GateMissedError("2 over 1")
            error.verdicts = ({"what": "it", "passed": False},)
            raise error
        return {"gates": [{"what": "it", "passed": True}]}

    gate = Node("full-gate", "full-eval", ("third",), lambda: {"limit": limits[0]}, work=judge)
    for _ in range(2):
        with pytest.raises(GateMissedError) as caught:
            execute(make_graph(extra=(gate,)))
        assert caught.value.exit_code == 10
        metadata = json.loads(Path("run/metadata.json").read_text())
        assert metadata["gates"]["full-gate"] == [{"what": "it", "passed": False}]
    limits[0] = 2.0
    execute(make_graph(extra=(gate,)))
    assert begun() == [*NAMES]
    assert json.loads(Path("run/metadata.json").read_text())["gates"]["full-gate"][0]["passed"] is True


def test_best_operator_of_code_that_isnt_allowed_is_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UPS_ALLOW_CODE", "")
    Path("checkpoints/best").mkdir(parents=True)
    spec = {"operator": {"name": "mylab.model:Net", "config": {}}}
    path = Path("checkpoints/best/operator.safetensors")
    save_checkpoint(path, {"weight": torch.zeros(1)}, kind="operator", document={"spec": spec})
    evaluation = Node("full-evaluation", "full-eval", ("third",), dict, work=dict)
    with pytest.raises(CheckpointError, match=r"best/operator\.safetensors.*--allow-code mylab"):
        execute(make_graph(extra=(evaluation,)))
    assert begun() == []
    execute(make_graph(extra=(evaluation,)), skipped=["full-eval"])
    assert begun() == [*NAMES[:2]]
    check_loadable(path.parent, "mylab.model:Other")  # a run of the same module imports it itself
    monkeypatch.setenv("UPS_ALLOW_CODE", "mylab.model")
    check_loadable(path.parent, "fno")


# --- what processes know of each other -----------------------------------------------------------------


def telling_node(name: str) -> Node:
    """A node that writes what it was handed over."""
    variables = ("UPS_STARTUP", "WANDB_CONTEXT_FILE")
    program = (
        f"import json, os, sys; json.dump([os.environ[name] for name in {variables}], open(sys.argv[1], 'w'))"
    )
    command = [sys.executable, "-c", program, f"{name}.json"]
    return Node(name, "training", (), dict, command=lambda restart: command)


def told(name: str) -> tuple[dict[str, float], str]:
    startup, context = json.loads(Path(f"{name}.json").read_text())
    return json.loads(startup), context


def test_nodes_learn_of_the_launch_of_what_stores_took_and_of_the_run_at_wandb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_CONTEXT_FILE", raising=False)
    before = time.time()
    nodes = [telling_node(name) for name in ("autoencoder", "latent-stores", "operator")]
    execute(Graph(nodes))
    (first, context), (last, same) = told("autoencoder"), told("operator")
    assert context == same == str(Path("checkpoints/wandb_context.json").absolute())
    assert first.keys() == {"launched_at"}
    assert first["launched_at"] == last["launched_at"] < before
    assert last["startup/cache_precompute_time_min"] > 0
    assert last["startup/cache_reused"] == 0.0
    assert "UPS_STARTUP" not in os.environ
    assert "WANDB_CONTEXT_FILE" not in os.environ


def test_stores_that_are_valid_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    stores, operator = telling_node("latent-stores"), telling_node("operator")
    execute(Graph([stores]))
    execute(Graph([stores, operator]))
    startup, _ = told("operator")
    assert (startup["startup/cache_precompute_time_min"], startup["startup/cache_reused"]) == (0.0, 1.0)


def test_seconds_of_nodes_and_gates_go_to_the_run_at_wandb(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Standin.installed(folder, monkeypatch)
    logging = {"wandb": {"enabled": True, "project": "waves"}}
    monkeypatch.setattr(tiny_pipeline, "tiny_run", lambda: tiny_run(logging=logging))
    execute(make_graph())
    (begun_run,) = wandb.calls("init")
    assert (begun_run["project"], begun_run["job_type"]) == ("waves", "pipeline")
    (row,) = wandb.rows
    assert all(row[f"pipeline/nodes/{name}"] > 0 for name in NAMES)
    execute(make_graph())
    assert len(wandb.calls("init")) == 1  # nothing was done
