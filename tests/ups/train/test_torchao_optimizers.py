"""torchao's optimisers: 8-bit AdamW stays near AdamW; AdamW on the CPU is AdamW; both go on by name."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trainer import CPU, Regression, expect_equal, make_config, train
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ups.config import OptimizerConfig, load_config
from ups.config.checks import check_optimizer
from ups.errors import ConfigError, MissingExtraError
from ups.optim import (
    ParameterGroup,
    make_optimizer,
    parameter_groups,
    set_learning_rate,
)
from ups.train.state import StateTensors
from ups.train.trainer import Trainer
from ups.trained.checkpoint import load_checkpoint

torch.set_num_threads(1)
EIGHT_BIT = ["stages.autoencoder.optimizer.name=adamw8bit"]


@pytest.fixture(scope="module", autouse=True)
def torchao() -> None:
    pytest.importorskip("torchao", reason="there is no torchao")


class Wide(Regression):
    """With a matrix that is large enough for states of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )


def moved(trainer: Trainer, num: int) -> torch.Tensor:
    """How far some steps move the weights, as one vector."""
    before = nn.utils.parameters_to_vector(trainer.stage.model.parameters()).detach().clone()
    for _ in range(num):
        trainer.train_step()
    return nn.utils.parameters_to_vector(trainer.stage.model.parameters()).detach() - before


# --- states of 8 bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "bound"), [(1, 1e-5), (10, 0.05)])
def test_steps_of_8_bits_stay_near_those_of_adamw(tmp_path: Path, num: int, bound: float) -> None:
    """The first step takes the moments before they are rounded."""
    plain = moved(Trainer(Wide(), make_config(tmp_path / "plain"), device=CPU), num)
    eight_bit = moved(Trainer(Wide(), make_config(tmp_path / "8bit", *EIGHT_BIT), device=CPU), num)
    assert (eight_bit - plain).norm() <= bound * plain.norm()
    if num > 1:
        assert not torch.equal(eight_bit, plain)


def test_moments_of_8_bits_take_a_byte_a_weight_and_the_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    through = train(Wide(), make_config(tmp_path / "through", *EIGHT_BIT))
    config = make_config(tmp_path / "parts", *EIGHT_BIT)
    first = Trainer(Wide(), config, device=CPU)
    for _ in range(4):
        first.train_step()
    first.save()
    saved, _ = load_checkpoint(first.state_path, kind="training")
    parts = {name.rpartition(".")[2] for name in saved if name.startswith("optimizer.3.weight.")}
    assert parts == {"step", "exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale"}
    codes = saved["optimizer.3.weight.exp_avg_codes"]
    assert (codes.dtype, codes.shape) == (torch.uint8, (64, 64))
    assert saved["optimizer.3.bias.exp_avg"].dtype == torch.float32  # too small to be worth it
    expect_equal(train(Wide(), config), through)


def test_rate_decay_and_groups_of_8_bits_are_those_of_adamw() -> None:
    found = []
    for name in ("adamw", "adamw8bit"):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        config = OptimizerConfig(name=name, lr=0.1, weight_decay=0.5, betas=(0.5, 0.5), eps=0.1)
        optimizer = make_optimizer(parameter_groups(model, weight_decay=0.5), config)
        set_learning_rate(optimizer, 0.02)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found.append(model)
    for one, other in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [{"name": "adamw8bit"}, {"cpu_offload": True}])
def test_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ups-store\[torchao\]'"):
        check_optimizer(OptimizerConfig(lr=0.1, **settings))


@pytest.mark.parametrize("settings", [{"name": "adamw8bit"}, {"cpu_offload": True}])
def test_parameters_that_are_shared_out_are_refused(settings: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(8, 8)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match="aren't shared out over ranks") as caught:
            make_optimizer(parameter_groups(model, weight_decay=0.0), OptimizerConfig(lr=0.1, **settings))
    finally:
        dist.destroy_process_group()
    assert caught.value.kind == "not_shardable"


def test_complex_parameters_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="aren't real") as caught:
        make_optimizer([ParameterGroup({"w": weight}, 0.0)], OptimizerConfig(name="adamw8bit", lr=0.1))
    assert caught.value.kind == "not_real"


# --- on the CPU, of a model on a GPU -------------------------------------------------------------------


@pytest.fixture
def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's class, with this machine's CPU as its GPU: copies are there at once."""
    from torchao.optim import cpu_offload

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

        def record_event(self) -> Any:
            return SimpleNamespace(synchronize=lambda: None)

        def synchronize(self) -> None:
            pass

    cuda = SimpleNamespace(Stream=Stream, current_stream=Stream, stream=lambda stream: nullcontext())

    def empty_like(tensor: torch.Tensor, *, device: Any = None, pin_memory: bool) -> torch.Tensor:
        return torch.empty_like(tensor)

    stand_in = SimpleNamespace(cuda=cuda, empty_like=empty_like, optim=torch.optim)
    monkeypatch.setattr(cpu_offload, "torch", stand_in)
    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"])


OFFLOADED = ["training.cpu_offload_optimizer=true", "training.grad_clip=null"]


def test_stage_takes_the_setting_of_the_training() -> None:
    config = load_config(overrides=["data.tasks=[burgers1d]", "training.cpu_offload_optimizer=true"])
    assert config.stage("operator").optimizer.cpu_offload is True
    own = ["stages.joint.optimizer.cpu_offload=true", "data.tasks=[burgers1d]"]
    assert load_config(overrides=own).stage("joint").optimizer.cpu_offload is True
    assert load_config(overrides=own).stage("operator").optimizer.cpu_offload is False


@pytest.mark.usefixtures("stand_in_gpu")
def test_steps_on_the_cpu_are_those_of_adamw_whatever_the_schedule(tmp_path: Path) -> None:
    plain = train(Wide(), make_config(tmp_path / "plain", "training.grad_clip=null"))
    offloaded = train(Wide(), make_config(tmp_path / "offloaded", *OFFLOADED))
    assert type(offloaded.optimizer).__name__ == "OffloadedAdamW"
    expect_equal(offloaded, plain)


@pytest.mark.usefixtures("stand_in_gpu")
def test_offloaded_run_goes_on_to_the_bit_and_has_the_states_of_adamw(tmp_path: Path) -> None:
    through = train(Wide(), make_config(tmp_path / "through", *OFFLOADED))
    config = make_config(tmp_path / "parts", *OFFLOADED)
    first = Trainer(Wide(), config, device=CPU)
    for _ in range(4):
        first.train_step()
    first.save()
    plain = Trainer(Wide(), make_config(tmp_path / "plain"), device=CPU)
    plain.train_step()
    names = [
        set(
            StateTensors(
                model=trainer.stage.model, optimizer=trainer.optimizer, averaged=None, stage={}
            ).now()
        )
        for trainer in (first, plain)
    ]
    assert names[0] == names[1]
    expect_equal(train(Wide(), config), through)


@pytest.mark.gpu
def test_step_of_an_offloaded_model_on_a_gpu_is_that_of_adamw() -> None:
    found = []
    for cpu_offload in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
        config = OptimizerConfig(lr=0.01, weight_decay=0.1, cpu_offload=cpu_offload)
        optimizer = make_optimizer(parameter_groups(model, weight_decay=0.1), config)
        for step in range(3):
            model(torch.full((8, 64), float(step), device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_torchao_is_imported_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)  # importing it would fail
    assert train(Regression(), make_config(tmp_path)).step == 10
