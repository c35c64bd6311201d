"""The checks find what training refuses of optimisers and switches, and take what it takes."""

from __future__ import annotations

from typing import get_args

import pytest
from command_line import run_ups
from field_runs import FIELDS, field_run, prepared_fields, train

from ups.config import OptimizerConfig

__all__ = ["field_run", "prepared_fields"]
OFFLOAD, NAME = "training.cpu_offload_optimizer=true", "stages.operator.optimizer.name"

pytestmark = pytest.mark.usefixtures("field_run")


@pytest.mark.parametrize("name", get_args(OptimizerConfig.model_fields["name"].annotation))
def test_optimiser_that_trains_passes_the_checks(name: str) -> None:
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    words = (f"{NAME}={name}", "stages.operator.epochs=1")
    done = run_ups("validate", "config", *FIELDS, *words)
    assert done.exit_code == 0, done.output
    done = run_ups("dry-run", *FIELDS, *words, "--measured-steps", "1")
    assert (done.exit_code, "unexpected" in done.output) == (0, False), done.output


@pytest.mark.parametrize(
    "words",
    [
        (OFFLOAD,),  # there is no GPU
        (OFFLOAD, f"{NAME}=muon_hybrid"),
        (OFFLOAD, "training.grad_clip=1.0"),
        (OFFLOAD, "training.amp=true", "training.amp_dtype=float16"),
        (f"{NAME}=adamw8bit", "training.parallel=fsdp2", "training.num_gpus=2"),
    ],
)
def test_switches_that_training_refuses_are_found_by_the_checks(words: tuple[str, ...]) -> None:
    pytest.importorskip("torchao")
    words = (*words, "training.device=cpu")
    assert train(*words).exit_code == 2
    for command in (("validate", "config"), ("dry-run",)):
        done = run_ups(*command, *FIELDS, *words)
        assert done.exit_code == 2, done.output
        assert ("cpu_offload_optimizer" if OFFLOAD in words else "adamw8bit") in done.output


def test_warm_up_longer_than_the_epochs_of_a_stage_is_found() -> None:
    words = ("stages.operator.epochs=3", "stages.operator.scheduler.warmup_steps=1000")
    done = run_ups("validate", "config", *FIELDS, *words)
    assert "warmup_steps = 1000 of 6 steps" in " ".join(done.output.split())
