"""One training: a model, a question, a seed; by the package's own trainer, scored on every test set."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.models.data import Note, remove_training, shifted, training_identity
from benchmarks.models.questions import TEST, Question
from ups.config import RunConfig, load_config
from ups.data.splits import open_trajectories
from ups.errors import ShapeError
from ups.eval.baseline_model import load_baseline
from ups.eval.forecasters import Forecaster, OperatorForecaster, Persistence, shown_size
from ups.eval.rollout import roll_out
from ups.output import write_atomically
from ups.train.budget import with_steps
from ups.train.run import run_stage
from ups.trained.simulator import load_simulator

MODELS = ("operator", "fno", "unet")
PERSISTENCE = "persistence"


def score_path(question: Question, model: str, seed: int, folder: Path, *, variant: str = "") -> Path:
    """Where the scores of a training are."""
    return folder / "scores" / f"{_named(question.name, variant, model, str(seed))}.json"


def known_scores(
    question: Question, model: str, seed: int, folder: Path, *, variant: str = ""
) -> dict[str, Any] | None:
    """The scores of a training that was done as the question now says; None if there is none."""
    path = score_path(question, model, seed, folder, variant=variant)
    if not path.exists():
        return None
    scores: dict[str, Any] = json.loads(path.read_text())
    return scores if scores["identity"] == training_identity(question) else None


def train_and_score(
    question: Question,
    model: str,
    seed: int,
    *,
    config_path: Path,
    folder: Path,
    note: Note,
    variant: str = "",
    stages: Sequence[str] = (),
    steps: Callable[[str, RunConfig], int] | None = None,
    patched: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """Train from where it was left, or from the start, and write its scores in one step.

    Args:
        question: What is asked.
        model: "operator", "fno" or "unet"; "persistence" has nothing to train.
        seed: Of weights, order of data and augmentation.
        config_path: Of the question's runs.
        folder: Of the benchmark.
        note: Called with what is being done.
        variant: Name of what is otherwise than in the benchmark.
        stages: What is trained, one after the other; by default the stage that is called as the model.
        steps: Optimiser steps of a stage, asked for once the stages before it are trained; by default what
            the budget allows.
        patched: Changes the model itself, where no key does.
    """
    home = folder / question.name
    checkpoints = home / _named(variant, model, str(seed), training_identity(question))
    paths = [f"checkpoint.dir={json.dumps(str(checkpoints))}"]
    config = load_config(config_path, overrides=[*question.overrides, f"seed={seed}", *paths])
    began, trained = time.perf_counter(), []
    for stage in () if model == PERSISTENCE else stages or (model,):
        own = config if steps is None else with_steps(config, stage, steps(stage, config))
        with patched():
            trained.append(run_stage(stage, own))
    with patched():
        forecaster, size = _load(model, checkpoints)
    scores = {
        "identity": training_identity(question),
        "question": question.name,
        "model": model,
        "seed": seed,
        "size": size,
        "steps": trained[-1]["steps"] if trained else None,
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(sum(report["cpu_seconds"] for report in trained), 1),
        "sets": dict(_scores_of_sets(forecaster, question, config, home)),
    }
    path = score_path(question, model, seed, folder, variant=variant)
    write_atomically(path, json.dumps(scores, indent=1, allow_nan=False).encode())
    remove_training(checkpoints)
    return scores


def _load(model: str, checkpoints: Path) -> tuple[Forecaster, str]:
    """What predicts, and its size for people."""
    if model == PERSISTENCE:
        return Persistence(), ""
    if model == "operator":
        simulator = load_simulator(checkpoints / "operator.safetensors")
        return OperatorForecaster(simulator, resample=True), shown_size(simulator.operator)
    baseline = load_baseline(checkpoints / f"{model}.safetensors")
    return baseline, shown_size(baseline.network)


def _scores_of_sets(
    forecaster: Forecaster, question: Question, config: RunConfig, home: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """nRMSE of every trajectory by set, or why a model refuses the set."""
    for name in (TEST, *question.shifts):
        data = config if name == TEST else shifted(config, question, name, home)
        source = "store" if name == TEST else "hdf5"
        trajectories = open_trajectories(data.build, question.task, TEST, source=source)
        if trajectories.info.steady and isinstance(forecaster, Persistence):
            continue
        try:
            errors = roll_out(forecaster, trajectories).errors
        except ShapeError as error:  # another grid than the model can take
            yield name, {"refused": str(error)}
            continue
        yield (
            name,
            {
                "nrmse": _values(errors.nrmse.flatten(1).mean(1)),
                "first_step": _values(errors.nrmse[:, 0].flatten(1).mean(1)),
            },
        )


def _values(by_trajectory: Tensor) -> list[float | None]:
    """As JSON knows them: None for what blew up."""
    return [value if math.isfinite(value) else None for value in by_trajectory.tolist()]


def _named(*parts: str) -> str:
    return "-".join(part for part in parts if part)
