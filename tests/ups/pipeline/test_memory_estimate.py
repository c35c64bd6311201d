"""The estimate of memory, against what PyTorch keeps of a step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small_runs import make_small_run
from torch import Tensor

from ups.config import load_config
from ups.device import choose_device
from ups.pipeline.memory_estimate import estimate_stages
from ups.train.stage import make_stage
from ups.train.trainer import Trainer


@pytest.mark.parametrize("stage", ["autoencoder", "operator"])
def test_steps_keep_no_more_than_the_estimate(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_small_run(tmp_path)
    more = ["operator.state=fields", "cache.dir=cache"] if stage == "operator" else []
    config = load_config(Path("run.yaml"), overrides=["training.prefetch_factor=0", *more])
    if stage == "operator":
        from ups_store.build import Watcher, build_all

        build_all(config.build, watcher=Watcher())
    made = make_stage(stage, config, device=choose_device("cpu"))
    trainer = Trainer(made, config, device=torch.device("cpu"), restart=True)
    trainer.train_step()  # operations are counted in the first one, by another pass
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.train_step()
    made.close()
    made.loader.close()
    grid = made.model.spec.tasks["burgers1d"].grid
    estimate = estimate_stages(config, (stage,), {"burgers1d": grid})[stage]
    weights = 4 * sum(weight.numel() for weight in made.model.parameters())
    assert sum(kept.values()) < estimate.total < 40 * sum(kept.values())
    assert estimate.states >= 4 * weights
    assert math.isfinite(estimate.activations)
