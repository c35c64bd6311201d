"""The commands evaluate, compare, predict and train_baselines: what they write, and how they fail."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Done, run_ups, run_ups_store
from small_simulators import configure, make_autoencoder, make_data, make_simulator

import ups
import ups_store
from ups.cli import predict as predict_verb
from ups.config import dump_config
from ups.config.seeds import parse_seeds
from ups.data.solvers import make_dataset
from ups.errors import ConfigError
from ups.eval import predict as prediction
from ups.eval.equal_budgets import equal_budgets
from ups.eval.evaluate import evaluate_run
from ups.eval.forecasters import OperatorForecaster, Start
from ups.eval.runs import open_others, open_runs, opened
from ups.eval.training_logs import StageLog
from ups.trained.checkpoint import hash_tensors, load_checkpoint, save_checkpoint
from ups.trained.simulator import Simulator, load_simulator, save_simulator
from ups.trained.specs import OPERATOR

torch.set_num_threads(1)

TRAIN_IT = "train it with `ups train`"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a field store, a configuration, and an untrained operator on fields."""
    root = make_data(tmp_path_factory.mktemp("run"))
    config = configure(root, **{"training.device": "cpu"})
    (root / "run.yaml").write_text(dump_config(config))
    values = config.model_dump(mode="json")
    save_simulator(
        root / "checkpoints" / "operator.safetensors", make_simulator(config), config=values, report={}
    )
    both = configure(root, "burgers1d", "darcy2d")
    latent = make_simulator(both, make_autoencoder(both))
    save_simulator(root / "latent.safetensors", latent, config=both.model_dump(mode="json"), report={})
    for task in ("burgers1d", "darcy2d"):
        flags = ["--tasks", task, "--root", str(root), "--cache-dir", str(root / "stores"), "--no-parallel"]
        assert run_ups_store("build", *flags).exit_code == 0
    return root


def run(verb: str, *arguments: Any) -> Done:
    return run_ups(verb, *arguments)


# --- evaluate ------------------------------------------------------------------------------------------


def test_evaluate_writes_a_report_and_shows_its_rows(folder: Path, tmp_path: Path) -> None:
    done = run(
        "evaluate", "--config", folder / "run.yaml", "--out", tmp_path / "report", "--phase", "data=2.5"
    )
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert set(found["rows"]) == {"operator", "persistence", "mean"}
    assert found["seconds"]["data"] == 2.5
    assert found["config"]["data"]["tasks"] == ["burgers1d"]
    assert "persistence" in done.stdout
    assert str(tmp_path / "report" / "report.html") in done.stdout.splitlines()
    assert (tmp_path / "report" / "report.csv").exists()


def test_evaluate_takes_the_checkpoint_s_configuration_and_overrides(folder: Path, tmp_path: Path) -> None:
    checkpoint = folder / "checkpoints" / "operator.safetensors"
    arguments = ("--checkpoint", checkpoint, "--steps", 2, "--json", "--title", "Mine", "--split", "valid")
    done = run("evaluate", *arguments, "--out", tmp_path, "data.split_fractions=[0.5,0.4,0.1]")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert str(tmp_path / "report.html") in done.stderr.splitlines()
    assert found["title"] == "Mine"
    assert "4 trajectories of val" in found["tasks"]["burgers1d"]["protocol"]
    assert len(found["tasks"]["burgers1d"]["t"]) == 2


class Ensembles(OperatorForecaster):
    """The operator with noise: a stand-in for a generative model."""

    def forecast_members(
        self, start: Start, steps: int, *, members: int, seed: int
    ) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for frame in self.forecast(start, steps).unbind(1):
            noise = torch.randn((len(frame), members, *frame.shape[1:]), generator=generator)
            yield frame.unsqueeze(1) + 0.1 * noise


def test_evaluate_scores_ensembles_that_are_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ups.eval.evaluate.OperatorForecaster", Ensembles)
    given = ("--config", folder / "run.yaml", "--out", tmp_path, "--horizon", 1, "--json")
    found = [
        json.loads(run("evaluate", *given, "--members", 3, "--seed", seed).stdout)["rows"] for seed in (2, 3)
    ]
    ensembles = [rows["operator"]["ensemble"] for rows in found]
    assert [(each["members"], each["seed"]) for each in ensembles] == [(3, 2), (3, 3)]
    assert ensembles[0]["crps"] != ensembles[1]["crps"]
    assert found[0]["persistence"]["ensemble"]["crps"] == found[1]["persistence"]["ensemble"]["crps"]
    done = run("evaluate", *given, "--members", 1)
    assert done.exit_code == 2
    assert "'--members'" in done.stderr


# --- the test split ------------------------------------------------------------------------------------


def test_uses_of_the_test_split_are_counted_and_shown(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "checkpoints" / "operator.safetensors"
    copied.parent.mkdir()
    copied.write_bytes((folder / "checkpoints" / "operator.safetensors").read_bytes())
    given = ("--checkpoint", copied, "--out", tmp_path / "report")
    uses = copied.parent / "test_uses.jsonl"
    for flags, split, count in (
        (("evaluation.split=test",), "dev", 0),  # as configurations of earlier versions say
        (("--split", "test"), "test", 1),
        (("--split", "test"), "test", 2),
        (("--split", "val"), "val", 2),
    ):
        done = run("evaluate", *given, *flags)
        assert done.exit_code == 0, done.output
        found = json.loads((tmp_path / "report" / "report.json").read_text())
        assert (found["split"], found["test_uses"]) == (split, count)
        assert ("is taken as dev" in done.stderr) is ("evaluation.split=test" in flags)
    assert "The test split was used 2 times so far." in done.stdout
    assert "The test split was used 2 times so far." in (tmp_path / "report" / "report.html").read_text()
    lines = [json.loads(line) for line in uses.read_text().splitlines()]
    assert all(line["command"].startswith("ups evaluate --checkpoint") for line in lines)
    assert lines[0]["checkpoints"] == {str(copied): hash_tensors(copied)}
    assert lines[0]["config_sha256"] == lines[1]["config_sha256"]


def test_test_split_is_refused_where_it_is_not_counted(folder: Path, tmp_path: Path) -> None:
    done = run("compare", "--config", folder / "run.yaml", "--split", "test", "--out", tmp_path / "report")
    assert done.exit_code == 2
    assert "`ups evaluate --split test` takes it" in done.stderr
    refused = run("evaluate", "--config", folder / "run.yaml", "--split", "test", "--steps", 6)
    assert refused.exit_code == 2
    assert not (folder / "checkpoints" / "test_uses.jsonl").exists()  # nothing was seen


@pytest.mark.parametrize("seeds", ["", "0,0", "1.5", "-1", "a"])
def test_seeds_that_are_none_are_refused(seeds: str) -> None:
    with pytest.raises(ConfigError, match="--seeds: expected different whole numbers"):
        parse_seeds(seeds)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "which operator?: expected --config FILE or --checkpoint FILE"),
        (["--checkpoint", "none.safetensors"], 1, f"no such checkpoint; {TRAIN_IT}"),
        (["--split", "holdout"], 2, "--split: expected dev, val, test or train, found 'holdout'"),
        (["--split", "val", "data.split_fractions=[0.9,0.0,0.1]"], 2, "would be empty"),
        (["--steps", "6"], 2, "expected 1 to 5 steps"),
        (["--steps", "0"], 2, "a rollout of 0 steps doesn't fit"),
        (["--phase", "data"], 2, "--phase: expected name=number, found 'data'"),
        (["data.root=nowhere"], 3, "nowhere"),
        (["data.reduce_space=2"], 2, "another grid"),
    ],
)
def test_evaluate_says_what_is_wrong(
    folder: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    named = {"--checkpoint", "--config"} & set(arguments) or not arguments
    given = [] if named else ["--config", folder / "run.yaml"]
    done = run("evaluate", *given, *arguments, "--out", tmp_path / "report")
    assert (done.exit_code, says in " ".join(done.stderr.split())) == (code, True), done.output
    assert done.stdout == ""
    assert not (tmp_path / "report").exists()


def test_a_missing_operator_says_how_to_get_one_and_which_flag_is_left(folder: Path, tmp_path: Path) -> None:
    config, missing = ("--config", folder / "run.yaml"), tmp_path / "none.safetensors"
    for arguments, hint in (
        (("--checkpoint", missing), TRAIN_IT),
        ((*config, "--checkpoint", missing), TRAIN_IT),
        ((*config, "--also", missing), TRAIN_IT),
        ((*config, f"checkpoint.dir={tmp_path}"), f"{TRAIN_IT}, or say --checkpoint FILE"),
    ):
        done = run("evaluate", *arguments, "--out", tmp_path / "report")
        assert done.exit_code == 1
        assert done.stderr.endswith(f"no such checkpoint; {hint}\n")


def test_evaluate_refuses_no_steps_of_a_steady_task_too(folder: Path, tmp_path: Path) -> None:
    given = ("--checkpoint", folder / "latent.safetensors", "data.tasks=[darcy2d]", "--out", tmp_path)
    refused = run("evaluate", *given, "--steps", 0)
    assert refused.exit_code == 2
    assert "expected 1 step, found" in " ".join(refused.stderr.split())
    done = run("evaluate", *given, "--steps", 3)
    assert done.exit_code == 0, done.output
    assert "darcy2d: latent operator, 1 step of 1 trajectory" in done.stderr


def test_a_folder_that_can_not_be_written_is_told_before_the_work(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out, config = tmp_path / "file" / "report", ("--config", folder / "run.yaml")
    budgets = ("--budget-flops", 1e8, "--budget-seconds", 0.2, "--budget-samples", 32)
    checkpoint = ("--checkpoint", folder / "checkpoints" / "operator.safetensors")
    source = folder / "stores" / "burgers1d_test.zarr.zip"
    tries = [
        run("evaluate", *config, "--out", out),
        run("compare", *config, *budgets, "--out", out),
        run("compare", *config, *budgets, *checkpoint, "--out", tmp_path / "new", f"checkpoint.dir={out}"),
        run("train-baselines", *config, "--budget-samples", 32, f"checkpoint.dir={out}"),
        predict(folder, source, out / "a.zarr.zip"),
        predict(folder, source, tmp_path / "a.zarr.zip", "--figure", out / "a.png"),
    ]
    for done in tries:
        lines = done.stderr.splitlines()
        assert (done.exit_code, done.stdout, len(lines)) == (1, "", 1), done.output
        assert "can't be written (not a directory)" in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_evaluate_of_a_damaged_checkpoint_says_so(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "checkpoints" / "operator.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-10])
    done = run("evaluate", "--checkpoint", tmp_path / "cut.safetensors", "--out", tmp_path)
    assert done.exit_code == 1
    assert "isn't as long as its header says" in done.stderr


def test_evaluate_takes_other_operators_of_the_same_tasks(folder: Path, tmp_path: Path) -> None:
    fields, latent = folder / "checkpoints" / "operator.safetensors", folder / "latent.safetensors"
    given = ("--checkpoint", latent, "--out", tmp_path / "report", "data.tasks=[burgers1d]")
    done = run("evaluate", *given, "--also", fields)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "report" / "report.json").read_text())["rows"]
    assert list(rows)[:2] == ["operator", "operator_fields"]
    assert rows["operator"]["label"] == "latent operator"
    assert rows["operator_fields"]["label"] == "operator on fields"
    refused = run("evaluate", "--checkpoint", latent, "--out", tmp_path / "other", "--also", fields)
    assert refused.exit_code == 2
    assert f"{fields}: the operator wasn't trained for this task: expected burgers1d, found darcy2d" in (
        refused.stderr
    )
    assert not (tmp_path / "other").exists()


def test_training_of_another_operator_is_told_only_where_its_log_is_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = StageLog("operator", 104.0, 4.0, 90.0, 0.0, 1000, 32000)
    monkeypatch.setattr("ups.eval.runs.read_stage_logs", lambda config: [log])
    there, moved = folder / "checkpoints" / "operator.safetensors", tmp_path / "operator.safetensors"
    moved.write_bytes(there.read_bytes())  # another run may have written its log there since
    (run,) = open_runs(there, config_path=None, overrides=())
    others = open_others([there, moved], opened(run)[0], run.operator)
    assert [list(other.logs) for other in others] == [[log], []]


def test_training_of_an_operator_from_elsewhere_is_not_that_of_the_configurations_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = StageLog("operator", 104.0, 4.0, 90.0, 0.0, 1000, 32000)
    monkeypatch.setattr("ups.eval.runs.read_stage_logs", lambda config: [log])
    monkeypatch.setattr(
        "ups.eval.evaluate.evaluate", lambda config, runs, **others: pytest.fail(str(runs[0].logs))
    )
    own, moved = folder / "checkpoints" / "operator.safetensors", tmp_path / "operator.safetensors"
    moved.write_bytes(own.read_bytes())
    for path, says in ((own, "steps=1000"), (moved, r"\[\]")):
        with pytest.raises(pytest.fail.Exception, match=says):
            evaluate_run(path, config_path=folder / "run.yaml", overrides=())


def save_with_training(folder: Path, path: Path, training: dict[str, Any]) -> None:
    """The operator on fields with another section of its configuration."""
    source = folder / "checkpoints" / "operator.safetensors"
    tensors, document = load_checkpoint(source, kind=OPERATOR)
    changed = {**document, "config": {**document["config"], "training": training}}
    save_checkpoint(path, tensors, kind=OPERATOR, document=changed)


def test_other_operator_is_taken_whatever_its_configuration_and_is_named_in_what_is_told(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "old.safetensors"
    for training, says in (
        ({"dt": 0.1}, f"warning: {path}: training.dt has no effect: "),
        (
            {"lrr": 1},
            f"warning: what its training took isn't known: the configuration in {path}: unknown key",
        ),
    ):
        save_with_training(folder, path, training)
        done = run("evaluate", "--config", folder / "run.yaml", "--also", path, "--out", tmp_path / "report")
        assert done.exit_code == 0, done.output
        assert says in done.stderr


def test_configuration_in_a_checkpoint_that_is_none_any_more_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    for training, says in (
        ({"lrr": 1}, f"error: the configuration in {path}: unknown key: found 'training.lrr'"),
        ({"lrr": 1, "lr": -1}, f"  the configuration in {path}: unknown key: found 'training.lrr'"),
    ):
        save_with_training(folder, path, training)
        done = run("evaluate", "--checkpoint", path, "--out", tmp_path / "report")
        assert done.exit_code == 2
        assert says in done.stderr
        assert "config.yaml" not in done.stderr


# --- baselines and equal budgets -----------------------------------------------------------------------


def test_baselines_are_trained_once_and_then_kept(folder: Path, tmp_path: Path) -> None:
    config = ("--config", folder / "run.yaml", f"checkpoint.dir={tmp_path}")
    arguments = (*config, "--budget-samples", 32, "--json")
    first = run("train-baselines", *arguments)
    again = run("train-baselines", *arguments)
    assert first.exit_code == 0, first.output
    trained = json.loads(first.stdout)
    assert trained == json.loads(again.stdout)
    assert {Path(path).relative_to(tmp_path / "baselines").as_posix() for path in trained} == {
        "burgers1d_fno_samples/fno.safetensors",
        "burgers1d_unet_samples/unet.safetensors",
    }
    assert all((effort["limit"], effort["samples"]) == ("samples", 32) for effort in trained.values())
    assert again.stderr.count("is there already") == 2
    assert "has no effect" not in first.stderr  # of what a budget fills in
    other = run("train-baselines", *arguments, "seed=1", "--kind", "fno")
    assert "is there already" not in other.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no training log says what the operator's training took in flops"),
        (["--budget-samples", "0"], "budget of samples: expected a number > 0, found 0"),
        (["--budget-seconds", "1", "--kind", "transformer"], "--kind: expected fno, unet"),
    ],
)
def test_train_baselines_says_what_is_wrong(folder: Path, arguments: list[str], says: str) -> None:
    done = run("train-baselines", "--config", folder / "run.yaml", *arguments)
    assert done.exit_code == 2
    assert says in done.stderr


def test_compare_has_all_baselines_at_all_budgets(folder: Path, tmp_path: Path) -> None:
    budgets = ("--budget-flops", 3e7, "--budget-seconds", 0.05, "--budget-samples", 32)
    own = ("--checkpoint", folder / "checkpoints" / "operator.safetensors", f"checkpoint.dir={tmp_path}")
    given = ("--config", folder / "run.yaml", *own, *budgets)
    done = run("compare", *given, "--out", tmp_path / "report")
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "report" / "report.json").read_text())["rows"]
    baselines = ["fno_flops", "unet_flops", "fno_samples", "unet_samples", "fno", "unet"]
    assert list(rows)[:7] == ["operator", *baselines]
    assert rows["fno"]["label"] == "FNO (0.05 s)"
    assert rows["unet_samples"]["label"] == "U-Net (32 samples)"
    assert rows["fno_flops"]["label"] == "FNO (3e+07 FLOP)"
    done = run("compare", *given, "--by", "flops", "--kind", "fno", "--out", tmp_path / "less")
    rows = json.loads((tmp_path / "less" / "report.json").read_text())["rows"]
    assert list(rows)[:3] == ["operator", "fno_flops", "persistence"]
    assert "--by: expected flops or samples or seconds" in run("compare", *given, "--by", "steps").stderr


@pytest.mark.parametrize(
    "given",
    [
        {"training": {"losses": {"theirs.code:f": 1.0}}},
        {"operator": {"name": "theirs.code:f", "config": {}}},
        {"baselines": {"own": {"name": "theirs.code:f", "config": {}}}},
    ],
    ids=["loss", "operator", "baseline"],
)
def test_compare_trains_with_no_code_that_a_checkpoint_names(
    folder: Path, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPS_ALLOW_CODE", "")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "code.py").touch()
    monkeypatch.chdir(tmp_path)
    tensors, document = load_checkpoint(folder / "checkpoints" / "operator.safetensors", kind=OPERATOR)
    config = document["config"]
    for section, values in given.items():
        config = {**config, section: {**config[section], **values}}
    save_checkpoint(tmp_path / "operator", tensors, kind=OPERATOR, document={**document, "config": config})
    budgets = ["--by", "samples", "--budget-samples", "32"]
    done = run("compare", "--checkpoint", tmp_path / "operator", *budgets)
    # A baseline of their own is trained only if it is asked for.
    assert ("--allow-code theirs.code" in done.stderr) == ("baselines" not in given)
    assert "theirs.code" not in sys.modules


def test_stages_of_ones_own_that_a_checkpoint_names_need_no_code_to_use_it(
    folder: Path, tmp_path: Path
) -> None:
    tensors, document = load_checkpoint(folder / "checkpoints" / "operator.safetensors", kind=OPERATOR)
    stages = {**document["config"]["stages"], "polish": {"epochs": 5}}
    config = {**document["config"], "code": ["mylab.stages"], "stages": stages}
    save_checkpoint(tmp_path / "operator", tensors, kind=OPERATOR, document={**document, "config": config})
    done = run("evaluate", "--checkpoint", tmp_path / "operator", "--out", tmp_path / "report")
    assert done.exit_code == 0, done.output


def test_configuration_in_a_checkpoint_that_is_none_is_a_typed_error(folder: Path, tmp_path: Path) -> None:
    tensors, document = load_checkpoint(folder / "checkpoints" / "operator.safetensors", kind=OPERATOR)
    config = {**document["config"], "evaluation": None}
    save_checkpoint(tmp_path / "operator", tensors, kind=OPERATOR, document={**document, "config": config})
    done = run("evaluate", "--checkpoint", tmp_path / "operator")
    assert "evaluation: expected keys and values" in done.stderr


def test_compare_refuses_another_operator_before_it_trains_baselines(folder: Path, tmp_path: Path) -> None:
    budgets = ("--budget-seconds", 0.2, "--budget-samples", 32)
    given = ("--config", folder / "run.yaml", "data.tasks=[burgers1d,darcy2d]", f"checkpoint.dir={tmp_path}")
    fields = folder / "checkpoints" / "operator.safetensors"
    own = ("--checkpoint", folder / "latent.safetensors", "--also", fields)
    done = run("compare", *given, *own, *budgets, "--out", tmp_path / "report")
    assert done.exit_code == 2, done.output
    assert "wasn't trained for this task" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_compare_without_a_log_asks_for_budgets(folder: Path, tmp_path: Path) -> None:
    done = run("compare", "--config", folder / "run.yaml", "--out", tmp_path)
    assert done.exit_code == 2
    assert "say --budget-flops and --budget-samples and --budget-seconds" in " ".join(done.stderr.split())


def stage_log(stage: str, steps: int, **values: Any) -> StageLog:
    return StageLog(stage, 100.0, 5.0, 90.0, 0.0, steps, 32 * steps, **values)


def test_equal_budgets_are_the_run_s_shared_by_its_tasks() -> None:
    """Encoding costs what its operations cost in the autoencoder's training: 10 s for 3e9."""
    logs = [
        stage_log("autoencoder", 100, flops=3e9, processor_s=10.0),
        stage_log("operator", 1000, flops=6e9, preparation_flops=3e9, processor_s=60.0),
    ]
    flops, samples, seconds = equal_budgets(logs, num_tasks=2)
    assert (flops.flops, samples.samples, seconds.seconds) == (6e9, 16000, 40.0)
    (given,) = equal_budgets([], num_tasks=1, by=("samples",), given={"samples": 5})
    assert given.samples == 5
    with pytest.raises(ConfigError) as refused:
        equal_budgets(logs[:1], num_tasks=1)
    assert refused.value.kind == "no_log"
    earlier = [logs[0], stage_log("operator", 1000)]  # a log that counted nothing
    assert equal_budgets(earlier, num_tasks=1, by=("samples",))[0].samples == 32000
    with pytest.raises(ConfigError, match=r"in flops.*say --budget-flops"):
        equal_budgets(earlier, num_tasks=1, by=("flops",))


def test_equal_budgets_take_the_autoencoder_that_was_trained_last() -> None:
    autoencoder = stage_log("autoencoder", 100, trained_at=50.0, flops=1.0)
    joint = stage_log("joint", 250, trained_at=90.0, flops=10.0)
    operator = stage_log("operator", 1000, trained_at=100.0, flops=100.0)

    def budgets(*logs: StageLog) -> tuple[float | None, int | None]:
        flops, samples = equal_budgets(logs, num_tasks=1, by=("flops", "samples"))
        return flops.flops, samples.samples

    assert budgets(joint) == budgets(autoencoder, joint) == (10.0, 8000)
    assert budgets(autoencoder, joint, operator) == (110.0, 32000)
    later = dataclasses.replace(autoencoder, trained_at=95.0)
    assert budgets(later, joint, operator) == (101.0, 32000)


# --- predict -------------------------------------------------------------------------------------------


def predict(folder: Path, source: Path, out: Path, *arguments: Any, latent: bool = False) -> Done:
    name = "latent.safetensors" if latent else "checkpoints/operator.safetensors"
    return run("predict", source, "--checkpoint", folder / name, "--out", out, "--device", "cpu", *arguments)


def test_predict_from_a_store_writes_the_given_frame_and_the_rollout(folder: Path, tmp_path: Path) -> None:
    source, out = folder / "stores" / "burgers1d_test.zarr.zip", tmp_path / "out.zarr.zip"
    done = predict(folder, source, out, "--steps", 3, "--start", 1, "--batch-size", 1, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"store": str(out), "figure": None}
    with ups_store.open(source) as given, ups_store.open(out) as store:
        assert store["fields"].shape == (2, 4, 32, 1)
        np.testing.assert_array_equal(store["fields"][:, 0], given["fields"][:, 1])
        simulator = ups.load(folder / "checkpoints" / "operator.safetensors")
        expected = simulator.rollout(given["fields"][:, 1].copy(), 3, parameters={"nu": 0.1})
        np.testing.assert_allclose(store["fields"][:, 1:], expected.numpy(), atol=1e-6)
        np.testing.assert_allclose(store["t"], given["t"][1:5])
        np.testing.assert_array_equal(store["nu"], given["nu"])
        assert store.attrs["channels"] == given.attrs["channels"]
        assert store.identity["kind"] == "prediction"


class Members(Simulator):
    """The simulator with noise: a stand-in for a generative model's file."""

    def rollout_steps(
        self, fields: Any, steps: int, *, members: int, seed: int, **conditions: Any
    ) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for frame in self.rollout(fields, steps, **conditions).unbind(1):
            noise = torch.randn((len(frame), members, *frame.shape[1:]), generator=generator)
            yield frame.unsqueeze(1) + 0.1 * noise


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path, *, device: str) -> Simulator:
        simulator = load_simulator(path, device=device)
        simulator.__class__ = Members
        return simulator

    monkeypatch.setattr(ups, "load", load, raising=False)


@pytest.mark.usefixtures("members")
def test_predict_writes_members_with_an_axis_of_their_own_beside_their_mean(
    folder: Path, tmp_path: Path
) -> None:
    source, out = folder / "stores" / "burgers1d_test.zarr.zip", tmp_path / "out.zarr.zip"
    figure = tmp_path / "mean.png"
    options = ("--steps", 3, "--members", 4, "--seed", 9, "--figure", figure)
    done = predict(folder, source, out, *options)
    assert done.exit_code == 0, done.output
    with ups_store.open(source) as given, ups_store.open(out) as store:
        assert store["members"].shape == (2, 4, 4, 32, 1)
        assert store.dims["members"] == ("sample", "member", "time", "x", "channel")
        np.testing.assert_array_equal(store["members"][:, 2, 0], given["fields"][:, 0])
        np.testing.assert_allclose(store["fields"], store["members"].mean(1), atol=1e-6)
        assert store["members"][:, :, 1].std(1).min() > 0
        assert (store.identity["members"], store.identity["seed"]) == (4, 9)
        assert [origin["role"] for origin in store.attrs["made_from"]] == ["operator", "given states"]
        last = store["members"][1].copy()
    assert figure.exists()
    assert predict(folder, source, out, *options, "--start", 0, "--limit", 2, "--force").exit_code == 0
    with ups_store.open(out) as store:
        np.testing.assert_array_equal(store["members"][1], last)  # of its own seed, whatever is beside it


@pytest.mark.usefixtures("members")
def test_predict_writes_members_of_a_steady_task_without_the_given_field(
    folder: Path, tmp_path: Path
) -> None:
    source, out = folder / "stores" / "darcy2d_test.zarr.zip", tmp_path / "out.zarr.zip"
    done = predict(folder, source, out, "--task", "darcy2d", "--members", 3, latent=True)
    assert done.exit_code == 0, done.output
    with ups_store.open(source) as given, ups_store.open(out) as store:
        assert store["members"].shape == (2, 3, 1, 16, 16, 1)
        assert store["fields"].shape == (2, 1, 16, 16, 1)
        np.testing.assert_array_equal(store["coefficient"], given["coefficient"])


def test_predict_refuses_members_of_a_model_that_predicts_one_future(folder: Path, tmp_path: Path) -> None:
    source, out = folder / "stores" / "burgers1d_test.zarr.zip", tmp_path / "out.zarr.zip"
    done = predict(folder, source, out, "--members", 4)
    assert done.exit_code == 2
    assert "found a model that predicts one future; leave out --members" in " ".join(done.stderr.split())
    done = predict(folder, source, out, "--members", 1)
    assert "--members: expected at least 2, found 1" in done.stderr
    assert not out.exists()


@pytest.mark.rendered
def test_predict_from_hdf5_gives_the_same_as_from_the_store(folder: Path, tmp_path: Path) -> None:
    (source,) = folder.glob("1D_Burgers*.hdf5")
    figure = tmp_path / "sample.png"
    options = ("--steps", 2, "--split", "test", "--figure", figure)
    done = predict(folder, source, tmp_path / "a.zarr.zip", *options)
    assert done.exit_code == 0, done.output
    assert "2 of 20 samples are of test" in done.stderr
    store = folder / "stores" / "burgers1d_test.zarr.zip"  # the first tenth of the file
    assert predict(folder, store, tmp_path / "b.zarr.zip", "--steps", 2).exit_code == 0
    with ups_store.open(tmp_path / "a.zarr.zip") as one, ups_store.open(tmp_path / "b.zarr.zip") as other:
        np.testing.assert_array_equal(one["fields"], other["fields"])
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_predict_asks_which_split_of_a_file_unless_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,), out = folder.glob("1D_Burgers*.hdf5"), tmp_path / "a.zarr.zip"
    done = predict(folder, source, out)
    assert done.exit_code == 2
    text = " ".join(done.stderr.split())
    assert "expected train (16 samples), val (2 samples), test (2 samples) or all" in text
    assert "say --split" in text
    assert not out.exists()
    terminal = SimpleNamespace(isatty=lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(predict_verb, "_ask_split", lambda counts: list(counts)[1])
        patch.setattr(predict_verb, "sys", SimpleNamespace(stdin=terminal, stderr=terminal))
        done = predict(folder, source, out)
    assert "2 of 20 samples are of val" in done.stderr
    assert predict(folder, source, out, "--split", "all", "--force").exit_code == 0
    with ups_store.open(out) as store:
        assert len(store) == 20
    done = predict(folder, source, tmp_path / "b.zarr.zip", "--split", "tset")
    assert "--split: expected train, val, test or all" in done.stderr


def test_predict_takes_a_file_or_store_with_more_points_and_time_steps(folder: Path, tmp_path: Path) -> None:
    """Twice the points, three times the steps: what is taken of them is where the training's were."""
    fine = make_dataset("burgers1d", tmp_path, num_samples=10, points=64, frames=16, nu=0.1)
    store = tmp_path / "burgers1d_test.zarr.zip"
    flags = ["--tasks", "burgers1d", "--root", str(tmp_path), "--cache-dir", str(tmp_path), "--no-parallel"]
    assert run_ups_store("build", *flags).exit_code == 0
    said = "reduced as the training data were: 1 point of 2 along each axis (64 to 32), 1 time step of 3"
    for number, (path, split) in enumerate([(fine, ["--split", "test"]), (store, [])]):
        out = tmp_path / f"{number}.zarr.zip"
        done = predict(folder, path, out, "--steps", 2, "--start", 1, *split)
        assert done.exit_code == 0, done.output
        assert f"{said} (16 to 6)" in " ".join(done.stderr.split())
        with ups_store.open(store) as given, ups_store.open(out) as predicted:
            np.testing.assert_array_equal(predicted["fields"][:, 0], given["fields"][:, 3, ::2])
            np.testing.assert_array_equal(predicted["x"], given["x"][::2])
            np.testing.assert_allclose(predicted["t"], given["t"][3:10:3], rtol=1e-6)


def test_predict_refuses_points_that_the_grid_is_no_part_of(folder: Path, tmp_path: Path) -> None:
    source = make_dataset("burgers1d", tmp_path, num_samples=2, points=48, frames=6, nu=0.1)
    done = predict(folder, source, tmp_path / "a.zarr.zip", "--split", "all")
    assert done.exit_code == 2
    said = "can't be reduced to the grid of the operator: expected 32, or a whole multiple, found 48"
    assert said in " ".join(done.stderr.split())


@pytest.mark.rendered
def test_predict_draws_what_a_paper_takes(folder: Path, tmp_path: Path) -> None:
    source, out = folder / "stores" / "burgers1d_test.zarr.zip", tmp_path / "out.zarr.zip"
    done = predict(folder, source, out, "--steps", 2, "--figure", tmp_path / "a.pdf")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    done = predict(folder, source, out, "--force", "--figure", tmp_path / "a.jpg")
    assert "--figure: expected a name that ends in .svg, .pdf, .png" in done.stderr


def test_predict_beyond_the_source_draws_what_it_wrote(folder: Path, tmp_path: Path) -> None:
    source, figure = folder / "stores" / "burgers1d_test.zarr.zip", tmp_path / "new" / "sample.png"
    done = predict(folder, source, tmp_path / "a.zarr.zip", "--steps", 9, "--figure", figure)
    assert done.exit_code == 0, done.output
    assert figure.exists()


def test_predict_with_other_parameters_writes_those_that_were_used(folder: Path, tmp_path: Path) -> None:
    source, out = folder / "stores" / "burgers1d_test.zarr.zip", tmp_path / "out.zarr.zip"
    given = ("--steps", 2, "--parameter", "nu=0.7", "--figure", tmp_path / "a.png", "--extrapolate")
    done = predict(folder, source, out, *given)
    assert done.exit_code == 0, done.output
    with ups_store.open(out) as store:
        np.testing.assert_array_equal(store["nu"], [0.7, 0.7])


def test_predict_takes_only_parameters_for_parameters(folder: Path, tmp_path: Path) -> None:
    """Numbers of steps are none, boundary values are; what training knew one value of is written, too."""
    source, out = tmp_path / "ragged.zarr.zip", tmp_path / "out.zarr.zip"
    with ups_store.open(folder / "stores" / "burgers1d_test.zarr.zip") as given:
        arrays = {"fields": given["fields"].copy(), "num_steps": np.array([4, 6]), "bc_left": np.ones(2)}
        specs = {name: ups_store.ArraySpec(values.shape, values.dtype) for name, values in arrays.items()}
        with ups_store.create(source, specs, attrs=given.attrs, identity={}) as writer:
            writer.commit_many(range(2), arrays)
            writer.finish()
    done = predict(folder, source, out, "--steps", 2)
    assert done.exit_code == 0, done.output
    with ups_store.open(out) as store:
        assert {*store.arrays} >= {"fields", "nu"}
        assert "num_steps" not in store.arrays
        np.testing.assert_array_equal(store["bc_left"], [1.0, 1.0])
        np.testing.assert_array_equal(store["nu"], [0.1, 0.1])


def test_predict_of_a_steady_task_keeps_its_input(folder: Path, tmp_path: Path) -> None:
    source, out = folder / "stores" / "darcy2d_test.zarr.zip", tmp_path / "out.zarr.zip"
    done = predict(folder, source, out, "--task", "darcy2d", "--figure", tmp_path / "a.png", latent=True)
    assert done.exit_code == 0, done.output
    with ups_store.open(source) as given, ups_store.open(out) as store:
        assert store["fields"].shape == given["fields"].shape
        np.testing.assert_array_equal(
            store["coefficient"], given["coefficient"].reshape(store["coefficient"].shape)
        )


def test_predict_replaces_a_store_only_when_told(folder: Path, tmp_path: Path) -> None:
    source, out = folder / "stores" / "burgers1d_test.zarr.zip", tmp_path / "out.zarr.zip"
    assert predict(folder, source, out, "--steps", 1).exit_code == 0
    again = predict(folder, source, out, "--steps", 2)
    assert again.exit_code == 2
    assert "there is a file already; say --force" in again.stderr
    assert predict(folder, source, out, "--steps", 2, "--force").exit_code == 0
    with ups_store.open(out) as store:
        assert store["fields"].shape[1] == 3


def test_predict_that_was_interrupted_continues(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = folder / "stores" / "burgers1d_test.zarr.zip", tmp_path / "out.zarr.zip"
    plain, asked = prediction._predict, []

    def interrupted(*args: Any) -> Any:
        asked.append(args[4].tolist())
        if len(asked) == 3:  # the first is a trial, the second the first sample
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(prediction, "_predict", interrupted)
    arguments = ("--steps", 2, "--batch-size", 1)
    assert predict(folder, source, out, *arguments).exit_code == 5
    assert not out.exists()
    assert predict(folder, source, out, *arguments).exit_code == 0
    assert asked == [[0], [0], [1], [0], [1]]
    with ups_store.open(out) as store:
        assert np.isfinite(store["fields"]).all()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--start", "6"], 2, "--start: expected 0 to 5, found 6"),
        (["--dt", "-1"], 2, "dt of the rollout"),
        (["--parameter", "mu=1"], 2, "parameters: expected nu, found mu"),
        (["--task", "darcy2d"], 2, "task of the simulator"),
        (["--device", "abacus"], 2, "--device"),
    ],
)
def test_predict_says_what_is_wrong(
    folder: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    done = predict(
        folder, folder / "stores" / "burgers1d_test.zarr.zip", tmp_path / "out.zarr.zip", *arguments
    )
    assert (done.exit_code, says in " ".join(done.stderr.split())) == (code, True), done.output
    assert list(tmp_path.iterdir()) == []


def test_predict_without_a_checkpoint_says_how_to_get_one(folder: Path, tmp_path: Path) -> None:
    source = folder / "stores" / "burgers1d_test.zarr.zip"
    missing = tmp_path / "none.safetensors"
    done = run("predict", source, "--checkpoint", missing, "--out", tmp_path / "a.zarr.zip")
    assert done.exit_code == 1
    assert done.stderr == f"error: {missing}: no such checkpoint; {TRAIN_IT}\n"


def test_predict_from_what_is_no_source_says_so(folder: Path, tmp_path: Path) -> None:
    store = folder / "stores" / "darcy2d_test.zarr.zip"
    assert "a store of another task" in predict(folder, store, tmp_path / "out.zarr.zip").stderr
    missing = predict(folder, tmp_path / "none.hdf5", tmp_path / "out.zarr.zip")
    assert missing.exit_code == 3
    assert "none.hdf5" in missing.stderr
    nothing = predict(folder, tmp_path / "none.zarr.zip", tmp_path / "out.zarr.zip")
    assert nothing.exit_code == 3
    (tmp_path / "cut.zarr.zip").write_bytes(store.read_bytes()[:-100])
    damaged = predict(folder, tmp_path / "cut.zarr.zip", tmp_path / "out.zarr.zip")
    assert damaged.exit_code == 3, damaged.output
