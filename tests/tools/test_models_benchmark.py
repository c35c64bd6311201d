"""`make bench-models`: its questions make data, trainings are kept, and the table says who is ahead."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from benchmarks.models import ablations, run, table, train
from benchmarks.models.ablations import ABLATIONS, QUESTIONS
from benchmarks.models.data import make_data, run_values
from benchmarks.models.patched import full_resolution_lift, with_input_added
from benchmarks.models.questions import BURGERS, FULL, SMALL, TEST, TRAIN, Question
from ups.config import load_config
from ups.data.solvers import SOLVERS
from ups.models.latent_operator import LatentOperator
from ups.models.operator_size import OperatorSize, TokenAxis
from ups.nn.layers import Condition

TINY = dataclasses.replace(
    BURGERS,
    settings={"nu": (0.1, 0.3), "points": 32, "frames": 4, "end_time": 0.3},
    shifts={"nu = 0.2, between": {"nu": 0.2}, "half the points": {"nu": 0.1, "points": 16}},
    num_samples=4,
    num_held_out=10,
    patch=4,
    flops=1e8,
    overrides=(
        "baselines.unet.width=4",
        "baselines.fno.modes=8",
        "training.batch_size=4",
        "operator.pdet.hidden_dim=16",
    ),
)


def scores(model: str, seed: int, *, level: float, question: Question = TINY) -> dict[str, Any]:
    """Scores around a level; trajectories are as hard for all models."""
    rng, hard = np.random.default_rng([seed, 1]), np.random.default_rng(7).uniform(0.5, 2, 24)
    sets = {
        name: {"nrmse": (level * hard * rng.uniform(0.95, 1.05, 24)).tolist()}
        for name in (TEST, *question.shifts)
    }
    training = {"steps": 10, "cpu_seconds": 1.0, "size": "1 k parameters"}
    return {"model": model, "seed": seed, "sets": sets, **training}


def all_scores(**levels: float) -> dict[str, dict[int, Any]]:
    found = {model: {s: scores(model, s, level=level) for s in range(3)} for model, level in levels.items()}
    return {**found, "persistence": {0: scores("persistence", 0, level=1.0)}}


# --- table --------------------------------------------------------------------------------------------


def test_row_says_that_the_operator_is_ahead_and_by_what_ratio() -> None:
    row = next(table.rows_of(TINY, all_scores(operator=0.05, fno=0.1, unet=0.0501)))
    assert row.paired["fno"].verdict == "ahead"
    assert row.paired["fno"].ratio.low < 0.5 < row.paired["fno"].ratio.high
    assert row.paired["unet"].verdict == "can't be told"
    assert row.nrmse["persistence"].mean > row.nrmse["fno"].mean
    assert (row.set, row.num_trajectories, list(row.seeds)) == (TEST, 24, [0, 1, 2])


def test_refused_set_is_no_row_of_a_comparison() -> None:
    found = all_scores(operator=0.1, fno=0.05, unet=0.2)
    for by_seed in found["operator"].values():
        by_seed["sets"]["half the points"] = {"refused": "another grid"}
    rows = list(table.rows_of(TINY, found))
    last = rows[-1]
    assert (last.set, last.paired, last.refused) == ("half the points", {}, {"operator": "another grid"})
    totals = table.summary(rows)["fno"]
    assert (totals["rows"], totals["behind"], totals["ahead"]) == (2, 2, 0)
    text = table.markdown([TINY], rows, {TINY.name: found})
    assert "| half the points | 24 | refused |" in text
    assert "ahead on 0, behind on 2" in text


def test_prediction_that_blew_up_is_behind() -> None:
    found = all_scores(operator=0.1, fno=0.05, unet=0.2)
    found["operator"][1]["sets"][TEST]["nrmse"][3] = None
    row = next(table.rows_of(TINY, found))
    assert row.nrmse["operator"].mean == np.inf
    assert row.paired["unet"].verdict == "behind"


# --- questions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question", [*SMALL, *FULL], ids=lambda question: f"{question.name}-{question.flops:.0e}"
)
def test_every_set_of_a_question_can_be_made(question: Question) -> None:
    for settings in question.sets.values():
        several = {name: value for name, value in settings.items() if isinstance(value, tuple)}
        for number in range(max(map(len, several.values()), default=1)):
            chosen = {name: value[number] for name, value in several.items()}
            SOLVERS[question.task](**{**settings, **chosen})
    assert question.samples_of(TEST) >= 10
    assert all(question.samples_of(name) >= 20 for name in question.shifts), "fewer have no interval"


def test_questions_of_one_size_have_names_of_their_own() -> None:
    for questions in (SMALL, FULL):
        assert len({question.name for question in questions}) == len(questions)


def test_shifted_resolutions_start_from_the_states_of_test() -> None:
    assert {TINY.seed_of(name) for name in TINY.shifts} == {TINY.seed_of(TEST)}
    assert TINY.seed_of(TRAIN) != TINY.seed_of(TEST)


def test_data_are_made_again_when_their_settings_change(tmp_path: Path) -> None:
    told: list[str] = []
    for question in (TINY, TINY, dataclasses.replace(TINY, num_samples=5)):
        make_data(question, TRAIN, tmp_path, note=told.append)
    assert told == ["burgers: makes train"] * 2


# --- trainings ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_trains_what_is_missing_and_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [(model, 0) for model in train.MODELS]
    found = run.run_questions([TINY], wanted, folder=tmp_path)[TINY.name]
    assert set(found) == {*train.MODELS, "persistence"}
    assert all(len(found["fno"][0]["sets"][name]["nrmse"]) == 20 for name in (TEST, *TINY.shifts))
    assert found["operator"][0]["steps"] > 1

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(run, "train_and_score", refuse)
    again = run.run_questions([TINY], wanted, folder=tmp_path)[TINY.name]
    assert json.dumps(again, sort_keys=True) == json.dumps(found, sort_keys=True)
    with pytest.raises(AssertionError, match="trained again"):
        run.run_questions([dataclasses.replace(TINY, flops=2e8)], wanted, folder=tmp_path)


# --- ablations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablation_changes_the_configuration_of_its_tasks_or_the_model(name: str, tmp_path: Path) -> None:
    ablation = ABLATIONS[name]
    assert ablation.against in ABLATIONS
    for question in map(QUESTIONS.__getitem__, ablation.questions):
        path = tmp_path / f"{question.name}.yaml"
        path.write_text(yaml.safe_dump(run_values(question, tmp_path)))
        changed = load_config(path, overrides=ablation.of(question).overrides)
        beside = ABLATIONS[ablation.against]
        assert question.name in beside.questions, "nothing to compare with"
        same = load_config(path, overrides=beside.of(question).overrides) == changed
        if name != ablation.against:
            assert not same or ablation.patched != beside.patched or ablation.model != beside.model


@pytest.mark.parametrize(("factor", "tokens", "dim"), [(2, 32, 2), (4, 32, 1), (8, 16, 1)])
def test_linear_latents_hold_as_many_numbers_as_the_ablation_says(factor: int, tokens: int, dim: int) -> None:
    overrides = ABLATIONS[f"linear-{factor}x"].of(QUESTIONS["burgers"]).overrides
    assert {f"latent.tokens={tokens}", f"latent.dim={dim}"} <= set(overrides)
    assert tokens * dim * factor == QUESTIONS["burgers"].settings["points"]


def test_ablation_is_compared_with_what_it_names_and_not_with_the_base() -> None:
    levels = {"base": 0.01, "linear-2x": 0.1, "latent-noise-0": 0.05}
    question = QUESTIONS["burgers"]
    found = {
        name: [{**scores(name, seed, level=level, question=question)} for seed in range(3)]
        for name, level in levels.items()
    }
    for one in (one for seeds in found.values() for one in seeds):
        for values in one["sets"].values():
            values["first_step"] = values["nrmse"]
    text = ablations.markdown({"burgers": found})
    (row,) = (line for line in text.split("\n### ")[0].splitlines() if "noise 0 |" in line)
    assert "| linear latents, 2x |" in row
    assert "**ahead**" in row
    assert "residual" not in text, "it isn't trained"


@pytest.mark.parametrize("patched", [full_resolution_lift, with_input_added])
def test_patched_operator_is_at_first_what_it_would_be_and_differs_inside_alone(patched: Any) -> None:
    def make() -> LatentOperator:
        size, axes = OperatorSize(width=8, depths=(1,)), (TokenAxis(4, True), TokenAxis(4, True))
        return LatentOperator(4, num_tasks=1, ranges=[(0.0, 1.0)], size=size, axes=axes)

    def step(operator: LatentOperator, *, steady: bool) -> Tensor:
        told = {"dt_B": torch.ones(2), "condition": Condition(0, torch.zeros(2, 1)), "grid": (4, 4)}
        return operator(latent_BLD, boundary=("wall", "wall"), steady=steady, **told)

    latent_BLD = torch.randn(2, 16, 4)
    with patched():
        operator = make()
    assert torch.equal(step(operator, steady=False), latent_BLD), "untrained it is persistence"
    assert vars(operator)["adds_input"] is (patched is with_input_added)
    assert (type(operator.into) is torch.nn.Linear) is (patched is with_input_added)
    assert type(make().into) is torch.nn.Linear
    assert not make().adds_input
    if patched is full_resolution_lift:
        with torch.no_grad():
            for weight in operator.parameters():
                weight.normal_()
        changed = step(operator, steady=False) - latent_BLD
        assert changed.abs().min() > 0
