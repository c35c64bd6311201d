"""An operator of one's own, in a file outside the package: the guide's, and a hard one."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_runs import configure, made_once, own_copy, prepare_fields
from rank_processes import rank_variables, start, wait
from run_nodes import training_nodes

import ups
from ups.cli.app import run_verb
from ups.config import load_config
from ups.data.splits import describe_fields
from ups.errors import CheckpointError, ConfigError
from ups.eval.baseline_model import load_baseline
from ups.eval.evaluate import evaluate_run
from ups.pipeline.memory_estimate import estimate_stages
from ups.train.compare import compare_run
from ups.train.run import run_stage
from ups.trained.checkpoint import read_document
from ups_store.console import message_of

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "own-operator.md").read_text()
# It has a buffer, no blocks, and a parameter that the first steps of a training don't use.
HARD = """
import torch
from torch import nn

import ups


class Hard(nn.Module):
    class Config(ups.Section):
        width: int = ups.key(8, "channels", tune=(4, 8))
        late: int = ups.key(3, "steps without the late parameter; 0 for all")

    def __init__(self, config, states):
        super().__init__()
        self.late = config.late
        self.into = nn.Linear(states.dim + len(states.ranges) + 1, config.width)
        self.out = nn.Linear(config.width, states.dim)
        self.gain = nn.Parameter(torch.zeros(states.dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, state_BLD, step):
        if self.training:
            self.calls += 1
        given = torch.cat([step.parameters, step.dt[:, None]], dim=1)
        given = given[:, None].expand(-1, state_BLD.shape[1], -1).to(state_BLD)
        change = self.out(torch.tanh(self.into(torch.cat([state_BLD, given], dim=-1))))
        return change * (1 + self.gain) if self.late and int(self.calls) > self.late else change
"""
SHORT = ("operator.state=fields", "stages.operator.epochs=1", "stages.operator.steps_per_epoch=6")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, prepare_fields)


@pytest.fixture
def run(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, stores and `mylab`, as a user has it."""
    folder = own_copy(prepared, tmp_path, monkeypatch)
    (folder / "mylab").mkdir()
    (code,) = re.findall(r"^```python\n(import torch.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (folder / "mylab" / "model.py").write_text(code)
    (folder / "mylab" / "hard.py").write_text(HARD)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    _forget(monkeypatch)
    return folder


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that hasn't imported it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylab"]:
        monkeypatch.delitem(sys.modules, name)


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    return run_stage("operator", configure(folder, *SHORT, *overrides))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return ups.load(folder / "checkpoints" / "operator.safetensors").state_dict()


def test_the_guides_operator_is_trained_loaded_and_rolled_out(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = train(run, "operator.name=mylab.model:Slices", "operator.config.slices=4")
    assert report["score"] < 2
    path = run / "checkpoints" / "operator.safetensors"
    document = read_document(path, kind="operator")
    config = {"width": 32, "slices": 4, "depth": 2}
    assert document["spec"]["operator"] == {"name": "mylab.model:Slices", "config": config}
    assert document["config"]["operator"]["config"] == config
    before = ups.load(path)
    assert "mylab.model:Slices" in path.with_name("operator.card.md").read_text()
    _forget(monkeypatch)
    with pytest.raises(CheckpointError, match="--allow-code mylab") as caught:
        ups.load(path)
    assert caught.value.kind == "foreign_code"
    assert load_config(document["config"]).operator.config == config  # of a file: nothing is imported
    assert "mylab.model" not in sys.modules
    after = ups.load(path, allow_code="mylab.model")
    fields = torch.randn(2, 32, 1)
    assert torch.equal(
        after.rollout(fields, 2, extrapolate=True), before.rollout(fields, 2, extrapolate=True)
    )


def test_a_training_that_was_stopped_ends_to_the_bit_as_one_that_wasnt(run: Path) -> None:
    """With a buffer, and a parameter that gets its first gradient after the stop."""
    hard = (
        "operator.name=mylab.hard:Hard",
        "training.ema_decay=0.9",
        "stages.operator.scheduler.name=constant",
    )
    train(run, *hard)
    expected = weights(run)
    assert expected["operator.network.calls"] > 3
    assert expected["operator.network.gain"].abs().max() > 0
    for steps in (2, 6):
        train(run, *hard, "checkpoint.dir=again/checkpoints", f"stages.operator.steps={steps}")
    for name, tensor in weights(run / "again").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of the compiler's own imports
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("model:Slices", "training.activation_checkpointing=full"),
        ("hard:Hard", "training.compile=true"),
    ],
)
def test_recomputed_or_compiled_it_is_the_same(
    run: Path, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="eager"))  # traced, no code is made
    few = (f"operator.name=mylab.{name}", "operator.config.width=4", "stages.operator.steps=3")
    train(run, *few)
    expected = weights(run)
    train(run, *few, how, "checkpoint.dir=other/checkpoints")
    for key, tensor in weights(run / "other").items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4, msg=key)


TOGETHER = ("training.batch_size=null", "training.global_batch_size=8", "operator.config.late=0")


def shard(folder: Path) -> None:
    """What each of two ranks does."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)
    train(folder, "operator.name=mylab.hard:Hard", "training.parallel=fsdp2", *TOGETHER)


@pytest.mark.multi_process
def test_two_ranks_shard_it_and_leave_what_one_process_leaves(run: Path) -> None:
    hard = "operator.name=mylab.hard:Hard"
    train(run, hard, *TOGETHER, "checkpoint.dir=alone/checkpoints")
    processes = [start(shard, run, **variables) for variables in rank_variables(2)]
    assert wait(processes, timeout_s=200) == [0, 0]
    for name, tensor in weights(run / "alone").items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_it_stands_in_a_table_beside_fno_at_its_budget_and_an_operator_of_another_name(run: Path) -> None:
    slices = [*SHORT, "operator.name=mylab.model:Slices"]
    train(run, "operator.name=fno", "operator.config.width=8", "checkpoint.dir=fno/checkpoints")
    train(run, *slices)
    report = compare_run(
        None,
        config_path=run / "run.yaml",
        overrides=slices,
        split="val",
        kinds=["fno"],
        by=["flops"],
        amounts={},
        also=[run / "fno" / "checkpoints" / "operator.safetensors"],
    )
    rows = {row.name: row for row in report.tasks[0].rows}
    assert list(rows)[:3] == ["operator", "operator_fields", "fno_flops"]
    assert "mylab.model:Slices with width 32, slices 8, depth 2" in rows["operator"].note


def test_it_is_a_baseline_beside_the_runs_operator_at_its_budget(
    run: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    train(run)
    (command,) = re.findall(r"^ups (compare .*--kind mylab.model:Slices.*)$", GUIDE, re.MULTILINE)
    run_verb([*command.replace("demo", "run.yaml").split(), "--split", "val", *SHORT])
    report = json.loads((run / "reports/compare/report.json").read_text())
    rows = report["tasks"]["burgers1d"]["rows"]
    assert list(rows)[:3] == ["operator", "mylab.model:Slices_flops", "fno_flops"]
    own = rows["mylab.model:Slices_flops"]
    assert own["label"].startswith("mylab.model:Slices (")
    assert "with width 32, slices 4, depth 2; trained for a budget of" in own["note"]
    path = run / "checkpoints/baselines/burgers1d_mylab_model_Slices_flops/own_baseline.safetensors"
    model = load_baseline(path)
    assert model.effort is not None
    step = model.effort.flops / model.effort.steps
    assert model.effort.allowed - step < model.effort.flops <= model.effort.allowed
    options: dict[str, Any] = {"config_path": run / "run.yaml", "overrides": SHORT, "split": "val"}
    again = {row.name: row for row in evaluate_run(None, **options).tasks[0].rows}
    assert again["mylab.model:Slices_flops"].scores.metrics["nrmse"].mean == own["nrmse"]["mean"]
    _forget(monkeypatch)
    with pytest.raises(CheckpointError, match="--allow-code mylab"):
        load_baseline(path)
    evaluate_run(None, **options)
    assert any("is left out" in note and "--allow-code mylab.model" in note for note in notes)
    load_baseline(path, allow_code="mylab.model")


def test_tune_searches_what_its_section_says(run: Path) -> None:
    pytest.importorskip("optuna")
    from ups.train.tune import space_of

    space = space_of("operator", configure(run, *SHORT, "operator.name=mylab.hard:Hard"))
    assert space.sizes["operator.config.width"] == (4, 8)
    space = space_of("own_baseline", configure(run, "baselines.own.name=mylab.hard:Hard"))
    assert space.sizes["baselines.own.config.width"] == (4, 8)
    with pytest.raises(ConfigError, match=r"baselines\.own\.name: expected module:class"):
        space_of("own_baseline", configure(run))


def test_commands_import_it_if_they_are_told_to(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPS_ALLOW_CODE", "")
    train(run, "operator.name=mylab.model:Slices")
    _forget(monkeypatch)
    evaluate = ["evaluate", "--checkpoint", "checkpoints/operator.safetensors", "--split", "val"]
    with pytest.raises(CheckpointError, match="--allow-code mylab"):
        run_verb(evaluate)
    run_verb([*evaluate, "--allow-code", "mylab.model"])
    assert (run / "reports" / "evaluation" / "report.json").exists()
    run_verb(["validate", "config", "--config", "run.yaml", *SHORT, "operator.name=mylab.hard:Hard"])


def test_runs_lineage_and_predictions_take_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPS_ALLOW_CODE", "")
    hard = (*SHORT, "operator.name=mylab.hard:Hard")
    train(run, "operator.name=mylab.hard:Hard")
    keys = {}
    for width in (4, 8):
        nodes = training_nodes(configure(run, *hard, f"operator.config.width={width}"))
        (operator,) = [node for node in nodes if node.stage == "operator"]
        keys[width], (identity,) = operator.key(), operator.outputs().values()
        assert identity is not None
    assert keys[4] != keys[8]  # `ups run` would train it again
    _forget(monkeypatch)
    path = "checkpoints/operator.safetensors"
    assert run_verb(["lineage", path]) is None
    predict = ["predict", "cache/burgers1d_test.zarr.zip", "--checkpoint", path, "--out", "made.zarr.zip"]
    with pytest.raises(CheckpointError, match="--allow-code mylab"):
        run_verb(predict)
    assert "mylab" not in sys.modules  # a file doesn't decide which code runs
    run_verb([*predict, "--allow-code", "mylab.hard"])
    assert run_verb(["lineage", "made.zarr.zip"]) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Wide", r"operator mylab.wrong:Wide: .*expected \(8, 8, 4\) .*, found \(8, 1, 4\)"),
        ("Plain", r"operator mylab.wrong:Plain: __init__ .*: expected \(config, states\)"),
        ("Fails", r"wrong.py:14, in forward: AttributeError: .*'nope'"),
    ],
)
def test_what_is_wrong_with_an_operator_is_said_of_it(run: Path, name: str, says: str) -> None:
    Path("mylab/wrong.py").write_text(
        "from torch import nn\n"
        "class Plain(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "class Wide(nn.Module):\n"  # would be broadcast
        "    def __init__(self, config, states):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(states.dim, states.dim)\n"
        "    def forward(self, state, step):\n"
        "        return self.layer(state[:, :1])\n"
        "class Fails(Wide):\n"
        "\n"
        "    def forward(self, state, step):\n"
        "        return self.nope(state)\n"
    )
    with pytest.raises((ConfigError, AttributeError)) as caught:
        train(run, f"operator.name=mylab.wrong:{name}")
    assert re.search(says, message_of(caught.value))


def test_its_memory_is_counted_without_computing(run: Path) -> None:
    grids = {"burgers1d": describe_fields(configure(run).build, "burgers1d")[0].grid}
    few, more = (
        estimate_stages(
            configure(run, *SHORT, "operator.name=mylab.model:Slices", f"operator.config.depth={depth}"),
            ("operator",),
            grids,
        )["operator"]
        for depth in (1, 2)
    )
    in_block = 2 * 32 + (32 * 8 + 8) + 4 * (32 * 32 + 32) + 2 * 32 + (32 * 64 + 64) + (64 * 32 + 32)
    assert more.states - few.states == 4 * 4 * in_block  # with gradients and AdamW's two moments, float32
    assert more.activations > few.activations > 8 * 32


def test_keys_of_an_operator_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_verb(["configs", "operator", "mylab.model:Slices"])
    assert "    slices: 8  # slices that attend to each other" in capsys.readouterr().out
    Path("mylab/keys.py").write_text(
        "import torch, ups\n"
        "class Net(torch.nn.Module):\n"
        "    class Config(ups.Section):\n"
        "        width: int\n"
        "        depths: tuple[int, ...] = (1, 2)\n"
        "        residual: bool = ups.key(True, 'whether it adds')\n"
    )
    run_verb(["configs", "operator", "mylab.keys:Net"])
    assert capsys.readouterr().out.splitlines()[3:] == [
        "    width:  # needed",
        "    depths: [1, 2]",
        "    residual: true  # whether it adds",
    ]
    run_verb(["configs", "operator"])
    assert "fno_neuraloperator" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="expected one of fno"):
        run_verb(["configs", "operator", "nope"])
    assert capsys.readouterr().out == ""


def test_wrong_names_and_keys_are_refused_by_the_nearest(run: Path) -> None:
    for override, expected in (
        ("operator.name=fnoo", "fno"),
        ("operator.name=mylab.nothing:Net", "mylab.nothing"),
        ("operator.name=mylab.model:Tensor2", "Tensor2"),
        ("operator.name=mylab.model:ups.key", "torch.nn.Module"),
    ):
        with pytest.raises(ConfigError, match=expected):
            configure(run, override)
    with pytest.raises(ConfigError, match="did you mean slices"):
        configure(run, "operator.name=mylab.model:Slices", "operator.config.slicess=3")
    with pytest.raises(ConfigError, match=r"operator\.config"):
        configure(run, "operator.config.slices=3")


def test_identities_of_before_there_were_names_stay(run: Path) -> None:
    values = configure(run).model_dump(mode="json")
    assert not {"name", "config"} & values["operator"].keys()
    assert json.loads(json.dumps(values)) == load_config(values).model_dump(mode="json")
