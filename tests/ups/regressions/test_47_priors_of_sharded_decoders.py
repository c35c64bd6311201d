"""Physics priors of a decoder that is trained, sharded and computed in bfloat16."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from field_runs import field_run, prepared_fields, train_rank
from rank_processes import rank_variables, start, wait

__all__ = ["field_run", "prepared_fields"]
WORDS = (
    *(
        "--stage",
        "joint",
        "training.use_inverse_losses=true",
        "stages.joint.epochs=1",
        "stages.joint.steps=2",
    ),
    *("training.parallel=fsdp2", "training.physics_priors.residual=0.1", "training.log_every=1"),
    *("operator.size=tiny", "operator.width=8", "operator.depths=[1]"),
)


@pytest.mark.multi_process
@pytest.mark.parametrize("amp", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_joint_training_on_ranks_takes_physics_priors(field_run: Path, amp: str) -> None:
    words = (*WORDS, f"training.amp={amp}", f"checkpoint.dir=checkpoints/{amp}")
    ranks = [start(train_rank, field_run, *words, **variables) for variables in rank_variables(2)]
    assert wait(ranks) == [0, 0], Path("rank0.txt").read_text()
    lines = Path(f"checkpoints/{amp}/joint.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["event"] == "step"]
    assert [math.isfinite(step["loss/physics/residual"]) for step in steps] == [True, True]
