"""What changes while a stage trains goes by the length that the stage has, whichever key says that."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_line import run_ups
from field_runs import field_run, prepared_fields

__all__ = ["field_run", "prepared_fields"]
SMALL = ("--config", "run.yaml", "training.batch_size=4", "training.log_every=1")
SHRINKING = (
    "training.query_sampling.num_queries=2",
    "training.query_sampling.curriculum.enabled=true",
    "training.query_sampling.curriculum.start_queries=32",
)

pytestmark = pytest.mark.usefixtures("field_run")


def steps_of(stage: str, *words: str) -> list[dict[str, Any]]:
    """Train a stage, and what its log says after each step."""
    done = run_ups("train", *SMALL, "--stage", stage, *words)
    assert done.exit_code == 0, done.output
    lines = Path(f"checkpoints/{stage}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "step"]


@pytest.mark.parametrize("length", ["steps=8", "budget.samples=32"])
def test_query_curriculum_ends_within_the_steps_of_the_stage(length: str) -> None:
    records = steps_of("autoencoder", *SHRINKING, f"stages.autoencoder.{length}")
    totals = [0.0, *(record["training/flops"] for record in records)]
    flops = [after - before for before, after in pairwise(totals)]
    assert len(flops) == 8
    assert flops[0] > flops[1] > flops[2] > flops[3] > flops[4]
    assert flops[4] == flops[5] == flops[6] == flops[7]  # the second half


def test_inverse_losses_grow_within_the_steps_of_the_stage() -> None:
    words = ("training.use_inverse_losses=true", "training.inverse_loss_warmup_epochs=1")
    small = ("operator.size=tiny", "operator.width=8", "operator.depths=[1]")
    records = steps_of("joint", *words, *small, "stages.joint.epochs=4", "stages.joint.steps=8")
    weighted = [record["step"] for record in records if "loss/decoder_inverse" in record]
    assert weighted == [4, 5, 6, 7, 8]  # an epoch has 2 steps; without weight for one, from 0 in the next
