"""A budget of operations is what the steps of a stage take, of whatever kinds they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run_ups
from field_runs import FIELDS, field_run, prepared_fields

__all__ = ["field_run", "prepared_fields"]
SHRINKING = (
    "training.query_sampling.num_queries=2",
    "training.query_sampling.curriculum.enabled=true",
    "training.query_sampling.curriculum.start_queries=32",
)
RESIDUAL = "training.physics_priors.residual=0.1"
GROWING = ("training.horizon=3", "operator.curriculum=0.8")


@pytest.mark.usefixtures("field_run")
@pytest.mark.parametrize(
    ("stage", "flops", "words"),
    [
        ("operator", 6e6, ()),
        ("operator", 6e6, (RESIDUAL, "training.physics_priors.every=8")),
        ("operator", 6e6, (RESIDUAL, "training.physics_priors.warmup_steps=20")),
        ("operator", 3e7, (RESIDUAL, "training.physics_priors.every=3", "training.accum_steps=2", *GROWING)),
        ("autoencoder", 6e7, SHRINKING),
        pytest.param(
            *("autoencoder", 6e7, (*SHRINKING, "training.query_sampling.curriculum.share=1.0")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_take_as_many_operations_as_the_budget_has(
    stage: str, flops: float, words: tuple[str, ...]
) -> None:
    keys = ("epochs=1", "steps_per_epoch=1000", f"budget.flops={flops}")
    length = [f"stages.{stage}.{key}" for key in keys]
    own = FIELDS if stage == "operator" else ("--config", "run.yaml", "training.batch_size=4")
    done = run_ups("train", *own, "--stage", stage, *words, *length, "training.log_every=1000")
    assert done.exit_code == 0, done.output
    records = map(json.loads, Path(f"checkpoints/{stage}.jsonl").read_text().splitlines())
    epoch = [record for record in records if record["event"] == "epoch"][-1]
    steps, taken = epoch["step"], epoch["training/flops"]
    assert steps > 20, steps
    assert taken / flops == pytest.approx(1 - 0.5 / steps, abs=1.5 / steps)
