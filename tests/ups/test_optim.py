"""Learning rates, averages and optimisers against values by hand and PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ups.config import OptimizerConfig, SchedulerConfig
from ups.device import choose_device
from ups.errors import CheckpointError, ConfigError
from ups.losses import reconstruction_error
from ups.optim import (
    AveragedWeights,
    LearningRate,
    ParameterGroup,
    WeightsCopy,
    make_optimizer,
    parameter_groups,
    set_learning_rate,
)

torch.set_num_threads(1)


def make_rate(epochs: int = 10, **settings: object) -> LearningRate:
    config = SchedulerConfig.model_validate(settings)
    return LearningRate(config, peak=1.0, steps_per_epoch=10, total_steps=10 * epochs)


def test_cosine_starts_at_the_peak_and_ends_at_its_minimum() -> None:
    rate = make_rate(name="cosine", eta_min=0.1)
    assert rate.at(0) == 1.0
    assert rate.at(50) == pytest.approx(0.55)
    assert rate.at(100) == pytest.approx(0.1)
    assert rate.at(500) == pytest.approx(0.1)
    assert make_rate(name="cosine", t_max=20).at(100) == pytest.approx(0.5)


def test_cosine_agrees_with_pytorch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=0.05)
    ours = make_rate(name="CosineAnnealingLR", eta_min=0.05)
    for step in range(100):
        assert ours.at(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_warmup_rises_linearly_to_the_peak() -> None:
    rate = make_rate(name="cosine", warmup_steps=4)
    assert [rate.at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_step_lowers_the_rate_every_few_epochs() -> None:
    rate = make_rate(name="StepLR", step_size=2, gamma=0.1)
    assert [rate.at(step) for step in (0, 19, 20, 40)] == pytest.approx([1.0, 1.0, 0.1, 0.01])


def test_plateau_lowers_the_rate_once_patience_is_over() -> None:
    rate = make_rate(name="ReduceLROnPlateau", patience=1, factor=0.5, min_lr=0.3)
    seen = []
    for score in (3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        rate.end_epoch(score)
        seen.append(rate.at(0))
    assert seen == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3]
    again = make_rate(name="plateau", patience=1, factor=0.5)
    again.restore(rate.state())
    assert again.at(0) == 0.125


def test_average_follows_the_weights_by_its_decay() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    averaged = AveragedWeights(model, decay=0.5)
    nn.init.ones_(model.weight)
    averaged.update()  # (1 + 0) / (10 + 0) of the old average
    assert averaged.averages["weight"].item() == pytest.approx(0.9)
    averaged.num_updates = 1000
    averaged.update()
    assert averaged.averages["weight"].item() == pytest.approx(0.95)
    with averaged.in_place():
        assert model.weight.item() == pytest.approx(0.95)
    assert model.weight.item() == 1.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copy_of_weights_in_the_memory_of_the_cpu_takes_their_place(device: str) -> None:
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    copy = WeightsCopy(model, device="cpu")
    nn.init.ones_(model.weight)
    with copy.in_place():
        assert model.weight.item() == 0.0
    assert (model.weight.item(), model.weight.device.type) == (1.0, device)


@pytest.mark.parametrize("saved", [{}, {"weight": torch.zeros(2, 2)}, {"bias": torch.zeros(1)}])
def test_averages_of_other_weights_are_refused(saved: dict[str, torch.Tensor]) -> None:
    averaged = AveragedWeights(nn.Linear(1, 1, bias=False), decay=0.5)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: its averages aren't those") as caught:
        averaged.restore(saved, num_updates=3, path=Path("a.safetensors"))
    assert caught.value.kind == "other_weights"
    assert averaged.num_updates == 0


def test_decay_acts_on_matrices_alone() -> None:
    groups = parameter_groups(nn.Linear(2, 3), weight_decay=0.3)
    optimizer = make_optimizer(groups, OptimizerConfig(lr=0.1))
    decays = {group["params"][0].ndim: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {2: 0.3, 1: 0.0}


def test_group_has_a_learning_rate_of_its_own() -> None:
    slow, fast = (nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [ParameterGroup({"slow": slow}, 0.0, lr_factor=0.1), ParameterGroup({"fast": fast}, 0.0)]
    optimizer = make_optimizer(groups, OptimizerConfig(name="sgd", momentum=0.0, lr=0.1))
    for _ in range(2):  # the factor is of the schedule's rate, not of the last one
        set_learning_rate(optimizer, 0.5)
    slow.grad, fast.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert (slow.item(), fast.item()) == pytest.approx((0.95, 0.5))


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_adam_is_fused_where_it_can_be(name: str) -> None:
    config = OptimizerConfig(name=name, lr=0.1)
    here, elsewhere = (
        parameter_groups(nn.Linear(2, 3, device=device), weight_decay=0.0) for device in ("cpu", "meta")
    )
    assert make_optimizer(here, config).defaults["fused"]
    assert not make_optimizer(elsewhere, config).defaults["fused"]


def test_first_step_of_adamw_agrees_with_its_formula() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = make_optimizer([ParameterGroup({"weight": weight}, 0.5)], OptimizerConfig(lr=0.1))
    weight.grad = torch.tensor([[3.0, -0.01]])
    optimizer.step()
    # Decayed by lr x decay, then moved by lr against the sign of the gradient.
    torch.testing.assert_close(weight.data, torch.tensor([[0.95 - 0.1, -1.9 + 0.1]]), rtol=0, atol=1e-5)


def test_reconstruction_loss_is_the_square_of_the_relative_error() -> None:
    truth = torch.tensor([[[3.0], [4.0]], [[0.0], [0.0]]])
    prediction = truth + torch.tensor([[[1.0], [2.0]], [[0.1], [0.1]]])
    power = truth.square().mean(1)
    loss = reconstruction_error(prediction, truth, power_BC=power, std_C=torch.tensor([2.0]))
    faint = 0.01 * 2.0**2  # keeps the loss of a frame without power finite
    assert loss.item() == pytest.approx((2.5 / (12.5 + faint) + 0.01 / faint) / 2)


def test_device_that_is_not_there_falls_back_and_says_so(notes: list[str]) -> None:
    assert choose_device("cuda:99") == torch.device("cpu")
    assert notes == ["warning: there is no cuda:99; the CPU is used instead"]
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"training\.device: expected auto, cpu"):
        choose_device("gpu0")
