"""Compiled methods: one step at a time, a task at a time; the limit of recompilations is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from test_simulator import make_simulator
from torch import Tensor, nn

from ups.device import with_compiled
from ups.train.operator import OperatorStage
from ups.trained.simulator import Simulator

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # of the compiler's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # torch hides it, unless an error
]


@dataclass
class Counting:
    """A backend that compiles nothing, and counts what it is given."""

    graphs: list[int] = field(default_factory=list)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(len(graph.graph.nodes))
        return graph.forward


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def given_of(simulator: Simulator, task: str) -> tuple[Tensor, Tensor, Tensor]:
    """State, parameters and time step of two samples."""
    num_tokens = torch.Size(simulator.spec.tasks[task].tokens).numel()
    state = torch.randn(2, num_tokens, simulator.spec.state_dim, requires_grad=True)  # as later states are
    return state, torch.tensor([[1.0, 0.02]] * 2), torch.full((2,), 0.1)


def test_no_horizon_and_no_task_makes_a_step_compile_again() -> None:
    simulator = make_simulator("fields").train()
    counters = {name: Counting() for name in OperatorStage.compiled}
    forward = simulator
    for name, counting in counters.items():
        forward = with_compiled(forward, [name], backend=counting)
    for task in ("burgers1d", "darcy2d"):
        state, parameters, dt_B = given_of(simulator, task)
        for steps in range(1, 13):
            found = forward(state, parameters, task=task, dt_B=dt_B, steps=steps)
            expected = simulator(state, parameters, task=task, dt_B=dt_B, steps=steps)
            torch.testing.assert_close(found, expected)
        found.square().mean().backward()
    assert {name: len(counting.graphs) for name, counting in counters.items()} == dict.fromkeys(counters, 2)


def test_operators_of_many_tasks_stay_compiled() -> None:
    """More kinds of calls than Dynamo compiles of one code object."""

    class Scaled(nn.Module):
        def scale(self, x: Tensor, *, task: str) -> Tensor:
            return x * len(task)

    counting = Counting()
    compiled = with_compiled(Scaled(), ["scale"], backend=counting)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            for num in range(1, 7):
                assert torch.equal(compiled.scale(torch.ones(2), task="t" * num), torch.full((2,), num))
    assert len(counting.graphs) == 6


def test_limit_of_recompilations_is_told_once_and_the_rest_runs_uncompiled(notes: list[str]) -> None:
    class Repeated(nn.Module):
        def forward(self, x: Tensor, times: int) -> Tensor:
            return sum([x] * times)

    counting = Counting()
    compiled = with_compiled(Repeated(), ["forward"], backend=counting, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            for times in range(1, 6):
                assert torch.equal(compiled(torch.ones(2), times), torch.full((2,), float(times)))
    assert len(counting.graphs) == 2
    assert len(notes) == 1
    assert "torch.compile reached its limit of forms of" in notes[0]
    assert "Repeated.forward" in notes[0]


def test_model_with_compiled_methods_shares_weights_and_leaves_the_plain_one_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    counting = Counting()
    compiled = with_compiled(model, ["forward"], backend=counting)
    model(torch.ones(1, 2))
    assert counting.graphs == []
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(compiled(torch.ones(1, 2))[0], model[0].bias)
    assert len(counting.graphs) == 1
