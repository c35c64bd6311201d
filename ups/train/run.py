"""Running a stage: device, stage, trainer, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ups.config import RunConfig
from ups.device import choose_device
from ups.train.stage import make_stage
from ups.train.trainer import Trainer


def run_stage(
    name: str, config: RunConfig, *, note: Callable[[str], None], restart: bool = False
) -> dict[str, Any]:
    """Train a stage from where it was left, or from the start.

    Args:
        name: Name of the stage.
        config: Configuration of the run.
        note: Told what people should know.
        restart: Begin anew although there is a state to continue from.

    Returns:
        The stage's report, with `seconds` and `cpu_seconds`.

    Raises:
        UpsError: Configuration, checkpoint, divergence, interruption.
        ups_store.StoreError: The data can't be read.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    device = choose_device(config.training.device, note=note)
    stage = make_stage(name, config, device=device)
    trainer = Trainer(stage, config, device=device, restart=restart)
    report = trainer.fit()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return {**report, "stage": name, "steps": trainer.step, "seconds": seconds, "cpu_seconds": cpu_seconds}
