"""A stage that patience ends says so, and what a stage held is given back before the next one."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
from command_line import run_ups
from field_runs import FIELDS, field_run, prepared_fields, train
from operator_runs import build_here
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["field_run", "prepared_fields"]

pytestmark = pytest.mark.usefixtures("field_run")


def test_patience_that_ends_a_stage_is_said() -> None:
    # What can't be better from the second epoch on: steps that change nothing.
    words = ("stages.operator.epochs=9", "training.patience=1", "training.lr=1e-30")
    for _ in range(2):  # also by a command that finds it over
        done = train(*words)
        assert done.exit_code == 0, done.output
        assert "ended by patience after step 4 of 18" in done.stderr
    assert "operator: finished by patience, step 4 of 18" in run_ups("status", "checkpoints").stdout
    status = json.loads(run_ups("status", "checkpoints", "--json").stdout)
    assert status["stages"][0]["ended_by"] == "patience"


def test_objects_of_a_stage_are_gone_when_the_next_one_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.pipeline.training.run_process", build_here)
    optimizers, alive = list[weakref.ref[Any]](), set[int]()

    def look(optimizer: Any, *told: Any) -> None:
        if not any(known() is optimizer for known in optimizers):
            optimizers.append(weakref.ref(optimizer))
        alive.add(sum(known() is not None for known in optimizers))

    told = register_optimizer_step_post_hook(look)
    words = [word for word in FIELDS if "autoencoder" not in word and "state" not in word]
    keys = ("autoencoder.epochs=1", "autoencoder.steps_per_epoch=2", "operator.epochs=1")
    short = [f"stages.{key}" for key in keys]
    gc.disable()  # or it may happen by itself
    try:
        done = run_ups("train", *words, *short)
    finally:
        gc.enable()
        told.remove()
    assert done.exit_code == 0, done.output
    assert (len(optimizers), alive) == (2, {1})
