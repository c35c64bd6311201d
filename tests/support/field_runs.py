"""Runs of an operator on fields, by the command line: no encoder is trained; stopped after a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import Done, run_ups
from operator_runs import made_once, own_copy, prepare_fields
from torch.optim.optimizer import register_optimizer_step_post_hook

FIELDS = (
    *("--config", "run.yaml", "operator.state=fields", "training.field_source=store"),
    *("operator.size=tiny", "operator.width=8", "operator.depths=[1]"),
    *("training.batch_size=4", "stages.autoencoder.epochs=0", "stages.operator.steps_per_epoch=2"),
)


@pytest.fixture(scope="module")
def prepared_fields(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of the fields of Burgers' equation and a configuration, which no test changes."""
    return made_once(tmp_path_factory, prepare_fields)


@pytest.fixture
def field_run(prepared_fields: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the working directory."""
    return own_copy(prepared_fields, tmp_path, monkeypatch)


def train(*words: str, stage: str = "operator") -> Done:
    """`ups train` of one stage."""
    return run_ups("train", *FIELDS, "--stage", stage, *words)


def train_rank(folder: Path, *words: str) -> int:
    """`ups train` in a folder, for `rank_processes.start`; its exit code."""
    os.chdir(folder)
    done = run_ups("train", "--config", "run.yaml", *words)
    Path(f"rank{os.environ['RANK']}.txt").write_text(done.output)
    return done.exit_code


@contextmanager
def stopping_after(steps: int) -> Iterator[None]:
    """Inside, this process gets a SIGTERM with its step of a number."""
    count = 0

    def stop(*told: Any) -> None:
        nonlocal count
        count += 1
        if count == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    handle = register_optimizer_step_post_hook(stop)
    try:
        yield
    finally:
        handle.remove()
