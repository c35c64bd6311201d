"""State of a training run in one file, for an exact resume: weights, averages, optimiser, RNG, position.

Tensors are named `model.<name>`, `ema.<name>`, `optimizer.<number>.<name>` and `rng.<device>`, the last with
a row for every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ups.config import RunConfig
from ups.errors import CheckpointError
from ups.optim import AveragedWeights
from ups.train.ranks import ALONE, Ranks
from ups.train.saved_state import POSITION, TRAINING, SavedState, hinting_at_restart
from ups.trained.checkpoint import fill_weights, load_checkpoint, save_checkpoint


def save_state(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averaged: AveragedWeights | None,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    data_identity: Mapping[str, Any],
    position: Mapping[str, Any],
    ranks: Ranks = ALONE,
) -> None:
    """Write everything that continuing needs, atomically; a collective, of which the first rank writes.

    Args:
        path: The file.
        model: Model, without wrappers.
        optimizer: Its optimiser.
        averaged: Averaged weights, if there are any.
        scaler: Scaler of fp16 gradients.
        config: Configuration of the run.
        data_identity: What the run is trained on; JSON values.
        position: Where the run is; JSON values by the names in `POSITION`.
        ranks: Who trains together.

    Raises:
        OutputError: The old state is still there.
    """
    assert position.keys() == POSITION
    rng = {"rng.cpu": ranks.gather(torch.get_rng_state())}
    if torch.cuda.is_available():
        rng["rng.cuda"] = ranks.gather(torch.cuda.get_rng_state())
    if not ranks.is_first:
        return
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if averaged is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in averaged.averages.items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items() if value is not None}
    document = {
        "config": config.model_dump(mode="json"),
        "data_identity": dict(data_identity),
        "position": dict(position),
        "scaler": scaler.state_dict(),
        "ema_updates": averaged.num_updates if averaged is not None else 0,
    }
    save_checkpoint(path, tensors | rng, kind=TRAINING, document=document)


def load_state(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averaged: AveragedWeights | None,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    data_identity: Mapping[str, Any],
    stage: str,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Bring everything to where `save_state` left it, and return the position.

    A rank that wasn't there when the state was saved keeps its own state of random numbers.

    Raises:
        CheckpointError: Kinds "too_old", "other_config" and "other_data" with the keys that are missing or
            differ, "other_weights", or as `load_checkpoint`.
    """
    with hinting_at_restart():
        tensors, document = load_checkpoint(path, kind=TRAINING)
    saved = SavedState(path, document)
    saved.expect_config(config, stage=stage)
    saved.expect_data(data_identity)
    with hinting_at_restart():
        fill_weights(model, _below(tensors, "model."), path=path)
        if averaged is not None:
            updates = document["ema_updates"]
            averaged.restore(_below(tensors, "ema."), num_updates=updates, path=path)
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in _below(tensors, "optimizer.").items():
        number, _, name = key.partition(".")
        states.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    scaler.load_state_dict(document["scaler"])
    if ranks.rank < len(tensors["rng.cpu"]):
        torch.set_rng_state(tensors["rng.cpu"][ranks.rank].clone())  # PyTorch wants a storage of its own
        if torch.cuda.is_available() and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"][ranks.rank].clone())
    return dict(document["position"])


def expect_shared(path: Path, *, step: int, ranks: Ranks) -> None:
    """Fail unless all ranks found the same state; a collective.

    Raises:
        CheckpointError: Kind "not_shared".
    """
    if len(set(ranks.gather(torch.tensor(step)).tolist())) > 1:
        hint = "put checkpoint.dir where every machine sees it"
        raise CheckpointError("not all ranks see it", kind="not_shared", path=path, hint=hint)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
