"""Data sets of a question: made once with `ups make-data`'s solvers, and built into stores."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.models.questions import TEST, TRAIN, VAL, Question, hash_of
from ups.config import RunConfig, load_config
from ups.data.solvers import make_datasets
from ups.output import write_atomically
from ups_store.build import QuietWatcher, build_all

Note = Callable[[str], None]  # takes one sentence

DONE = "done"

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


def make_data(question: Question, name: str, folder: Path, *, note: Note) -> Path:
    """Make one data set unless it is there, and return the folder of its files.

    Train, val and test share a folder, as one build takes them; a shifted set has a folder of its own, and is
    its test split.
    """
    split = name if name in (TRAIN, VAL) else TEST
    home = folder / ("data" if name in (TRAIN, VAL, TEST) else f"data-{_slug(name)}")
    done = home / f"{DONE}-{split}-{question.key(name)}"
    if not done.exists():
        note(f"{question.name}: makes {name}")
        for old in home.glob(f"{DONE}-{split}-*"):
            old.unlink()
        make_datasets(
            question.task,
            home,
            settings=question.sets[name],
            num_samples=question.samples_of(name),
            seed=question.seed_of(name),
            split=split,
            overwrite=True,
        )
        write_atomically(done, b"")
    return home


def make_all_data(question: Question, folder: Path, *, note: Note) -> Path:
    """Make every data set and the stores of training, and return the file of the run's configuration."""
    homes = {name: make_data(question, name, folder, note=note) for name in question.sets}
    path = folder / "run.yaml"
    write_atomically(path, yaml.safe_dump(run_values(question, homes[TRAIN]), sort_keys=False).encode())
    build_all(load_config(path).build, watcher=QuietWatcher())
    return path


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


def training_identity(question: Question) -> str:
    """Hash of what decides a training's result, as far as it is said here: data, sizes, rates, budget."""
    keys = [question.key(name) for name in question.sets]
    return hash_of([keys, list(question.overrides), run_values(question, Path("data"))])


def shifted(config: RunConfig, question: Question, name: str, folder: Path) -> RunConfig:
    """The run's configuration with another test set in place of its data."""
    home = folder / f"data-{_slug(name)}"
    data = config.data.model_copy(update={"root": home})
    cache = config.cache.model_copy(update={"dir": home / "cache"})
    return config.model_copy(update={"data": data, "cache": cache})


def remove_training(folder: Path) -> None:
    """Remove what a training left besides its scores."""
    shutil.rmtree(folder, ignore_errors=True)


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "." else "-" for letter in name)
