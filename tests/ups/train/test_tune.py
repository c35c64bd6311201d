"""`ups tune`: what is searched, what is recorded, how a search that was interrupted goes on."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from small_simulators import configure, make_data
from trained_baselines import small_config

from ups.config import dump_config, load_config
from ups.errors import ConfigError, DivergedError, InterruptedTrainingError, MissingExtraError
from ups.train import tune as module
from ups.train.tune import space_of, tune

pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def written(root: Path, folder: Path, **options: Any) -> Path:
    """A configuration in a file, with few batches."""
    config = small_config(root, folder / "checkpoints", **{"stages.fno.epochs": 1, **options})
    path = folder / "run.yaml"
    folder.mkdir(exist_ok=True)
    path.write_text(dump_config(config))
    return path


def search(path: Path, num_trials: int = 2, stage: str = "fno", **options: Any) -> dict[str, Any]:
    given = {"overrides": (), "amounts": {"samples": 32}, **options}
    return tune(stage, path, num_trials=num_trials, **given)


def test_space_has_only_sizes_for_which_the_grids_have_room(root: Path) -> None:
    both = configure(root, "burgers1d", "darcy2d")  # 32 and 16 x 16 points
    fno, unet, latent = (space_of(stage, both) for stage in ("fno", "unet", "operator"))
    assert fno.sizes["baselines.fno.modes"] == [8]
    assert unet.sizes["baselines.unet.levels"] == [2, 3, 4, 5]
    assert list(latent.sizes) == ["operator.width"]
    fields = space_of("operator", configure(root, "burgers1d", **{"operator.state": "fields"}))
    assert fields.sizes["encoder.patch_size"] == [2, 4, 8, 16]
    with pytest.raises(ConfigError, match="--stage: expected operator or fno"):
        space_of("joint", both)


def test_search_records_its_trials_and_leaves_the_best_to_be_included(
    root: Path, tmp_path: Path, notes: list[str]
) -> None:
    path = written(root, tmp_path)
    report = search(path, 3)
    folder = tmp_path / "checkpoints" / "tune" / "fno"
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert [line["trial"] for line in lines] == [0, 1, 2]
    assert lines[0]["values"]["stages.fno.optimizer.lr"] == load_config(path).stage("fno").optimizer.lr
    assert all(line["budget"] == {"samples": 32} and line["steps"] == {"burgers1d": 2} for line in lines)
    best = min(lines, key=lambda line: line["score"])
    assert (report["score"], report["best"]) == (best["score"], best["values"])
    assert len({line["values"]["stages.fno.optimizer.lr"] for line in lines}) == 3
    own = tmp_path / "own.yaml"
    own.write_text(f"include: [{path.name}, {(folder / 'best.yaml').relative_to(tmp_path)}]\n")
    config = load_config(own)
    assert config.stage("fno").optimizer.lr == best["values"]["stages.fno.optimizer.lr"]
    assert config.baselines.fno.width == best["values"]["baselines.fno.width"]
    assert "nRMSE on validation" in (folder / "best.yaml").read_text()
    assert sum(note.startswith("trial ") for note in notes) == 3
    assert sum(note.startswith("fno epoch ") for note in notes) == 3


def test_search_that_was_interrupted_ends_as_one_that_was_not(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search(written(root, tmp_path / "whole"))
    path, plain, asked = written(root, tmp_path / "parts"), module.train_stage_of_baselines, list[float]()

    def interrupted(kind: str, config: Any) -> dict[str, Any]:
        asked.append(config.stage("fno").optimizer.lr)
        if len(asked) == 2:
            raise InterruptedTrainingError("stopped", continued_by="the same command")
        return plain(kind, config)

    monkeypatch.setattr(module, "train_stage_of_baselines", interrupted)
    with pytest.raises(InterruptedTrainingError):
        search(path)
    report = search(path)
    assert asked[1] == asked[2]  # the same trial again, from its own state
    assert len(asked) == 3
    assert [trial["values"] for trial in report["trials"]] == [trial["values"] for trial in whole["trials"]]
    assert report["score"] == whole["score"]
    search(path)  # nothing is left to be done
    assert len(asked) == 3


def test_trial_that_fails_is_recorded_and_the_search_goes_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, asked = module.train_stage_of_baselines, list[str]()

    def diverging(kind: str, config: Any) -> dict[str, Any]:
        asked.append(kind)
        if len(asked) != 2:
            raise DivergedError("the loss is not finite")
        return plain(kind, config)

    monkeypatch.setattr(module, "train_stage_of_baselines", diverging)
    path = written(root, tmp_path)
    with pytest.raises(ConfigError) as refused:
        search(path, 1)
    assert refused.value.kind == "no_trial"
    report = search(path, 3)
    assert [trial["state"] for trial in report["trials"]] == ["fail", "complete", "fail"]
    assert report["score"] == report["trials"][1]["score"]


def test_trials_of_another_search_are_refused(root: Path, tmp_path: Path) -> None:
    path = written(root, tmp_path)
    search(path, 1)
    search(path, 1, overrides=["baselines.unet.width=8", "training.log_every=7"])  # the stage doesn't read it
    for options in ({"amounts": {"samples": 48}}, {"overrides": ["seed=1"]}):
        with pytest.raises(ConfigError, match="another search") as refused:
            search(path, 1, **options)
        assert refused.value.kind == "other_search"
    assert len(search(path, 1, overrides=["seed=1"], restart=True)["trials"]) == 1


@pytest.mark.parametrize("amounts", [{}, {"flops": 1e9, "samples": 5}])
def test_every_trial_has_one_budget(root: Path, tmp_path: Path, amounts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="budget of a trial: expected one of --budget-flops"):
        search(written(root, tmp_path), amounts=amounts)


def test_missing_package_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'ups-store[tune]'")):
        search(written(root, tmp_path))
