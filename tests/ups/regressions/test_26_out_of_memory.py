"""Memory that ends on a CPU is no bug to be reported: the batch that takes it is named."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import run_ups
from field_runs import FIELDS, field_run, prepared_fields, train
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["field_run", "prepared_fields"]
# As PyTorch says it, under `ulimit -v`.
SAYS = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1073741824 bytes. Error code 12 (Cannot allocate memory)"
)

pytestmark = pytest.mark.usefixtures("field_run")


@pytest.mark.parametrize("error", [RuntimeError(SAYS), MemoryError()])
def test_memory_that_ends_names_the_batch_size(error: Exception) -> None:
    def fail(*told: Any) -> None:
        raise error

    told = register_optimizer_step_pre_hook(fail)
    try:
        done = train("stages.operator.epochs=1")
        planned = run_ups("dry-run", *FIELDS, "--measured-steps", "1")
    finally:
        told.remove()
    assert done.exit_code == 1
    assert "stage operator ran out of memory with training.batch_size = 4" in done.stderr
    assert "smaller training.batch_size" in done.stderr
    assert "unexpected" not in done.output + planned.output
    assert planned.exit_code != 0
    assert "doesn't fit into the memory" in planned.output


def test_other_errors_of_pytorch_stay_what_they_are() -> None:
    def fail(*told: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    told = register_optimizer_step_pre_hook(fail)
    try:
        done = train("stages.operator.epochs=1")
    finally:
        told.remove()
    assert "in fail: RuntimeError: mat1 and mat2" in done.stderr
