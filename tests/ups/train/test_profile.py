"""`--profile STEPS`: which steps are recorded, what is left, and what the verdict is made of."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_trainer import Regression, make_config, records, train
from torch._C._autograd import DeviceType

from ups.train.profile import profiling, shares_of


def event(name: str, begin: float, end: float, *, on_gpu: bool = False, is_own: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=begin, end=end),
        device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU,
        is_user_annotation=is_own,
    )


STEPS = [event("ups: steps", 0, 100, is_own=True), event("ups: wait for data", 10, 40, is_own=True)]


def test_gpu_time_is_kernels_then_copies_then_waiting_then_launches() -> None:
    events = [
        *STEPS,
        event("ups: steps", 0, 100, on_gpu=True, is_own=True),
        event("aten::mm", 0, 100),  # the CPU's side doesn't count
        event("gemm", 0, 15, on_gpu=True),
        event("gemm", 10, 20, on_gpu=True),  # on another stream
        event("Memcpy HtoD (Pinned -> Device)", 18, 25, on_gpu=True),
        event("Optimizer.step#AdamW.step", 0, 100, on_gpu=True, is_own=True),
    ]
    shares, seconds = shares_of(events, on_gpu=True)
    assert shares == pytest.approx({"compute": 0.20, "transfer": 0.05, "data": 0.15, "launch": 0.60})
    assert seconds == pytest.approx(100e-6)


def test_operations_that_make_a_batch_are_data_on_a_cpu() -> None:
    events = [*STEPS, event("aten::rand", 15, 30), event("aten::mm", 35, 60), event("aten::copy_", 60, 70)]
    shares, _ = shares_of(events, on_gpu=False)
    assert shares == pytest.approx({"compute": 0.30, "transfer": 0.0, "data": 0.30, "launch": 0.40})


def test_steps_after_the_warm_up_are_recorded_once_and_nothing_else_changes(tmp_path: Path) -> None:
    with profiling(3):
        profiled = train(Regression(), make_config(tmp_path))
    (record,) = records(tmp_path, "profile")
    assert record["step"] == 9  # 5 of warm-up end an epoch, so recording begins after the sixth
    assert sum(record["shares"].values()) == pytest.approx(1)
    assert record["verdict"] == max(record["shares"], key=record["shares"].get)
    trace = json.loads((tmp_path / "autoencoder.trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("ups: wait for data") == 3
    assert any(name and name.startswith("aten::") for name in names)
    plain = train(Regression(), make_config(tmp_path / "plain"))
    for name, weight in plain.stage.model.state_dict().items():
        assert weight.equal(profiled.stage.model.state_dict()[name])


def test_too_few_steps_are_a_warning(tmp_path: Path) -> None:
    with profiling(3):
        train(Regression(), make_config(tmp_path, "stages.autoencoder.epochs=1"))
    (record,) = records(tmp_path, "warning")
    assert "no step was profiled" in record["text"]
    assert not (tmp_path / "autoencoder.trace.json").exists()
