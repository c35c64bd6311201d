"""State of a training run in one file, for an exact resume: weights, averages, optimiser, RNG, position.

Tensors are named `model.<name>`, `ema.<name>`, `optimizer.<number>.<name>` and `rng.<device>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ups.checkpoint import load_checkpoint, save_checkpoint
from ups.config import RunConfig
from ups.errors import CheckpointError
from ups.optim.ema import AveragedWeights

TRAINING = "training"  # kind of checkpoint

# Keys that don't change what a step computes, so they may differ between a run and its continuation.
_FREE_KEYS = (
    "checkpoint.",
    "logging.",
    "evaluation.",
    "reading.",
    "cache.dir",
    "data.root",
    "training.log_",
    "training.patience",
    "training.device",
    "training.num_workers",
    "training.pin_memory",
    "training.prefetch_factor",
    "training.preload",
    "training.use_parallel_encoding",
    "training.latent_cache_d",
)


def save_state(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averaged: AveragedWeights | None,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    position: Mapping[str, Any],
) -> None:
    """Write everything that continuing needs, atomically.

    Args:
        path: The file.
        model: Model, without wrappers.
        optimizer: Its optimiser.
        averaged: Averaged weights, if there are any.
        scaler: Scaler of fp16 gradients.
        config: Configuration of the run.
        position: Where the run is; JSON values.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if averaged is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in averaged.averages.items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items() if value is not None}
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    document = {
        "config": config.model_dump(mode="json"),
        "position": dict(position),
        "scaler": scaler.state_dict(),
        "ema_updates": averaged.num_updates if averaged is not None else 0,
    }
    save_checkpoint(path, tensors, kind=TRAINING, document=document)


def load_state(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averaged: AveragedWeights | None,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    stage: str,
) -> dict[str, Any]:
    """Bring everything to where `save_state` left it, and return the position.

    Raises:
        CheckpointError: Kind "other_config" with the keys that differ, or as `load_checkpoint`.
    """
    tensors, document = load_checkpoint(path, kind=TRAINING)
    _expect_same_config(path, document["config"], config, stage)
    model.load_state_dict(_below(tensors, "model."))
    if averaged is not None:
        averaged.restore(_below(tensors, "ema."), num_updates=document["ema_updates"])
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in _below(tensors, "optimizer.").items():
        number, _, name = key.partition(".")
        states.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    scaler.load_state_dict(document["scaler"])
    torch.set_rng_state(tensors["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    return dict(document["position"])


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}


def _expect_same_config(path: Path, saved: Mapping[str, Any], config: RunConfig, stage: str) -> None:
    before, now = _flat(saved), _flat(config.model_dump(mode="json"))
    differing = [
        f"{key} was {before.get(key)} and is {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and _matters(key, stage)
    ]
    if differing:
        raise CheckpointError(
            f"the training state is of another configuration: {'; '.join(differing)}",
            kind="other_config",
            path=path,
            hint="go back to it, use another checkpoint.dir, or --restart",
        )


def _matters(key: str, stage: str) -> bool:
    of_other_stage = key.startswith("stages.") and not key.startswith(f"stages.{stage}.")
    return not (key.startswith(_FREE_KEYS) or of_other_stage)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat
