"""Peak rates by name, what bounds operations, and the utilisation that a run logs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from test_trainer import Regression, make_config, records, train

from ups.config import StageConfig
from ups.data.batches import endless
from ups.train.flops import ShapesOf, of_step
from ups.train.meter import BANDWIDTH_BOUND, MFU
from ups.train.roofline import Cost, Limits, cost_of, known_gpu, precision_of

EVEN = Limits(flops_per_s=1e9, bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", (989.5, 3.35)),
        ("NVIDIA H100 PCIe", "bfloat16", (756, 2.0)),
        ("NVIDIA A100-SXM4-40GB", "tf32", (156, 1.555)),
        ("Tesla T4", "float32", (8.1, 0.3)),
        ("NVIDIA L40S", "float16", (362, 0.864)),
    ],
)
def test_a_known_gpu_has_what_its_maker_says(name: str, precision: str, tera: tuple[float, float]) -> None:
    flops, nbytes = tera
    assert known_gpu(name, precision) == Limits(flops * 1e12, nbytes * 1e12)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["NVIDIA H200 MIG 1g.18gb", "NVIDIA A10G", "Some GPU"])
def test_another_gpu_is_measured(name: str) -> None:
    assert known_gpu(name, "float32") is None


def test_precision_is_that_of_the_runs_products() -> None:
    assert precision_of(StageConfig(), matmul_precision="highest") == "float32"
    assert precision_of(StageConfig(), matmul_precision="high") == "tf32"
    assert precision_of(StageConfig(amp=True, amp_dtype="float16"), matmul_precision="high") == "float16"


def test_an_operation_is_bound_by_the_longer_of_both() -> None:
    """A product of 64 x 64 makes 524,288 operations and moves 49,152 bytes, a sum moves 12,000."""
    one, other = torch.ones(64, 64), torch.ones(1000)
    product = cost_of(lambda: one @ one, limits=EVEN)
    assert product == Cost(flops=524_288, least_s=524_288e-9, bandwidth_bound_s=0.0)
    both = cost_of(lambda: (one.T @ one.view(64, 64), other + other), limits=EVEN)
    assert both.flops == product.flops
    assert both.bandwidth_bound_s == pytest.approx(12_000e-9)
    assert both.least_s == pytest.approx(536_288e-9)
    slow = cost_of(lambda: one @ one, limits=Limits(flops_per_s=1e9, bytes_per_s=1e6))
    assert slow.bandwidth_bound_s == slow.least_s == pytest.approx(0.049152)


def test_memory_that_nothing_is_written_to_moves_nothing() -> None:
    wide = torch.ones(1, 1000).expand(1000, 1000)
    assert cost_of(lambda: torch.empty(10**6), limits=EVEN).least_s == 0.0
    assert cost_of(lambda: wide.sum(), limits=EVEN).least_s == pytest.approx(4004e-9)


def test_step_of_a_model_without_its_numbers_costs_the_same() -> None:
    """As it is counted where parameters are shared out over ranks."""
    stage = Regression()
    batch = next(endless(stage.loader, 0))
    measure = partial(cost_of, limits=EVEN)
    found = of_step(stage, batch, measure)
    with ShapesOf(stage.model).in_place_of(stage):
        assert of_step(stage, batch, measure) == found
    assert found.bandwidth_bound_s > 0


def test_log_has_utilisation_and_what_bounds_a_step(tmp_path: Path) -> None:
    train(Regression(), make_config(tmp_path, "training.log_every=2"))
    steps = records(tmp_path, "step")
    assert steps
    assert all(line[MFU] > 0 and 0 < line[BANDWIDTH_BOUND] <= 1 for line in steps)
