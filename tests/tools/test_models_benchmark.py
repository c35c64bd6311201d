"""`make bench-models`, its budgets and ablations: trainings are kept, and tables say who is ahead."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.models import ablations, budgets, run, table, training
from benchmarks.models.ablations import ABLATIONS, QUESTIONS
from benchmarks.models.budgets import LIMITS
from benchmarks.models.questions import BURGERS, FULL, SMALL, TEST, TRAIN, Question
from benchmarks.models.training import make_data, run_values
from ups.config import load_config
from ups.data.solvers import SOLVERS

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
        "operator.width=16",
        *(f"stages.{name}.epochs=1" for name in ("operator", "fno", "unet")),
    ),
)


def scores(model: str, seed: int, *, level: float, question: Question = TINY) -> dict[str, Any]:
    """Scores around a level; trajectories are as hard for all models."""
    rng, hard = np.random.default_rng([seed, 1]), np.random.default_rng(7).uniform(0.5, 2, 24)
    values = {
        name: (level * hard * rng.uniform(0.95, 1.05, 24)).tolist() for name in (TEST, *question.shifts)
    }
    sets = {name: {"nrmse": nrmse, "first_step": nrmse} for name, nrmse in values.items()}
    return {"model": model, "seed": seed, "sets": sets, "steps": 10, "cpu_seconds": 1.0, "size": "1 k"}


def all_scores(**levels: float) -> dict[str, dict[int, Any]]:
    by_model = {name: {s: scores(name, s, level=level) for s in range(3)} for name, level in levels.items()}
    return {**by_model, "persistence": {0: scores("persistence", 0, level=1.0)}}


# --- table --------------------------------------------------------------------------------------------


def test_row_says_that_the_operator_is_ahead_and_by_what_ratio() -> None:
    row = next(table.rows_of(TINY, all_scores(operator=0.05, fno=0.1, unet=0.0501)))
    assert row.paired["fno"].verdict == "ahead"
    assert row.paired["fno"].ratio.low < 0.5 < row.paired["fno"].ratio.high
    assert row.paired["unet"].verdict == "can't be told"
    assert row.nrmse["persistence"].mean > row.nrmse["fno"].mean
    assert (row.set, row.num_trajectories, list(row.seeds)) == (TEST, 24, [0, 1, 2])


def test_refused_set_is_no_row_of_a_comparison_and_a_prediction_that_blew_up_is_behind() -> None:
    by_model = all_scores(operator=0.1, fno=0.05, unet=0.2)
    for by_seed in by_model["operator"].values():
        by_seed["sets"]["half the points"] = {"refused": "another grid"}
    rows = list(table.rows_of(TINY, by_model))
    last = rows[-1]
    assert (last.set, last.paired, last.refused) == ("half the points", {}, {"operator": "another grid"})
    totals = table.summary(rows)["fno"]
    assert (totals["rows"], totals["behind"], totals["ahead"]) == (2, 2, 0)
    text = table.markdown([TINY], rows, {TINY.name: by_model})
    assert "| half the points | 24 | refused |" in text
    assert "ahead on 0, behind on 2" in text
    by_model["operator"][1]["sets"][TEST]["nrmse"][3] = None
    row = next(table.rows_of(TINY, by_model))
    assert row.nrmse["operator"].mean == np.inf
    assert row.paired["unet"].verdict == "behind"


def test_table_of_budgets_has_a_row_for_each_limit_and_says_who_is_ahead() -> None:
    rows, by_limit = {}, {}
    for limit, level in zip(LIMITS, (0.05, 0.2), strict=True):
        by_limit[TINY.name, limit] = all_scores(operator=level, fno=0.1)
        rows[limit] = list(table.rows_of(TINY, by_limit[TINY.name, limit]))
    text = budgets.markdown(rows, by_limit)
    first, second = (line for line in text.splitlines() if line.startswith("| burgers"))
    assert "| equal samples | 10, 1 |" in first
    assert "**ahead**" in first
    assert "equal processor time" in second
    assert "| behind |" in second
    assert "- Equal samples, the operator beside FNO, 3 rows: ahead on 3, behind on 0; on 0 it can't" in text
    assert "beside U-Net" not in text


def test_ablation_is_compared_with_what_it_names_and_not_with_the_base() -> None:
    levels = {"base": 0.01, "linear-2x": 0.1, "latent-noise-0": 0.05}
    question = QUESTIONS["burgers"]
    by_name = {
        name: [scores(name, seed, level=level, question=question) for seed in range(3)]
        for name, level in levels.items()
    }
    text = ablations.markdown({"burgers": by_name})
    (row,) = (line for line in text.split("\n### ")[0].splitlines() if "noise 0 |" in line)
    assert "| linear latents, 2x |" in row
    assert "**ahead**" in row
    assert "residual" not in text, "it isn't trained"


# --- questions ----------------------------------------------------------------------------------------


def test_every_set_of_every_question_can_be_made_and_has_an_interval() -> None:
    for questions in (SMALL, FULL):
        assert len({question.name for question in questions}) == len(questions)
    for question in (*SMALL, *FULL):
        for settings in question.sets.values():
            several = {name: value for name, value in settings.items() if isinstance(value, tuple)}
            for number in range(max(map(len, several.values()), default=1)):
                one = {name: value[number] for name, value in several.items()}
                SOLVERS[question.task](**{**settings, **one})
        assert question.samples_of(TEST) >= 10
        assert all(question.samples_of(name) >= 20 for name in question.shifts), "fewer have no interval"
        assert {question.seed_of(name) for name in question.shifts} <= {question.seed_of(TEST)}
        assert question.seed_of(TRAIN) != question.seed_of(TEST)


def test_ablations_change_the_configuration_of_their_tasks(tmp_path: Path) -> None:
    for question in QUESTIONS.values():
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(run_values(question, tmp_path)))
        for name, ablation in ABLATIONS.items():
            if question.name in ablation.questions and name != ablation.against:
                beside = ABLATIONS[ablation.against]
                assert question.name in beside.questions, "nothing to compare with"
                changed, against = (
                    load_config(path, overrides=each.of(question).overrides) for each in (ablation, beside)
                )
                assert changed != against or ablation.model != beside.model, name
    for factor, tokens, dim in ((2, 32, 2), (4, 32, 1), (8, 16, 1)):
        overrides = ABLATIONS[f"linear-{factor}x"].of(QUESTIONS["burgers"]).overrides
        assert {f"latent.tokens={tokens}", f"latent.dim={dim}"} <= set(overrides)
        assert tokens * dim * factor == QUESTIONS["burgers"].settings["points"]


# --- trainings ----------------------------------------------------------------------------------------


def test_data_are_made_again_when_their_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(training, "note", told.append)
    monkeypatch.setattr(training, "build_all", lambda build, watcher: None)
    for question in (TINY, TINY, dataclasses.replace(TINY, num_samples=5)):
        make_data(question, tmp_path)
    assert [text for text in told if text.endswith("makes train")] == ["burgers: makes train"] * 2
    assert told.count("burgers: makes half the points") == 1


@pytest.mark.slow
def test_run_trains_what_is_missing_and_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets and ablations, too: samples of FNO or its time, and a share of the base's time."""
    trainings = [(model, 0) for model in training.MODELS]
    by_model = run.run_questions([TINY], trainings, folder=tmp_path)[TINY.name]
    assert set(by_model) == {*training.MODELS, "persistence"}
    assert all(len(by_model["fno"][0]["sets"][name]["nrmse"]) == 20 for name in (TEST, *TINY.shifts))
    steps = by_model["fno"][0]["steps"]
    assert by_model["operator"][0]["steps"] > 1

    by_limit = budgets.scores_by_limit(TINY, ["operator"], [0], tmp_path)
    (kept,) = (tmp_path / "ratios").iterdir()
    assert by_limit["samples"]["operator"][0]["steps"] == steps
    assert by_limit["seconds"]["operator"][0]["steps"] == round(steps / json.loads(kept.read_text()))
    assert by_limit["seconds"]["fno"] == by_limit["samples"]["fno"]

    for name in ("base", "layer-norm"):
        ablations.train(name, TINY, 0, tmp_path)
    changed = ABLATIONS["layer-norm"].of(TINY)
    assert training.known_scores(changed, "operator", 0, tmp_path, variant="layer-norm")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(training, "run_stage", refuse)
    again = run.run_questions([TINY], trainings, folder=tmp_path)[TINY.name]
    assert json.dumps(again, sort_keys=True) == json.dumps(by_model, sort_keys=True)
    assert budgets.scores_by_limit(TINY, ["operator"], [0], tmp_path) == by_limit
    ablations.train("layer-norm", TINY, 0, tmp_path)
    with pytest.raises(AssertionError, match="trained again"):
        run.run_questions([dataclasses.replace(TINY, flops=2e8)], trainings, folder=tmp_path)
