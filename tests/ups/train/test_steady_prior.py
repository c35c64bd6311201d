"""The stage `prior`: training on fields and latents, resuming, refusal where no task is steady."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from operator_runs import build, configure, made_once
from run_nodes import training_nodes

import ups
import ups_store
from ups.config.legacy import as_hashed
from ups.data.solvers import make_dataset
from ups.errors import ConfigError
from ups.eval.evaluate import evaluate_run
from ups.eval.predict import PredictionRequest, predict_store
from ups.pipeline.config_checks import check_config
from ups.train.prior import make_prior_stage
from ups.train.run import run_stage
from ups.train.saved_state import SavedState, state_path
from ups.train.trainer import Trainer
from ups.trained.checkpoint import load_checkpoint, save_checkpoint
from ups.trained.prior import SteadyPrior

CPU = torch.device("cpu")
PRIOR_PATH = Path("checkpoints/prior.safetensors")
SETTINGS: dict[str, Any] = {
    "data": {"task": "darcy2d", "root": "data", "split_fractions": [0.7, 0.2, 0.1]},
    "cache": {"dir": "cache"},
    "reading": {"num_workers": 0},
    "latent": {"dim": 4, "tokens": 16},
    "encoder": {"patch_size": 2, "width": 8, "depth": 1, "num_heads": 2},
    "decoder": {"width": 8, "depth": 1, "num_heads": 2},
    "operator": {"state": "fields", "width": 16, "depths": [1]},
    "diffusion": {"hidden_dim": 8, "num_sampler_steps": 2},
    "prior": {"observed_points": 5},
    "training": {"batch_size": 8, "lr": 1e-2, "num_workers": 0, "device": "cpu", "log_every": 5},
    "stages": {
        "autoencoder": {"epochs": 1, "steps_per_epoch": 2},
        "operator": {"epochs": 0},
        "prior": {"epochs": 2, "steps_per_epoch": 3},
    },
    "evaluation": {"enabled": False},
    "checkpoint": {"dir": "checkpoints"},
}


def prepare(folder: Path) -> None:
    make_dataset("darcy2d", folder / "data", num_samples=24, points=8)
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, prepare)


@pytest.mark.parametrize("overrides", [(), ("prior.method=regression",), ("prior.observed_points=null",)])
def test_stage_trains_and_leaves_a_file_that_draws_solutions(run: Path, overrides: tuple[str, ...]) -> None:
    config = configure(run, *overrides)
    report = run_stage("prior", config)
    is_flow = config.prior.method == "flow"
    assert report["members"] == (64 if is_flow else 1)
    assert ("spread_skill" in report["scores"]["darcy2d"]) == is_flow
    model = ups.load(PRIOR_PATH)
    assert isinstance(model, SteadyPrior)
    num = config.prior.observed_points
    mask = None if num is None else torch.ones(8, 8, dtype=torch.bool)
    assert model.solve(torch.rand(2, 8, 8), members=1, observed=mask).shape == (2, 1, 8, 8, 1)


@pytest.mark.parametrize("observed", ["5", "null"])
def test_states_may_be_latents(run: Path, observed: str) -> None:
    config = configure(run, "operator.state=latent", f"prior.observed_points={observed}")
    run_stage("autoencoder", config)
    report = run_stage("prior", config)
    assert report["states"] == "latent"
    model = ups.load(PRIOR_PATH)
    assert isinstance(model, SteadyPrior)
    assert model.autoencoder is not None


@pytest.mark.parametrize("begun_as", ["prior", "steady_prior"])
def test_training_goes_on_to_the_bit(run: Path, begun_as: str) -> None:
    config = configure(run, "training.ema_decay=0.9")
    Trainer(make_prior_stage(config, device=CPU), config, device=CPU).fit()
    expected = load_checkpoint(PRIOR_PATH, kind="prior")[0]
    parts = configure(run, "training.ema_decay=0.9", "checkpoint.dir=parts")
    (run / "parts").mkdir()
    first = Trainer(make_prior_stage(parts, device=CPU), parts, device=CPU)
    for _ in range(4):
        first.train_step()
    first.save()
    state = run / "parts" / "prior.training.safetensors"
    if begun_as != "prior":  # as saved when stages and keys had their earlier names
        tensors, document = load_checkpoint(state, kind="training")
        earlier = {**document, "config": as_hashed(document["config"])}
        begun = state.with_name("steady_prior.training.safetensors")
        save_checkpoint(begun, tensors, document=earlier, kind="training")
        state.unlink()
        assert SavedState.read(state_path(parts, "prior")).document["config"]["steady_prior"]
    Trainer(make_prior_stage(parts, device=CPU), parts, device=CPU).fit()
    found = load_checkpoint(run / "parts" / "prior.safetensors", kind="prior")[0]
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_no_steady_task_is_refused_before_anything_is_opened(run: Path) -> None:
    config = configure(run, "data.task=burgers1d", "data.root=nowhere")
    with pytest.raises(ConfigError, match="darcy2d") as caught:
        make_prior_stage(config, device=CPU)
    assert caught.value.kind == "no_steady_task"
    report = check_config(run / "run.yaml", ["data.task=burgers1d"])
    assert "no_steady_task" in {check.kind for check in report.problems}


def test_steady_task_is_accepted_and_more_points_than_there_are_refused(run: Path) -> None:
    report = check_config(run / "run.yaml")
    assert report.exit_code == 0, [check.text for check in report.problems]
    assert any("prior (2 epochs)" in check.text for check in report.checks)
    with pytest.raises(ConfigError) as caught:
        make_prior_stage(configure(run, "prior.observed_points=65"), device=CPU)
    assert caught.value.kind == "observed_points"


def test_graph_has_a_node_that_depends_on_the_encoder(run: Path) -> None:
    nodes = {node.name: node for node in training_nodes(configure(run, "operator.state=latent"))}
    assert "autoencoder" in nodes["prior"].after
    off = configure(run, "stages.prior.epochs=0")
    assert "prior" not in {node.name for node in training_nodes(off)}


# --- predicting and evaluating ----------------------------------------------------------------------------


def predict(observed: str | None, *, out: str = "out.zarr.zip", members: int | None = 3) -> ups_store.Store:
    (source,) = Path("data").rglob("*.hdf5")
    asked = {"split": "val", "limit": 2, "members": members, "observed": observed}
    request = PredictionRequest(source, PRIOR_PATH, Path(out), device="cpu", **asked)
    predict_store(request)
    store = ups_store.open(out)
    assert isinstance(store, ups_store.Store)
    return store


def test_prediction_is_of_the_points_of_a_file_or_of_random_ones(run: Path) -> None:
    run_stage("prior", configure(run))
    mask = np.zeros((2, 8, 8), bool)
    mask[0, 2, ::2] = mask[1, :4, 5] = True
    np.save("mask.npy", mask)
    found = predict("mask.npy")
    assert found.arrays["members"].shape[:2] == (2, 3)
    given = found.gather(np.arange(2), ["coefficient"])["coefficient"].reshape(2, 8, 8)
    assert given[mask].all()
    assert not given[~mask].any()
    np.save("all.npy", mask[0])  # the same for all samples
    again = predict("all.npy", out="all.zarr.zip")
    first = [store.gather(np.arange(1), ["members"])["members"] for store in (found, again)]
    np.testing.assert_array_equal(*first)
    drawn = predict("5", out="drawn.zarr.zip", members=None).gather(np.arange(2), ["coefficient"])
    assert [(each != 0).sum() for each in drawn["coefficient"]] == [5, 5]


REFUSED: list[tuple[str | None, str, str]] = [
    (None, "observed", "say --observed 5"),
    ("65", "observed_points", "at most the 64 points"),
    ("0", "observed", "no file"),
    ("other.npy", "observed", "of shape (4, 8)"),
    ("numbers.npy", "observed", "float64"),
    ("nowhere.npy", "observed", "a sample without any"),
]


def test_points_that_can_not_be_are_refused(run: Path) -> None:
    run_stage("prior", configure(run, "stages.prior.epochs=1"))
    np.save("other.npy", np.ones((4, 8), bool))
    np.save("numbers.npy", np.full((8, 8), 0.5))
    np.save("nowhere.npy", np.zeros((8, 8), bool))
    for observed, kind, says in REFUSED:
        with pytest.raises(ConfigError) as caught:
            predict(observed)
        assert caught.value.kind == kind
        assert says in f"{caught.value}"
    assert not Path("out.zarr.zip").exists()


def test_evaluation_has_a_row_of_the_prior_where_members_are_asked_for(run: Path) -> None:
    stage = ("stages.operator.epochs=1", "stages.operator.steps_per_epoch=2")
    build(run, "latent.encoder=none")
    run_stage("operator", configure(run, *stage))
    run_stage("prior", configure(run))
    evaluated = partial(evaluate_run, None, config_path=Path("run.yaml"), overrides=())
    (task,) = evaluated(members=3).tasks
    assert [row.name for row in task.rows][:2] == ["operator", "prior"]
    ensemble = task.rows[1].ensemble
    assert ensemble is not None
    assert ensemble.num_members == 3
    assert "5 random points" in task.rows[1].note
    assert "prior" not in {row.name for row in evaluated().tasks[0].rows}
