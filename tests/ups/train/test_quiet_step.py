"""What a training step asks of the host: nothing; and how many operations and compiled forms it takes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numbered_batches import batch_of
from operator_runs import configure, own_copy, shared_run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ups.train.stage import Stage, forward_of, make_stage
from ups_store.torch import map_tensors

CPU, META = torch.device("cpu"), torch.device("meta")
# What makes a tensor of Python numbers, or of nothing but a shape.
MADE = {"lift_fresh", "scalar_tensor", "arange", "linspace", "eye", "full", "zeros", "ones"}
MADE |= {"new_full", "new_zeros", "new_ones", "full_like", "zeros_like", "ones_like"}
BY_AUTOGRAD = {"new_zeros", "zeros", "ones_like", "zeros_like", "scalar_tensor"}  # filled on the device
JOINT = ["training.use_inverse_losses=true", "training.lambda_alignment=1"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of three tasks, a trained autoencoder, stores of latents and fields."""
    return shared_run(tmp_path_factory)


@pytest.fixture
def run(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_copy(prepared, tmp_path, monkeypatch)


class Watching(TorchDispatchMode):
    """Names of the operations inside; copies from device to device as "copy"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        given = {value.device for value in args if isinstance(value, Tensor)}
        is_copy = isinstance(result, Tensor) and given and given != {result.device}
        self.names["copy" if is_copy else operation.overloadpacket.__name__] += 1
        return result


def on_meta(stage: Stage) -> Stage:
    """The stage on a device that has no numbers: asking it for one is an error, as waiting for a GPU is not."""
    stage.model.to(META)
    stage._device = META  # type: ignore[attr-defined]
    if hasattr(stage, "_queries"):
        stage._queries = {name: query.to(META) for name, query in stage._queries.items()}
    return stage


def batch_with(stage: Stage, task: str) -> Any:
    return next(batch for batch in (batch_of(stage, i) for i in range(100)) if batch.task == task)


@pytest.mark.parametrize(
    ("name", "task", "overrides"),
    [
        ("operator", "burgers1d", ["training.horizon=3"]),
        ("operator", "darcy2d", []),
        ("operator", "darcy2d", ["operator.mixer=hybrid", "operator.pdet.window_size=2"]),
        ("operator", "burgers1d", ["operator.state=fields", "operator.mixer=convolution"]),
        ("autoencoder", "burgers1d", []),
        ("autoencoder", "darcy2d", ["encoder.basis=none"]),
        ("joint", "burgers1d", [*JOINT, "data.tasks=[burgers1d,advection1d]", "training.horizon=2"]),
        ("joint", "darcy2d", [*JOINT, "data.tasks=[darcy2d]"]),
        ("fno", "burgers1d", ["data.tasks=[burgers1d]", "training.horizon=2"]),
        ("fno", "darcy2d", ["data.tasks=[darcy2d]"]),
        ("unet", "burgers1d", ["data.tasks=[burgers1d]"]),
    ],
)
def test_step_makes_no_constant_copies_nothing_and_waits_for_nothing(
    run: Path, name: str, task: str, overrides: list[str]
) -> None:
    config = configure(run, "training.lambda_relative=1", *overrides)
    stage = make_stage(name, config, device=CPU)
    batch = map_tensors(batch_with(stage, task), lambda tensor: tensor.to(META))  # as a loader sends it
    stage = on_meta(stage)
    stage.model.train()
    with Watching() as forward:
        losses = stage.losses(stage.model, batch)
        total = torch.stack(list(losses.values())).sum()
    with Watching() as backward:
        total.backward()
    assert set(forward.names) & {*MADE, "copy"} == set()
    assert set(backward.names) & {*(MADE - BY_AUTOGRAD), "copy"} == set()
    assert "addmm" in forward.names or "convolution" in forward.names
