"""Compiling by blocks: the same gradients, each kind of block once, nothing that is frozen; and its cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_runs import configure, own_copy
from test_activation_checkpointing import CASES, assert_same, gradients_of, losses_of, stage_of
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from ups.config import RunConfig, load_config
from ups.device import compile_cache
from ups.train.stage import Stage, forward_of
from ups.train.trainer import autocast_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # of the compiler's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]
BY_BLOCKS = ["training.compile=true", "training.compile_regions=blocks"]


@pytest.fixture
def run(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch._dynamo.reset()
    return own_copy(prepared, tmp_path, monkeypatch)


@dataclass(eq=False)  # Dynamo looks its backends up
class Counting:
    """Stands in for `torch.compile`: traces and makes no code, and counts the graphs."""

    compile: Callable[..., Any]
    graphs: list[int] = field(default_factory=list)

    def __call__(self, function: Callable[..., Any], *, mode: str) -> Callable[..., Any]:
        return self.compile(function, backend=self.backend)

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(len(graph.graph.nodes))
        return lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting(torch.compile)
    monkeypatch.setattr("torch.compile", counting)
    return counting


def config_of(run: Path, case: str, *overrides: str) -> RunConfig:
    return configure(run, *CASES[case][1], *overrides)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("how", ["none", pytest.param("full", marks=SLOW)])
@pytest.mark.parametrize(
    "case", ["convolution", *(pytest.param(case, marks=SLOW) for case in ("hybrid", "autoencoder", "joint"))]
)
def test_gradients_are_the_same(run: Path, counting: Counting, case: str, how: str) -> None:
    stage = stage_of(run, case)
    names, expected = list(stage.model.state_dict()), gradients_of(stage, losses_of(stage))
    config = config_of(run, case, *BY_BLOCKS, f"training.activation_checkpointing={how}")
    forward = forward_of(stage, config)
    assert_same(gradients_of(stage, losses_of(stage, forward)), expected)
    assert counting.graphs
    assert list(stage.model.state_dict()) == list(forward.state_dict()) == names
    counting.graphs.clear()
    losses_of(stage)
    assert counting.graphs == []  # the plain model stays plain


def test_blocks_of_one_kind_are_compiled_once(run: Path, counting: Counting) -> None:
    stage = stage_of(run, "convolution", "operator.depths=[6]", "operator.drop_path=0")
    config = config_of(run, "convolution", *BY_BLOCKS)
    losses_of(stage, forward_of(stage, config))
    assert len(counting.graphs) <= 2  # one where the tokens need no gradient yet


def test_frozen_blocks_are_not_compiled(run: Path, counting: Counting) -> None:
    stage = stage_of(run, "convolution")
    forward = forward_of(stage, config_of(run, "convolution", *BY_BLOCKS))
    parameters = torch.full((2, len(forward.spec.parameters)), torch.nan)
    with torch.no_grad():
        forward.decode(torch.zeros(2, 8, 2), parameters, task="burgers1d")
    assert counting.graphs == []


def test_stochastic_depth_ends_with_training(run: Path, counting: Counting) -> None:
    stage = stage_of(run, "convolution")
    forward = forward_of(stage, config_of(run, "convolution", *BY_BLOCKS))
    stage.model.eval()
    torch.testing.assert_close(losses_of(stage, forward), losses_of(stage), rtol=1e-6, atol=1e-7)


def test_model_without_blocks_is_compiled_as_a_whole(run: Path, counting: Counting, notes: list[str]) -> None:
    stage = stage_of(run, "fno")
    forward = forward_of(stage, config_of(run, "fno", *BY_BLOCKS))
    assert notes == ["the model of stage fno has no blocks: its step is compiled as a whole"]
    assert "advance" in vars(forward)


def test_compiler_that_fails_is_said_once_for_all_blocks(
    run: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def broken(function: Callable[..., Any], *, mode: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise TorchDynamoException("no C++ compiler")

        return call

    monkeypatch.setattr("torch.compile", broken)
    stage = stage_of(run, "convolution")
    expected = gradients_of(stage, losses_of(stage))
    forward = forward_of(stage, config_of(run, "convolution", *BY_BLOCKS))
    assert_same(gradients_of(stage, losses_of(stage, forward)), expected)
    failures = [note for note in notes if note.startswith("torch.compile")]
    assert failures == ["torch.compile failed, going on without: TorchDynamoException: no C++ compiler"]


# --- a stage's own settings ----------------------------------------------------------------------------


def of_stages(*overrides: str) -> RunConfig:
    return load_config(overrides=["data.tasks=[burgers1d]", *overrides])


def test_stage_says_itself_whether_it_is_compiled_and_what_it_is_computed_in() -> None:
    config = of_stages(
        *("training.compile=true", "training.amp=true", "training.amp_dtype=float16"),
        *("stages.joint.compile=false", "stages.joint.amp_dtype=bfloat16", "stages.operator.amp=false"),
        "stages.operator.compile_mode=max-autotune",
    )
    names = ("autoencoder", "joint", "operator", "fno")
    assert [config.stage(name).compile for name in names] == [True, False, True, True]
    assert [config.stage(name).compile_mode for name in names] == [*["default"] * 2, *["max-autotune"] * 2]
    found = [autocast_of(config, name, torch.device("cpu"))() for name in names]
    assert [context._enabled for context in found] == [True, True, False, False]
    dtypes = {name: context.fast_dtype for name, context in zip(names, found, strict=True)}
    assert dtypes["autoencoder"] == torch.float16
    assert dtypes["joint"] == torch.bfloat16


def test_stage_that_is_not_compiled_is_called_as_it_is(run: Path) -> None:
    stage = stage_of(run, "convolution")
    config = config_of(run, "convolution", "training.compile=true", "stages.operator.compile=false")
    assert forward_of(stage, config) is stage.model


# --- the cache -----------------------------------------------------------------------------------------


def test_cache_is_where_it_is_said_while_training_lasts(tmp_path: Path, notes: list[str]) -> None:
    variables = dict[str, str]()
    with compile_cache(tmp_path / "cache", variables=variables):
        assert variables == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    assert variables == {}
    assert notes == []


def test_cache_of_the_environment_wins_and_is_said(tmp_path: Path, notes: list[str]) -> None:
    variables = {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    with compile_cache(tmp_path / "cache", variables=variables):
        assert variables == {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    assert "TORCHINDUCTOR_CACHE_DIR=/elsewhere is used, not training.compile_cache" in notes[0]


has_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
)


def step_of(stage: Stage, config: RunConfig) -> list[Tensor]:
    with compile_cache(config.training.compile_cache):
        return gradients_of(stage, losses_of(stage, forward_of(stage, config)))


@has_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_second_run_takes_what_the_first_compiled(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    stage = stage_of(run, "convolution")
    config = config_of(run, "convolution", *BY_BLOCKS, f"training.compile_cache={run / 'compiled'}")
    expected, hits = gradients_of(stage, losses_of(stage)), list[int]()
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        for found, one in zip(step_of(stage, config), expected, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-5)  # sums in another order
        kinds = (("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit"))
        hits.append(sum(counters[part][kind] for part, kind in kinds))
    assert hits[0] == 0
    assert hits[1] > 0
    assert any((run / "compiled").rglob("*.so"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_cpp_compiler_the_reason_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    stage = stage_of(run, "convolution")
    config = config_of(run, "convolution", *BY_BLOCKS, f"training.compile_cache={run / 'compiled'}")
    expected = gradients_of(stage, losses_of(stage))
    assert_same(step_of(stage, config), expected)
    (reason,) = (note for note in notes if "going on without" in note)
    assert "compiler" in reason.lower().partition("without")[2]
