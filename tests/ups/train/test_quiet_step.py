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
from operator_runs import configure
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ups.train.meter import LossMeter
from ups.train.stage import Stage, forward_of, make_stage
from ups_store.torch import map_tensors

CPU, META = torch.device("cpu"), torch.device("meta")
# What makes a tensor of Python numbers, or of nothing but a shape.
MADE = {"lift_fresh", "scalar_tensor", "arange", "linspace", "eye", "full", "zeros", "ones"}
MADE |= {"new_full", "new_zeros", "new_ones", "full_like", "zeros_like", "ones_like"}
BY_AUTOGRAD = {"new_zeros", "zeros", "ones_like", "zeros_like", "scalar_tensor"}  # filled on the device
JOINT = ["training.use_inverse_losses=true", "training.lambda_alignment=1"]


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
    """The stage on a device without numbers: what would wait for a GPU fails there."""
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
        ("operator", "darcy2d", ["operator.mixer=hybrid", "operator.window_size=2"]),
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


def test_meter_sends_the_device_nothing() -> None:
    meter, losses = LossMeter(), {name: torch.ones((), device=META) for name in ("one_step", "rollout")}
    meter.add(losses, step=1)
    with Watching() as watching:
        meter.add(losses, step=2)
    assert set(watching.names) & {*MADE, "copy"} == set()


def test_conditions_are_embedded_once_however_long_rollouts_are(run: Path) -> None:
    counts = []
    for horizon in (1, 2, 3):
        stage = make_stage("operator", configure(run, f"training.horizon={horizon}"), device=CPU)
        with Watching() as watching:
            stage.losses(stage.model, batch_with(stage, "burgers1d"))
        counts.append(watching.names)
    of_parameters = [names["log10"] for names in counts]
    assert of_parameters == of_parameters[:1] * 3
    assert of_parameters[0] > 0
    assert [names["addcmul"] for names in counts] == [3, 6, 9]  # of the blocks
    products = [names["addmm"] for names in counts]
    assert products[2] - products[1] == products[1] - products[0] < products[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of the compiler's own imports
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # which torch hides, but not errors of it
@pytest.mark.parametrize("name", ["operator", "fno"])
def test_no_horizon_and_no_task_compiles_a_stage_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    torch._dynamo.reset()
    graphs: list[str] = []

    def compiled(function: Any, **options: Any) -> Any:
        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            graphs.append(function.__name__)
            return graph.forward

        return plain(function, backend=backend)

    plain = torch.compile
    monkeypatch.setattr("torch.compile", compiled)
    tasks = ["burgers1d", "advection1d"] if name == "operator" else ["burgers1d"]
    config = configure(run, f"data.tasks=[{','.join(tasks)}]", "training.compile=true")
    stage = make_stage(name, config, device=CPU)
    forward = forward_of(stage, config)
    for task in tasks:
        batch = batch_with(stage, task)
        for steps in (1, 2, 12):
            states = batch.states[:, :1].repeat(1, steps + 1, *(1,) * (batch.states.ndim - 2))
            longer = dataclasses.replace(batch, states=states)
            found, expected = (stage.losses(model, longer) for model in (forward, stage.model))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            torch.stack(list(found.values())).sum().backward()
    assert Counter(graphs) == dict.fromkeys(stage.compiled, len(tasks))


@pytest.mark.parametrize(
    ("name", "overrides", "gradients"),
    [
        ("operator", ["data.tasks=[burgers1d]", "operator.depths=[1]"], "all"),
        ("operator", ["data.tasks=[burgers1d]", "latent.tokens=8"], "all"),
        ("operator", ["data.tasks=[darcy2d]"], "the same"),  # 2 x 4 tokens are too few to be halved
        ("operator", [], "some"),
        ("autoencoder", ["data.tasks=[burgers1d]"], "all"),
        ("autoencoder", ["data.tasks=[burgers1d,advection1d]"], "some"),
        ("joint", [*JOINT, "data.tasks=[burgers1d]"], "all"),
        ("joint", [*JOINT, "data.tasks=[darcy2d]"], "some"),
        ("fno", ["data.tasks=[darcy2d]"], "all"),
        ("unet", ["data.tasks=[burgers1d]"], "all"),
    ],
)
def test_stage_knows_which_parameters_a_batch_gives_gradients(
    run: Path, name: str, overrides: list[str], gradients: str
) -> None:
    stage = make_stage(name, configure(run, "training.lambda_relative=1", *overrides), device=CPU)
    assert stage.gradients == gradients
    weights = {key: weight for key, weight in stage.model.named_parameters() if weight.requires_grad}
    reached = []
    for number in range(3):
        losses = stage.losses(stage.model, batch_of(stage, number))
        total = torch.stack(list(losses.values())).sum()
        found = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
        reached.append({key for key, grad in zip(weights, found, strict=True) if grad is not None})
    if gradients == "all":
        assert reached == [set(weights)] * 3
    if gradients == "the same":
        assert reached == [reached[0]] * 3
        assert reached[0] < set(weights)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("operator", ["training.cache_mode=store"]), ("autoencoder", []), ("fno", ["data.tasks=[burgers1d]"])],
)
def test_ranks_read_their_own_rows_of_a_batch_and_no_others(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, overrides: list[str]
) -> None:
    size = ["training.batch_size=null", "training.global_batch_size=8", "training.prefetch_factor=0"]
    config = configure(run, *size, *overrides)

    def rows_read(rank: int, world_size: int) -> list[int]:
        """Of the first batch."""
        monkeypatch.setattr("ups.data.batches.ranks_of_torch", lambda: (rank, world_size))
        stage, read = make_stage(name, config, device=CPU), list[int]()
        fetch = stage.loader.dataset.fetch

        def watched(number: int, items: Any, **options: Any) -> Any:
            read.extend(items.tolist())
            return fetch(number, items, **options)

        monkeypatch.setattr(stage.loader.dataset, "fetch", watched)
        batch = batch_of(stage, 0)
        assert len(batch) == len(read) == 8 // world_size
        assert batch.num_rows == 8
        return read

    alone, ranks = rows_read(0, 1), [rows_read(rank, 2) for rank in range(2)]
    assert [*ranks[0], *ranks[1]] == alone
