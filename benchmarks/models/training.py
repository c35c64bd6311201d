"""One training of a question: data, configuration, the package's own trainer, scores on every test set.

Whatever is made is kept: data sets by the settings that made them, scores by all that decides them.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.harness.commands import note
from benchmarks.models.questions import TEST, TRAIN, VAL, Question, hash_of
from ups.config import RunConfig, load_config
from ups.data.solvers import make_datasets
from ups.data.windows import open_trajectories
from ups.errors import ShapeError
from ups.eval.baseline_model import load_baseline
from ups.eval.forecasters import Forecaster, OperatorForecaster, Persistence, roll_out, shown_size
from ups.output import write_atomically
from ups.train.budget import ratio_of, step_seconds, with_steps, without_preparing
from ups.train.run import run_stage
from ups.train.stage import make_stage
from ups.trained.simulator import load_simulator
from ups_store.build import Watcher, build_all

MODELS = ("operator", "fno", "unet")
PERSISTENCE = "persistence"
CPU = torch.device("cpu")

# Of the operator on any grid; sizes of the baselines, and all learning rates, by the number of axes.
OPERATOR = {"depths": [4], "hidden_dim": 32}
BASELINES = {
    1: {"fno": {"width": 24, "modes": 24}, "unet": {"width": 24, "levels": 3}, "noise": 0.003},
    2: {"fno": {"width": 16, "modes": 16}, "unet": {"width": 8, "levels": 3}, "noise": 0.003},
}
LEARNING_RATES = {
    1: {"operator": 4e-3, "fno": 4e-3, "unet": 1e-3},
    2: {"operator": 4e-3, "fno": 1e-2, "unet": 2e-3},
}

Scores = dict[str, Any]


# --- data and configuration ---


def make_data(question: Question, folder: Path) -> Path:
    """Make the data sets that aren't there, and the stores of training; return the run's configuration."""
    for name, settings in question.sets.items():
        split, data = name if name in (TRAIN, VAL) else TEST, _data_folder(name, folder)
        done = data / f"done-{split}-{question.key(name)}"
        if done.exists():
            continue
        note(f"{question.name}: makes {name}")
        for old in data.glob(f"done-{split}-*"):
            old.unlink()
        make_datasets(
            question.task,
            data,
            settings=settings,
            num_samples=question.samples_of(name),
            seed=question.seed_of(name),
            split=split,
            overwrite=True,
        )
        write_atomically(done, b"")
    path = folder / "run.yaml"
    values = run_values(question, _data_folder(TRAIN, folder))
    write_atomically(path, yaml.safe_dump(values, sort_keys=False).encode())
    build_all(load_config(path).build, watcher=Watcher())
    return path


def _data_folder(name: str, folder: Path) -> Path:
    """Train, val and test share a folder, as one build takes them; a shifted set has one, as its test."""
    if name in (TRAIN, VAL, TEST):
        return folder / "data"
    return folder / f"data-{''.join(c if c.isalnum() or c == '.' else '-' for c in name)}"


def run_values(question: Question, data: Path) -> dict[str, Any]:
    """The configuration of a question's runs, but for the model and its seed.

    All models have the same batches, losses, augmentation, averaging, validation and budget of counted
    operations; learning rates and sizes were searched for on validation (docs/results/log.md).
    """
    num_spatial = 1 if question.task.endswith("1d") else 2
    training = {"batch_size": 32 if num_spatial == 1 else 16, "grad_clip": 1.0, "ema_decay": 0.99}
    stage = {
        "epochs": 10,
        "budget": {"flops": question.flops},
        "scheduler": {"name": "cosine", "warmup_steps": 40},
    }
    rates = LEARNING_RATES[num_spatial]
    return {
        "data": {"tasks": question.task, "root": str(data), "split": [TRAIN, VAL, TEST]},
        "cache": {"dir": str(data.with_name("cache"))},
        "encoder": {"patch_size": question.patch},
        "operator": {
            "state": "fields",
            "size": "tiny",
            "pdet": OPERATOR,
            "noise": 0.01,
            "val_trajectories": 24,
        },
        "baselines": BASELINES[num_spatial],
        "training": {**training, "horizon": 1},
        "stages": {name: {**stage, "optimizer": {"lr": rate}} for name, rate in rates.items()},
    }


def identity_of(question: Question) -> str:
    """Hash of what decides a training's result, as far as it is said here: data, sizes, rates, budget."""
    keys = [question.key(name) for name in question.sets]
    return hash_of([keys, list(question.overrides), run_values(question, Path("data"))])


# --- trainings ---


def known_scores(
    question: Question, model: str, seed: int, folder: Path, *, variant: str = ""
) -> Scores | None:
    """The scores of a training that was done as the question now says; None if there is none."""
    path = _score_path(question, model, seed, folder, variant)
    if not path.exists():
        return None
    scores: Scores = json.loads(path.read_text())
    return scores if scores["identity"] == identity_of(question) else None


def scores_of(
    question: Question,
    model: str,
    seed: int,
    folder: Path,
    *,
    variant: str = "",
    stages: Sequence[str] = (),
    steps: int | Callable[[str, RunConfig], int] | None = None,
) -> Scores:
    """The scores of a training, which is done, or goes on from where it was left, unless they are known.

    Args:
        question: What is asked.
        model: "operator", "fno" or "unet"; "persistence" has nothing to train.
        seed: Of weights, order of data and augmentation.
        folder: Of the benchmark.
        variant: Name of what is otherwise than in the benchmark.
        stages: What is trained, one after the other; by default the stage that is called as the model.
        steps: Optimiser steps, or what gives those of a stage once the stages before it are trained; by
            default what the budget allows.
    """
    known = known_scores(question, model, seed, folder, variant=variant)
    if known is not None and (not isinstance(steps, int) or known["steps"] == steps):
        return known
    note(", ".join(filter(None, [f"{question.name}: {model}", f"seed {seed}", variant])))
    config_path = make_data(question, folder / question.name)
    checkpoints = folder / question.name / _joined(variant, model, str(seed), identity_of(question))
    given = [*question.overrides, f"seed={seed}", f"checkpoint.dir={json.dumps(str(checkpoints))}"]
    config = load_config(config_path, overrides=given)
    began, reports = time.perf_counter(), []
    for stage in () if model == PERSISTENCE else stages or (model,):
        num = steps(stage, config) if callable(steps) else steps
        reports.append(run_stage(stage, config if num is None else with_steps(config, stage, num)))
    forecaster: Forecaster
    if model == PERSISTENCE:
        forecaster, size = Persistence(), ""
    elif model == "operator":
        simulator = load_simulator(checkpoints / "operator.safetensors")
        forecaster, size = OperatorForecaster(simulator, resample=True), shown_size(simulator.operator)
    else:
        forecaster = load_baseline(checkpoints / f"{model}.safetensors")
        size = shown_size(forecaster.network)
    scores = {
        "identity": identity_of(question),
        "question": question.name,
        "model": model,
        "seed": seed,
        "size": size,
        "steps": reports[-1]["steps"] if reports else None,
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(sum(report["cpu_seconds"] for report in reports), 1),
        "sets": _scores_of_sets(forecaster, question, config, folder / question.name),
    }
    path = _score_path(question, model, seed, folder, variant)
    write_atomically(path, json.dumps(scores, indent=1, allow_nan=False).encode())
    shutil.rmtree(checkpoints, ignore_errors=True)
    return scores


def _score_path(question: Question, model: str, seed: int, folder: Path, variant: str) -> Path:
    return folder / "scores" / f"{_joined(question.name, variant, model, str(seed))}.json"


def _joined(*parts: str) -> str:
    return "-".join(part for part in parts if part)


def _scores_of_sets(
    forecaster: Forecaster, question: Question, config: RunConfig, folder: Path
) -> dict[str, Scores]:
    """nRMSE of every trajectory by set, None for what blew up, or why a model refuses the set."""
    scores: dict[str, Scores] = {}
    for name in (TEST, *question.shifts):
        build, source = config.build, "store"
        if name != TEST:
            root = _data_folder(name, folder)
            data = config.data.model_copy(update={"root": root})
            cache = config.cache.model_copy(update={"dir": root / "cache"})
            build, source = config.model_copy(update={"data": data, "cache": cache}).build, "hdf5"
        trajectories = open_trajectories(build, question.task, TEST, source=source)
        if trajectories.info.steady and isinstance(forecaster, Persistence):
            continue
        try:
            nrmse = roll_out(forecaster, trajectories).errors["nrmse"]
        except ShapeError as error:  # another grid than the model can take
            scores[name] = {"refused": str(error)}
            continue
        means = {"nrmse": nrmse.flatten(1).mean(1), "first_step": nrmse[:, 0].flatten(1).mean(1)}
        scores[name] = {
            key: [value if math.isfinite(value) else None for value in by_trajectory.tolist()]
            for key, by_trajectory in means.items()
        }
    return scores


def ratio_of_times(stage: tuple[str, RunConfig], unit: tuple[str, RunConfig], path: Path) -> float:
    """How much longer a step takes than the unit's: the median over steps that are timed in turns.

    It is kept in a file, so that a benchmark that goes on has the steps that it began with.
    """
    if not path.exists():
        with ExitStack() as stack:
            timed = []
            for name, given in (stage, unit):
                config = without_preparing(given)
                made = make_stage(name, config, device=CPU)
                stack.callback(made.close)
                timed.append((made, config))
            ratio = ratio_of(*step_seconds(timed, device=CPU))
        write_atomically(path, json.dumps(ratio).encode())
    kept: float = json.loads(path.read_text())
    return kept
