"""Peak rates by name, and the utilisation that a run logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_trainer import Regression, make_config, records, train

from ups.config import StageConfig
from ups.data.batches import endless
from ups.train.flops import ShapesOf, count_step, known_peak, precision_of
from ups.train.meter import MFU


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("Tesla T4", "float32", 8.1),
        ("NVIDIA L40S", "float16", 362),
        ("NVIDIA H200 MIG 1g.18gb", "float32", None),  # which is measured, as others are
        ("NVIDIA A10G", "float32", None),
    ],
)
def test_a_known_gpu_has_what_its_maker_says(name: str, precision: str, tera: float | None) -> None:
    assert known_peak(name, precision) == (tera and tera * 1e12)  # type: ignore[arg-type]


def test_precision_is_that_of_the_runs_products() -> None:
    by_name = {"highest": "float32", "high": "tf32", "medium": "bfloat16"}
    assert {name: precision_of(StageConfig(), matmul_precision=name) for name in by_name} == by_name
    assert precision_of(StageConfig(amp=True, amp_dtype="float16"), matmul_precision="high") == "float16"


def test_step_of_a_model_without_its_numbers_costs_the_same() -> None:
    """As it is counted where parameters are shared out over ranks."""
    stage = Regression()
    batch = next(endless(stage.loader, 0))
    expected = count_step(stage, batch)
    with ShapesOf(stage.model).in_place_of(stage):
        assert count_step(stage, batch) == expected > 0


def test_log_has_the_utilisation(tmp_path: Path) -> None:
    train(Regression(), make_config(tmp_path, "training.log_every=2"))
    steps = records(tmp_path, "step")
    assert steps
    assert all(line[MFU] > 0 for line in steps)
