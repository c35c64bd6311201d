"""An evaluation: its rows, what it says about them, and what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_simulators import LATENT_DIM, NUM_TOKENS, configure, make_autoencoder, make_data, make_simulator
from trained_baselines import untrained

import ups_store
from ups.config import RunConfig
from ups.data.windows import open_trajectories
from ups.errors import ConfigError
from ups.eval.baseline_model import save_baseline
from ups.eval.evaluate import evaluate, operator_note
from ups.eval.metrics import measure
from ups.eval.report import Report, to_html, write_report
from ups.eval.runs import Run, baseline_path, check_comparable, find_baselines
from ups.eval.training_logs import StageLog

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def test_rows_of_a_latent_operator_are_those_that_a_reader_compares(
    root: Path, tmp_path: Path, notes: list[str]
) -> None:
    config = configure(root)
    autoencoder = make_autoencoder(config)
    simulator = make_simulator(config, autoencoder)
    report = evaluate(config, [Run(simulator, baselines=[untrained(root)])])
    found = json.loads(write_report(tmp_path, report)["json"].read_text())
    rows = found["rows"]
    assert list(rows) == ["operator", "fno_samples", "persistence", "mean", "autoencoder_floor"]
    assert rows["fno_samples"]["seeds"] == [0]
    assert rows["persistence"]["seeds"] == []
    assert rows["operator"]["paired"] == rows["autoencoder_floor"]["paired"] == {}
    assert rows["fno_samples"]["paired"]["nrmse"]["verdict"] == "can't be told"
    assert rows["fno_samples"]["nrmse"]["low"] is None  # one trajectory
    assert "a budget of 32 samples" in rows["fno_samples"]["note"]
    assert any("5 steps of 1 trajectory" in note for note in notes)
    assert found["split"] == "dev"
    assert len(found["tasks"]["burgers1d"]["t"]) == 5


@pytest.fixture(scope="module")
def evaluated(root: Path) -> Report:
    """An operator on fields with its logs, beside a baseline, for what only looks at the report."""
    baseline = untrained(root)
    baseline.log = StageLog("fno", 12.0, 2.0, 9.0, 0.0, 1, 32)
    log = StageLog("operator", 104.0, 4.0, 90.0, 0.0, 1000, 32000)
    phases = {"data": 2.5, "fno_samples burgers1d": 1.0}  # of the last one the log says more
    config = configure(root)
    run = Run(make_simulator(config), logs=[log], baselines=[baseline])
    return evaluate(config, [run], phases=phases, horizon=2)


def test_report_tells_the_seconds_of_every_phase_and_a_training_apart_from_its_startup(
    evaluated: Report,
) -> None:
    assert list(evaluated.seconds) == ["data", "fno_samples burgers1d", "operator", "evaluation"]
    assert list(evaluated.seconds.values())[:3] == [2.5, 12.0, 104.0]
    told = "operator trained for 100 s after 4 s of startup, 1,000 steps, 32,000 samples"
    assert told in evaluated.tasks[0].rows[0].note
    assert "of it until the first step" in to_html(evaluated)


def test_persistence_row_is_the_metric_of_the_repeated_frame(root: Path, evaluated: Report) -> None:
    row = next(row for row in evaluated.tasks[0].rows if row.name == "persistence")
    (batch,) = open_trajectories(configure(root).build, "burgers1d", "dev", horizon=2).batches()
    repeated = batch.given[:, None].expand_as(batch.truth)
    errors = measure(repeated, batch.truth)
    assert row.scores.metrics["nrmse"].mean == pytest.approx(errors["nrmse"].mean().item())
    assert row.scores.metrics["vrmse"].mean == pytest.approx(errors["vrmse"].mean().item())


def test_operator_on_fields_has_no_floor_and_rows_repeat_to_the_bit(root: Path, evaluated: Report) -> None:
    assert [row.name for row in evaluated.tasks[0].rows] == ["operator", "fno_samples", "persistence", "mean"]
    config = configure(root)
    again = evaluate(config, [Run(make_simulator(config))], horizon=2)
    assert again.tasks[0].rows[0].scores.metrics == evaluated.tasks[0].rows[0].scores.metrics


def test_protocol_says_what_was_given_and_that_the_truth_conserves_its_mean(evaluated: Report) -> None:
    (task,) = evaluated.tasks
    assert "One frame is given" in task.protocol
    assert "2 are predicted" in task.protocol
    assert np.allclose(np.diff(task.t), task.t[0])


@pytest.mark.rendered
def test_two_tasks_have_their_own_rows_and_a_steady_one_no_persistence(root: Path) -> None:
    config = configure(root, "burgers1d", "darcy2d")
    simulator = make_simulator(config, make_autoencoder(config))
    report = evaluate(config, [Run(simulator, baselines=[untrained(root, "unet", "darcy2d")])], horizon=3)
    transient, steady = report.tasks
    assert [row.name for row in transient.rows] == ["operator", "persistence", "mean", "autoencoder_floor"]
    assert [row.name for row in steady.rows] == ["operator", "unet_samples", "mean", "autoencoder_floor"]
    assert len(transient.t) == 3
    assert len(steady.t) == 1
    assert "no persistence" in steady.protocol
    assert len(transient.figures) > len(steady.figures) >= 2
    assert set(report.to_json()["tasks"]) == {"burgers1d", "darcy2d"}


def test_stride_of_the_operator_decides_which_frames_are_predicted(root: Path) -> None:
    config = configure(root)
    (task,) = evaluate(config, [Run(make_simulator(config, stride=2))]).tasks
    assert len(task.t) == 2


# --- what is refused -----------------------------------------------------------------------------------


def test_runs_of_one_seed_are_refused_instead_of_one_being_lost(root: Path) -> None:
    config = configure(root)
    with pytest.raises(ConfigError, match="a seed of its own") as caught:
        evaluate(config, [Run(make_simulator(config)), Run(make_simulator(config))])
    assert caught.value.kind == "same_seed"


def test_task_that_the_operator_does_not_know_is_refused(root: Path) -> None:
    simulator = make_simulator(configure(root))
    with pytest.raises(ConfigError, match="wasn't trained for this task") as caught:
        evaluate(configure(root, "darcy2d"), [Run(simulator)])
    assert caught.value.kind == "other_task"


def test_fields_on_another_grid_are_refused(root: Path) -> None:
    simulator = make_simulator(configure(root))
    with pytest.raises(ConfigError, match="another grid") as caught:
        evaluate(configure(root, **{"data.reduce_space": 2}), [Run(simulator)])
    assert caught.value.kind == "other_grid"


def test_split_without_samples_is_refused(root: Path) -> None:
    config = configure(root, **{"data.split_fractions": "[0.9, 0.0, 0.1]"})
    with pytest.raises(ConfigError, match="val would be empty"):
        evaluate(config, [Run(make_simulator(config))], split="val")


def test_horizon_beyond_the_trajectory_is_refused(root: Path) -> None:
    config = configure(root)
    with pytest.raises(ConfigError, match="doesn't fit into the trajectories"):
        evaluate(config, [Run(make_simulator(config))], horizon=6)


# --- which baselines -----------------------------------------------------------------------------------


def test_baselines_of_the_run_are_found_and_others_are_named(
    root: Path, tmp_path: Path, notes: list[str]
) -> None:
    config = configure(root, **{"checkpoint.dir": tmp_path})
    simulator = make_simulator(config)
    assert find_baselines(config, simulator) == []
    save_baseline(baseline_path(config, "fno", "burgers1d", "samples"), untrained(root), config={}, report={})
    save_baseline(
        baseline_path(config, "fno", "darcy2d", "samples"),
        untrained(root, task="darcy2d"),
        config={},
        report={},
    )
    save_baseline(
        baseline_path(config, "unet", "burgers1d", "samples"), untrained(root, stride=2), config={}, report={}
    )
    (found,) = find_baselines(config, simulator)
    assert found.spec.task == "burgers1d"
    assert sorted("another task" in note for note in notes) == [False, True]
    assert any("another time stride, 2" in note for note in notes)
    coarse = make_simulator(configure(root, **{"data.reduce_space": 2}))
    find_baselines(config, coarse)
    assert any("another grid" in note for note in notes)


def test_baseline_of_a_package_that_is_missing_is_left_out(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "neuralop", None)  # also where it is installed
    config, theirs = configure(root, **{"checkpoint.dir": tmp_path}), untrained(root)
    save_baseline(baseline_path(config, "fno", "burgers1d", "samples"), untrained(root), config={}, report={})
    theirs.spec = replace(theirs.spec, kind="fno_neuraloperator")
    path = baseline_path(config, "fno_neuraloperator", "burgers1d", "samples")
    save_baseline(path, theirs, config={}, report={})
    (found,) = find_baselines(config, make_simulator(config))
    assert found.spec.kind == "fno"
    (note,) = notes
    assert note.startswith(f"{path} is left out: neuralop isn't installed; pip install")


def test_baseline_of_a_steady_task_that_predicts_a_change_is_left_out(
    root: Path, tmp_path: Path, notes: list[str]
) -> None:
    config = configure(root, "darcy2d", **{"checkpoint.dir": tmp_path})
    path, model = baseline_path(config, "fno", "darcy2d", "samples"), untrained(root, task="darcy2d")
    old = {name: value for name, value in model.spec.size.items() if name != "predicts_change"}
    for size, num in ((model.spec.size, 1), (old, 0)):
        model.spec = replace(model.spec, size=size)
        save_baseline(path, model, config={}, report={})
        assert len(find_baselines(config, make_simulator(config))) == num
        assert ["train it again" in note for note in notes] == [True] * (1 - num)


# --- other operators ------------------------------------------------------------------------------------


def test_operators_on_latents_and_on_fields_stand_in_one_table(root: Path) -> None:
    config = configure(root)
    latent, fields = make_simulator(config, make_autoencoder(config)), make_simulator(config)
    log = StageLog("operator", 104.0, 4.0, 90.0, 0.0, 1000, 32000)
    also = [Run(fields, path=Path("fields.safetensors"), logs=[log]), Run(latent, path=Path("b"))]
    also.append(Run(fields, path=Path("c")))
    (task,) = evaluate(config, [Run(latent, baselines=[untrained(root)])], also=also).tasks
    names = [row.name for row in task.rows]
    assert names[:5] == ["operator", "operator_fields", "operator_latent", "operator_fields_2", "fno_samples"]
    labels = [row.label for row in task.rows]
    assert labels[:3] == ["latent operator", "operator on fields", "other latent operator"]
    assert len(set(labels)) == len(labels)
    own, other, twin = task.rows[:3]
    assert own.scores.metrics == twin.scores.metrics != other.scores.metrics
    assert other.note.startswith("fields.safetensors; operator ")
    assert "trained for 100 s" in other.note
    (alone,) = evaluate(config, [Run(fields)]).tasks
    assert other.scores.metrics == alone.rows[0].scores.metrics


def test_note_says_what_mixes_tokens_and_how_far_attention_reaches(root: Path) -> None:
    config = configure(root)
    simulator = make_simulator(config)

    def note(**changed: object) -> str:
        simulator.spec = replace(simulator.spec, operator={**simulator.spec.operator, **changed})
        return operator_note(Run(simulator))

    assert note().endswith("one level of spectral blocks")
    assert note(mixers=["attention"], window=4).endswith(
        "one level of attention blocks with windows of 4 tokens"
    )
    assert note(window=8).endswith("one level of attention blocks with one window over all tokens")
    assert "2 levels of hybrid over spectral blocks with" in note(
        mixers=["hybrid", "spectral"], depths=[1, 1]
    )


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"tasks": ("darcy2d",)}, "other_task"),
        ({"data.reduce_space": 2}, "other_grid"),
        ({"stride": 2}, "other_stride"),
        ({"is_encoder_known": False}, "unknown_encoder"),
    ],
)
def test_operator_that_predicts_something_else_is_refused_beside_another(
    root: Path, settings: dict[str, Any], kind: str
) -> None:
    config = configure(root)
    options = {name: settings[name] for name in ("stride", "is_encoder_known") if name in settings}
    data = {name: value for name, value in settings.items() if name.startswith("data.")}
    theirs = configure(root, *settings.get("tasks", ()), **data)
    autoencoder = make_autoencoder(theirs) if kind == "unknown_encoder" else None
    other = make_simulator(theirs, autoencoder, **options)
    with pytest.raises(ConfigError) as caught:
        check_comparable(Run(other, path=Path("other.safetensors")), config, make_simulator(config))
    assert (caught.value.kind, caught.value.path) == (kind, "other.safetensors")


# --- several seeds --------------------------------------------------------------------------------------


def test_seeds_of_operator_and_baselines_are_a_row_each_with_intervals_and_verdicts(
    root: Path, tmp_path: Path
) -> None:
    config = configure(root, **{"data.split_fractions": "[1.0, 0.0, 0.0]"})
    first, second = make_simulator(config), make_simulator(config)
    for weight in second.operator.parameters():
        torch.nn.init.normal_(weight, std=0.3)  # another training
    runs = [Run(first, baselines=[untrained(root)]), Run(second, seed=7, baselines=[untrained(root)])]
    report = evaluate(config, runs, split="train")
    (task,) = report.tasks
    rows = {row.name: row for row in task.rows}
    assert rows["operator"].seeds == rows["fno_samples"].seeds == (0, 7)
    assert rows["persistence"].seeds == ()
    (alone,) = evaluate(config, [Run(second)], split="train").tasks
    means = rows["operator"].scores.by_seed["nrmse"]
    assert means[1] == pytest.approx(alone.rows[0].scores.metrics["nrmse"].mean)
    assert rows["operator"].scores.metrics["nrmse"].mean == pytest.approx(np.mean(means))
    assert rows["operator"].scores.metrics["nrmse"].is_known
    assert rows["mean"].paired["nrmse"].difference.is_known
    page = write_report(tmp_path, report)["html"].read_text()
    assert "2 seeds" in page
    assert "over training seeds (up to 2 a row) and 20 trajectories" in page
    assert "Beside the operator, on the same trajectories" in page


# --- latents of an unknown encoder ---------------------------------------------------------------------


def write_latents(root: Path, folder: Path) -> RunConfig:
    """Latent stores as an import of `.pt` files leaves them: nothing says what encoded them."""
    config = configure(root, **{"training.latent_cache_dir": folder})
    rng = np.random.default_rng(0)
    for split, num in (("train", 6), ("test", 3)):
        latent = rng.standard_normal((num, 6, NUM_TOKENS, LATENT_DIM)).astype(np.float32)
        shapes = {"latent": latent, "nu": np.full(num, 0.1)}
        dims = {"latent": ("sample", "time", "token", "latent_channel"), "nu": ("sample",)}
        arrays = {
            name: ups_store.ArraySpec(values.shape, values.dtype, dims=dims[name])
            for name, values in shapes.items()
        }
        path = folder / f"burgers1d_{split}.zarr.zip"
        constants = {"t": np.arange(6) * 0.4}
        with ups_store.create(
            path, arrays, constants=constants, dims={"t": ("time",)}, identity={"split": split}
        ) as writer:
            writer.commit_many(np.arange(num), shapes)
            writer.finish()
    return config


def test_latents_of_an_unknown_encoder_are_compared_as_latents(root: Path, tmp_path: Path) -> None:
    config = write_latents(root, tmp_path)
    simulator = make_simulator(configure(root), make_autoencoder(configure(root)), is_encoder_known=False)
    report = evaluate(config, [Run(simulator, baselines=[untrained(root)])], split="test")
    (task,) = report.tasks
    assert task.space == "latent"
    assert [row.name for row in task.rows] == ["operator", "persistence", "mean"]
    operator, persistence, _ = (row.scores.metrics for row in task.rows)
    assert set(operator) == {"nrmse", "vrmse", "relative_l2", "correlation_time"}
    assert operator["nrmse"].mean == pytest.approx(persistence["nrmse"].mean, rel=1e-4)  # it isn't trained
    assert "nothing says what encoded them" in task.protocol
    assert task.t[0] == pytest.approx(0.4)
    assert len(task.figures) == 1
    assert report.to_json()["tasks"]["burgers1d"]["space"] == "latent"


def test_latents_of_an_unknown_encoder_need_their_split(root: Path, tmp_path: Path) -> None:
    config = write_latents(root, tmp_path)
    simulator = make_simulator(configure(root), make_autoencoder(configure(root)), is_encoder_known=False)
    with pytest.raises(ConfigError, match="no latent store of burgers1d val"):
        evaluate(config, [Run(simulator)], split="val")


def test_flag_of_today_does_not_decide_what_an_operator_was_trained_on(root: Path, tmp_path: Path) -> None:
    write_latents(root, tmp_path)
    settings = {"training.latent_cache_dir": tmp_path, "training.allow_unknown_encoder": True}
    simulator = make_simulator(configure(root), make_autoencoder(configure(root)))
    report = evaluate(configure(root, **settings), [Run(simulator)])
    assert report.tasks[0].space == "fields"
