"""Muon and AdamW as one optimiser: which weights go where, steps, continued and sharded training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rank_processes import rank_variables, start, wait
from rank_sharding import main
from test_trainer import CPU, Regression, expect_equal, make_config, train
from tiny_autoencoders import make_autoencoder
from torch import Tensor, nn

from ups.config import OptimizerConfig
from ups.config.checks import check_optimizer
from ups.errors import ConfigError, OtherTensorsError
from ups.models.grid_networks import FourierNeuralOperator, UNet
from ups.models.latent_operator import LatentOperator
from ups.models.operator_size import OperatorSize, TokenAxis
from ups.nn.layers import Condition
from ups.optim import (
    MuonHybrid,
    ParameterGroup,
    make_optimizer,
    muon_matrices,
    parameter_groups,
    set_learning_rate,
)
from ups.train.state import StateTensors
from ups.train.trainer import Trainer

torch.set_num_threads(1)
HYBRID = OptimizerConfig(name="muon_hybrid", lr=0.01, weight_decay=0.1)
SIZE = OperatorSize(width=8, depths=(1, 2), mixers=("hybrid",), num_heads=2, mlp_ratio=2.0)


def make_operator(size: OperatorSize = SIZE) -> LatentOperator:
    torch.manual_seed(0)
    axes = (TokenAxis(16, False),)
    return LatentOperator(4, num_tasks=2, ranges=[(0.01, 0.1)], size=size, axes=axes)


def make_network(kind: Callable[..., nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind(2, num_parameters=1, periodic=(True,), width=8)


def make(model: nn.Module, config: OptimizerConfig = HYBRID) -> torch.optim.Optimizer:
    groups = parameter_groups(model, weight_decay=config.weight_decay)
    return make_optimizer(groups, config, hidden=muon_matrices(model))


def given_to_muon(model: nn.Module) -> set[str]:
    """Names of weights in Muon's groups."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [group for group in make(model).param_groups if "num_matrices" in group]
    return {names[parameter] for group in groups for parameter in group["params"]}


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


# --- which weights go where ----------------------------------------------------------------------------


def test_muon_takes_the_matrices_of_the_operators_blocks() -> None:
    model = make_operator()
    block = {"mixers.0.qkv", "mixers.0.out", "mixers.1.linear", "mlp.0", "mlp.3"}
    between = {"coarser.0.merge.0", "coarser.0.widen", "finer.0.narrow", "finer.0.split.0", "join.0"}
    blocks = {
        f"{place}.{layer}" for place in ("down.0.0", "down.1.0", "down.1.1", "up.0.0") for layer in block
    }
    named = dict(model.named_parameters())
    expected = {f"{name}.weight" for name in blocks | between} & named.keys()
    assert given_to_muon(model) == expected
    assert len(expected) == len(blocks | between) - 4  # mixers.1 has Fourier modes alone
    assert {named[name].ndim for name in expected} == {2}


def test_muon_takes_the_layers_of_the_autoencoders_blocks() -> None:
    model = make_autoencoder()
    taken = given_to_muon(model)
    layers = {name.partition("blocks.0.")[2] for name in taken}
    assert layers == {"conv.conv.weight", "out.weight"}  # not what the condition modulates them by
    places = ("patch_blocks", "token_blocks", ".blocks")
    assert len(taken) == 2 * len(places) * 2  # layers, places and grids
    assert all(any(place in name for name in taken) for place in places)


def test_muon_takes_the_local_layers_of_fno_and_not_its_modes() -> None:
    taken = given_to_muon(make_network(FourierNeuralOperator))
    assert taken == {f"local.{number}.weight" for number in range(4)}


def test_muon_takes_the_convolutions_of_unet_and_not_its_head() -> None:
    model = make_network(UNet)
    taken = given_to_muon(model)
    assert taken == {name for name, parameter in model.named_parameters() if parameter.ndim == 3} - {
        "out.weight"
    }
    assert len(taken) == 2 * 7  # four levels down, three up


def test_every_trained_parameter_is_in_one_group_with_its_own_decay() -> None:
    model = make_operator()
    model.out.weight.requires_grad_(False)
    groups = make(model).param_groups
    trained = [parameter for group in groups for parameter in group["params"]]
    assert len(trained) == len(set(trained)) == len(list(model.parameters())) - 1
    for group in groups:
        assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] == 0.1}


def test_group_of_a_stage_keeps_its_rate_on_both_sides() -> None:
    model = make_operator()
    group = ParameterGroup(dict(model.named_parameters()), 0.0, lr_factor=0.5)
    optimizer = make_optimizer([group], HYBRID, hidden=muon_matrices(model))
    set_learning_rate(optimizer, 0.2)
    assert [entry["lr"] for entry in optimizer.param_groups] == [0.1] * 3  # one matrix, three, and the rest


# --- steps ---------------------------------------------------------------------------------------------


def test_steps_are_those_of_pytorchs_muon_and_adamw() -> None:
    config = HYBRID.model_copy(
        update={"muon_momentum": 0.8, "muon_ns_steps": 3, "muon_adjust_lr": "original"}
    )
    ours, theirs = make_network(FourierNeuralOperator), make_network(FourierNeuralOperator)
    optimizer, taken = make(ours, config), given_to_muon(ours)
    matrices = {name: nn.Parameter(theirs.get_parameter(name).detach()[..., 0].clone()) for name in taken}
    rest = [p for name, p in theirs.named_parameters() if name not in taken]
    muon = torch.optim.Muon(
        list(matrices.values()), lr=0.01, weight_decay=0.1, momentum=0.8, ns_steps=3, adjust_lr_fn="original"
    )
    tables = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in rest]
    adamw = torch.optim.AdamW(tables, lr=0.01, betas=(0.9, 0.99), fused=True)
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        for name, matrix in matrices.items():
            grad = theirs.get_parameter(name).grad
            assert grad is not None
            matrix.grad = grad[..., 0]
        for one in (optimizer, muon, adamw):
            one.step()
    for name, parameter in ours.named_parameters():
        expected = matrices[name][..., None] if name in taken else theirs.get_parameter(name)
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)


def test_queries_keys_and_values_are_moved_as_three_matrices() -> None:
    class Attention(nn.Module):
        def __init__(self, layers: dict[str, nn.Module]) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleDict(layers)])

    torch.manual_seed(0)
    fused = Attention({"qkv": nn.Linear(8, 24, bias=False)})
    apart = Attention({name: nn.Linear(8, 8, bias=False) for name in "qkv"})
    with torch.no_grad():
        for parameter, part in zip(apart.parameters(), fused.blocks[0]["qkv"].weight.chunk(3), strict=True):
            parameter.copy_(part)
    first, second = make(fused), make(apart)
    for step in range(3):
        gradients(fused, step)
        (weight,) = fused.parameters()
        assert weight.grad is not None
        for parameter, part in zip(apart.parameters(), weight.grad.chunk(3), strict=True):
            parameter.grad = part.clone()
        first.step()
        second.step()
    torch.testing.assert_close(torch.cat(list(apart.parameters())), weight, rtol=0, atol=0)


def test_first_step_of_a_matrix_is_nearly_orthogonal() -> None:
    model = make_network(FourierNeuralOperator)
    before = model.get_parameter("local.0.weight").detach().clone()
    optimizer = make(model, HYBRID.model_copy(update={"weight_decay": 0.0, "muon_adjust_lr": "original"}))
    gradients(model, 0)
    optimizer.step()
    moved = (before - model.get_parameter("local.0.weight").detach())[..., 0] / 0.01
    values = torch.linalg.svdvals(moved)
    assert values.min() > 0.5  # five iterations bring them to about 0.7 to 1.2
    assert values.max() < 1.5


def test_one_schedule_moves_both() -> None:
    model = make_operator()
    optimizer, before = make(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients(model, 0)
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    set_learning_rate(optimizer, 1e-3)
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_parameter_without_a_gradient_stays() -> None:
    model = make_operator()
    optimizer, weight = make(model), model.get_parameter("down.0.0.mlp.0.weight")
    before = weight.detach().clone()
    gradients(model, 0)
    weight.grad = None
    optimizer.step()
    assert torch.equal(weight, before)


def test_scaler_leaves_out_a_step_whose_gradients_are_infinite() -> None:
    model = make_operator()
    optimizer, before = make(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    gradients(model, 0)
    scaler.scale(torch.zeros(()))  # makes its scale
    model.out.bias.grad = torch.full_like(model.out.bias, torch.inf)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert scaler.get_scale() == 2.0


# --- training ------------------------------------------------------------------------------------------


class Training:
    """Steps of a tiny operator towards a shifted state, with clipping and a rate that falls."""

    def __init__(self) -> None:
        self.model = make_operator()
        self.optimizer = make(self.model)
        self.tensors = StateTensors(model=self.model, optimizer=self.optimizer, averaged=None, stage={})

    def run(self, begin: int, end: int) -> list[float]:
        return [self._step(step) for step in range(begin, end)]

    def _step(self, step: int) -> float:
        set_learning_rate(self.optimizer, 0.01 * (1 - step / 40))
        tokens = torch.randn(4, 16, 4, generator=torch.Generator().manual_seed(step))
        condition = Condition(torch.zeros(4, dtype=torch.int64), torch.full((4, 1), 0.05))
        dt_B = torch.full((4,), 0.1)
        after = self.model(tokens, dt_B=dt_B, condition=condition, grid=(16,), boundary=("dirichlet",))
        loss = (after - 0.5 * tokens).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def test_loss_of_a_tiny_operator_falls() -> None:
    losses = Training().run(0, 30)
    assert losses[-1] < 0.5 * losses[0]


def test_training_that_is_continued_is_the_same_to_the_bit() -> None:
    through = Training()
    through.run(0, 8)
    first = Training()
    first.run(0, 4)
    second = Training()
    saved = {name: tensor.clone() for name, tensor in first.tensors.now().items()}
    second.tensors.fill(saved, ema_updates=0, path=Path("state"))
    second.run(4, 8)
    torch.testing.assert_close(second.tensors.now(), through.tensors.now(), rtol=0, atol=0)
    names = [name for name in saved if name.endswith(".momentum_buffer")]
    assert {name.split(".", 1)[1].rpartition(".")[0] for name in names} == given_to_muon(first.model)


def test_state_of_a_parameter_that_is_not_there_is_refused() -> None:
    training = Training()
    training.run(0, 1)
    saved = training.tensors.now() | {"optimizer.other.momentum_buffer": torch.zeros(2, 2)}
    with pytest.raises(OtherTensorsError) as caught:
        training.tensors.fill(saved, ema_updates=0, path=Path("state"))
    assert caught.value.unexpected == ("other",)


@pytest.mark.multi_process
def test_sharded_matrices_are_moved_as_whole_ones(tmp_path: Path) -> None:
    processes = [start(main, "muon", "", tmp_path, **variables) for variables in rank_variables(2)]
    assert wait(processes) == [0, 0]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    for said in (first, second):
        assert said["difference"] < 1e-6  # AdamW's rounding; Muon moves whole matrices
        assert 0 < said["sharded"] < said["whole"]  # each rank some of them
    assert first["sharded"] + second["sharded"] == first["whole"]


class Deep(Regression):
    """With a hidden matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = nn.Sequential(nn.Tanh(), Residual())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.blocks[0](x)
        return out


def test_trainer_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    overrides = ("stages.autoencoder.optimizer.name=muon_hybrid", "training.grad_clip=0.5")
    through = train(Deep(), make_config(tmp_path / "through", *overrides))
    config = make_config(tmp_path / "parts", *overrides)
    first = Trainer(Deep(), config, device=CPU)
    for _ in range(4):
        first.train_step()
    first.save()
    second = train(Deep(), config)
    assert isinstance(second.optimizer, MuonHybrid)
    expect_equal(through, second)
    rates = {group["lr"] for group in through.optimizer.param_groups}
    assert rates == {through.learning_rate.at(9)}


# --- how AdamW loops, and what is refused --------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "muon_hybrid"])
def test_ways_to_loop_over_parameters_give_the_same(name: str) -> None:
    ends: list[Mapping[str, Tensor]] = []
    for implementation in ("auto", "for_loop", "foreach", "fused"):
        model = make_network(FourierNeuralOperator)
        settings: dict[str, Any] = {"name": name, "lr": 0.01, "weight_decay": 0.1}
        optimizer = make(model, OptimizerConfig(implementation=implementation, **settings))
        for step in range(3):
            gradients(model, step)
            optimizer.step()
        ends.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon_hybrid"])
def test_fusing_what_can_not_be_fused_is_refused(name: str) -> None:
    config = OptimizerConfig(name=name, lr=0.01, implementation="fused")
    with pytest.raises(ConfigError, match="implementation = fused") as caught:
        make(make_operator().to("meta"), config)
    assert caught.value.kind == "not_fused"


def test_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no hidden matrices") as caught:
        make(nn.Sequential(nn.Linear(2, 3)))
    assert caught.value.kind == "no_matrices"


def test_pytorch_without_muon_is_refused_naming_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    check_optimizer(HYBRID, stage="operator")
    monkeypatch.setattr("ups.config.checks.version", lambda name: "2.8.1+cpu")
    with pytest.raises(ConfigError, match=r"stages\.operator\.optimizer\.name = muon_hybrid: this") as caught:
        check_optimizer(HYBRID, stage="operator")
    assert caught.value.kind == "old_torch"
    check_optimizer(OptimizerConfig(), stage="operator")


def test_names_of_earlier_configurations_are_taken() -> None:
    keys = {"name": "muon_hybrid", "muon_momentum": 0.9, "muon_ns_steps": 4}
    optimizer = make(make_operator(), OptimizerConfig.model_validate({**keys, "lr": 0.01}))
    assert isinstance(optimizer, MuonHybrid)
    group = next(group for group in optimizer.param_groups if "num_matrices" in group)
    assert (group["momentum"], group["ns_steps"], group["adjust_lr_fn"]) == (0.9, 4, "match_rms_adamw")
    with pytest.raises(ValidationError):
        OptimizerConfig(muon_ns_steps=100)  # which PyTorch refuses
