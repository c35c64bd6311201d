"""Activation checkpointing changes what a step keeps and computes, and nothing of what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from numbered_batches import batch_of
from operator_runs import configure
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ups.config import TrainingConfig, load_config
from ups.errors import ConfigError
from ups.nn.activation_checkpointing import ActivationCheckpointing, Recomputing, set_activation_checkpointing
from ups.train.flops import count_flops, count_step
from ups.train.stage import Losses, Stage, forward_of, make_stage
from ups.train.trainer import autocast_of

CPU = torch.device("cpu")
WAYS: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
OPERATOR = ["data.tasks=[burgers1d]", "training.horizon=2"]
ATTENTION = ["operator.window_size=4", "operator.dropout=0.2", "operator.drop_path=0.2"]
JOINT = ["training.use_inverse_losses=true", "training.lambda_alignment=1", "data.tasks=[burgers1d]"]
# Stage and what it is told.
CASES: dict[str, tuple[str, list[str]]] = {
    "spectral": ("operator", [*OPERATOR, "operator.mixer=spectral", "operator.drop_path=0.2"]),
    "convolution": ("operator", [*OPERATOR, "operator.mixer=convolution", "operator.drop_path=0.2"]),
    "attention": ("operator", [*OPERATOR, "operator.mixer=attention", *ATTENTION]),
    "hybrid": ("operator", [*OPERATOR, "operator.mixer=hybrid", *ATTENTION]),
    "operator in 2D": ("operator", ["data.tasks=[darcy2d]"]),
    "autoencoder": ("autoencoder", ["data.tasks=[burgers1d]"]),
    "autoencoder in 2D": ("autoencoder", ["data.tasks=[darcy2d]"]),
    "joint": ("joint", JOINT),
    "fno": ("fno", ["data.tasks=[burgers1d]", "training.horizon=2"]),
    "fno in 2D": ("fno", ["data.tasks=[darcy2d]"]),
    "unet": ("unet", ["data.tasks=[burgers1d]"]),
}
every_case = pytest.mark.parametrize("case", CASES)
SLOW_HYBRID = pytest.param("hybrid", marks=pytest.mark.slow)  # half a minute of compiling


def stage_of(run: Path, case: str, *overrides: str) -> Stage:
    """In training mode, none of its weights zero."""
    name, own = CASES[case]
    stage = make_stage(name, configure(run, *own, *overrides), device=CPU)
    with torch.no_grad():
        for weight in trained(stage):
            weight.add_(0.05 * torch.randn_like(weight))
    stage.model.train()
    return stage


def trained(stage: Stage) -> list[Tensor]:
    return [weight for weight in stage.model.parameters() if weight.requires_grad]


def losses_of(stage: Stage, forward: Any = None) -> Losses:
    """Of the first batch, with the same random numbers every time."""
    torch.manual_seed(3)
    return stage.losses(forward or stage.model, batch_of(stage, 0))


def gradients_of(stage: Stage, losses: Losses) -> list[Tensor]:
    total = torch.stack(list(losses.values())).sum()
    found = torch.autograd.grad(total, trained(stage), allow_unused=True, materialize_grads=True)
    assert any(gradient.abs().max() > 0 for gradient in found)
    return list(found)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Within 1e-6 of the largest number of each."""
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-6 * max(1e-3, float(other.abs().max()))


class Kept(TorchDispatchMode):
    """Memory that operations inside made, and that something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        given = storages_of(args)  # a view of a weight isn't made here
        for key, storage in storages_of(result).items():
            if key not in given:
                self._made[key] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def num_bytes(self) -> int:
        return sum(num for storage, num in self._made.values() if not storage.expired())


def storages_of(values: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


@every_case
def test_gradients_are_the_same(run: Path, case: str) -> None:
    stage = stage_of(run, case)
    names = list(stage.model.state_dict())
    expected = gradients_of(stage, losses_of(stage))
    for how in ("selective", "full"):
        set_activation_checkpointing(stage.model, how)
        assert_same(gradients_of(stage, losses_of(stage)), expected)
    assert list(stage.model.state_dict()) == names


@every_case
def test_full_computes_the_forward_pass_again_and_selective_less(run: Path, case: str) -> None:
    """In convolutions and linear layers there is nothing else that counts."""
    stage, backward, forward = stage_of(run, case), dict[str, int](), 0
    for how in WAYS:
        set_activation_checkpointing(stage.model, how)
        forward = count_flops(lambda: losses_of(stage))
        backward[how] = count_flops(lambda: gradients_of(stage, losses_of(stage))) - forward
    has_others = case not in ("convolution", "unet")
    assert (backward["none"] < backward["selective"]) == has_others
    assert backward["selective"] < backward["full"] <= backward["none"] + forward


@every_case
def test_forward_pass_keeps_less(run: Path, case: str) -> None:
    stage, kept = stage_of(run, case), dict[str, int]()
    for how in WAYS:
        set_activation_checkpointing(stage.model, how)
        with Kept() as watching:
            losses = losses_of(stage)
        kept[how] = watching.num_bytes
        del losses
    assert kept["full"] < kept["selective"] < kept["none"]


@every_case
def test_counted_operations_of_a_step_do_not_depend_on_it(run: Path, case: str) -> None:
    stage, counts = stage_of(run, case), set()
    for how in WAYS:
        set_activation_checkpointing(stage.model, how)
        counts.add(count_step(stage, batch_of(stage, 0)))
        parts = [module for module in stage.model.modules() if isinstance(module, Recomputing)]
        assert {module.activation_checkpointing for module in parts} == {how}
    assert len(counts) == 1


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("case", ["hybrid", "joint", "unet"])
def test_gradients_are_the_same_under_autocast(run: Path, case: str, how: ActivationCheckpointing) -> None:
    stage = stage_of(run, case)
    config = configure(run, "training.amp=true", f"training.activation_checkpointing={how}")
    autocast, found = autocast_of(config, stage.name, CPU), []
    for one in ("none", how):
        set_activation_checkpointing(stage.model, one)
        with autocast():
            losses = losses_of(stage)
        found.append(gradients_of(stage, losses))
    assert_same(found[1], found[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of the compiler's own imports
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("autoencoder", "selective"),
        ("fno", "full"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("autoencoder", "full"), ("fno", "selective"))
        ),
        *(
            pytest.param(c, how, marks=pytest.mark.slow)
            for c in ("hybrid", "unet")
            for how in ("selective", "full")
        ),
    ],
)
def test_compiled_step_has_the_same_gradients(
    run: Path, monkeypatch: pytest.MonkeyPatch, case: str, how: ActivationCheckpointing
) -> None:
    torch._dynamo.reset()
    plain = torch.compile
    monkeypatch.setattr("torch.compile", lambda function, **options: plain(function, backend="aot_eager"))
    stage = stage_of(run, case)
    expected = gradients_of(stage, losses_of(stage))
    config = configure(run, "training.compile=true", f"training.activation_checkpointing={how}")
    forward = forward_of(stage, config)
    assert_same(gradients_of(stage, losses_of(stage, forward)), expected)


def test_evaluation_computes_nothing_again(run: Path) -> None:
    stage = stage_of(run, "fno")
    stage.model.eval()
    expected = count_flops(lambda: gradients_of(stage, losses_of(stage)))
    set_activation_checkpointing(stage.model, "full")
    assert count_flops(lambda: gradients_of(stage, losses_of(stage))) == expected


# --- configurations ------------------------------------------------------------------------------------


def test_configuration_knows_every_way() -> None:
    assert get_args(TrainingConfig.model_fields["activation_checkpointing"].annotation) == WAYS


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "none"),
        (["operator.pdet.use_activation_checkpoint=false"], "none"),
        (["operator.pdet.use_activation_checkpoint=true"], "full"),
        (["operator.pdet.use_activation_checkpoint=true", "training.lr=0.1"], "full"),
        (
            ["operator.pdet.use_activation_checkpoint=false", "training.activation_checkpointing=selective"],
            "selective",
        ),
    ],
)
def test_earlier_key_means_full(overrides: list[str], expected: str) -> None:
    config = load_config(overrides=["data.tasks=[burgers1d]", *overrides])
    assert config.training.activation_checkpointing == expected
    assert load_config(config.model_dump(mode="json")) == config


def test_earlier_key_against_the_present_one_is_refused() -> None:
    both = ["operator.pdet.use_activation_checkpoint=true", "training.activation_checkpointing=selective"]
    with pytest.raises(ConfigError, match=r"means training\.activation_checkpointing = full, not selective"):
        load_config(overrides=["data.tasks=[burgers1d]", *both])
