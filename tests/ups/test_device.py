"""Choosing the device: by name, told where it isn't there, and by rank; the precision of its products."""

from __future__ import annotations

import pytest
import torch

from ups.device import MatmulPrecision, choose_device, device_of_rank, matmul_precision
from ups.errors import ConfigError


def test_missing_gpu_is_replaced_by_the_cpu_and_told(
    monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    assert notes == []
    assert choose_device("cuda:2") == torch.device("cpu")
    assert notes == ["warning: there is no cuda:2; the CPU is used instead"]


@pytest.mark.parametrize("name", ["abacus", "mps", "meta", ""])
def test_device_that_nobody_knows_is_refused_by_its_key(name: str) -> None:
    with pytest.raises(ConfigError, match=r"latent\.device: expected auto, cpu, cuda or cuda:N"):
        choose_device(name, key="latent.device")


def test_every_rank_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda = torch.device("cuda")
    found = [device_of_rank(cuda, variables={"LOCAL_RANK": str(rank)}).index for rank in range(4)]
    assert found == [0, 1, 0, 1]
    assert device_of_rank(cuda, variables={}).index == 0
    for named in (torch.device("cpu"), torch.device("cuda", 1)):
        assert device_of_rank(named, variables={"LOCAL_RANK": "0"}) == named


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_precision_of_products_is_the_one_that_is_said_while_inside(
    precision: MatmulPrecision, notes: list[str]
) -> None:
    before = torch.get_float32_matmul_precision()
    with matmul_precision(precision):
        assert torch.get_float32_matmul_precision() == precision
    assert torch.get_float32_matmul_precision() == before
    assert len(notes) == (precision != "highest")
    assert all(precision in note and "training.matmul_precision" in note for note in notes)


def test_precision_of_products_is_as_before_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ConfigError), matmul_precision("medium"):
        raise ConfigError("anything")
    assert torch.get_float32_matmul_precision() == before
