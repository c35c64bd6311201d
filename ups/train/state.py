"""State of a training run in one file, for an exact resume: weights, averages, optimiser, RNG, position.

Tensors are named `model.<name>`, `ema.<name>`, `optimizer.<number>.<name>` and `rng.<device>`, the last with
a row for every rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ups.checkpoint import load_checkpoint, save_checkpoint
from ups.config import RunConfig
from ups.errors import CheckpointError
from ups.optim.ema import AveragedWeights
from ups.train.ranks import ALONE, Ranks

TRAINING = "training"  # kind of checkpoint

_MOST_SHOWN = 8  # differing keys in one message

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
    "training.rank_timeout_s",
    "training.num_workers",
    "training.pin_memory",
    "training.prefetch_factor",
    "training.preload",
    "training.use_parallel_encoding",
    "training.latent_cache_d",
)

# Settings of the operator and of the encoder's use, which an autoencoder's training doesn't look at.
_FREE_KEYS_OF_STAGE = {
    "autoencoder": (
        "operator.",
        "latent.checkpoint",
        "latent.device",
        "latent.encoder",
        "latent.compute_dtype",
        "latent.micro_batch",
        "training.time_stride",
        "training.rollout_horizon",
        "training.lambda_",
        "training.use_inverse_losses",
        "training.inverse_loss_frequency",
        "training.allow_unknown_encoder",
        "training.cache_mode",
    ),
}


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
        position: Where the run is; JSON values.
        ranks: Who trains together.

    Raises:
        OutputError: The old state is still there.
    """
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
        CheckpointError: Kinds "other_config" and "other_data" with the keys that differ, or as
            `load_checkpoint`.
    """
    try:
        tensors, document = load_checkpoint(path, kind=TRAINING)
    except CheckpointError as error:
        error.hint = "begin anew with --restart; what was exported before is kept"
        raise
    _expect_same(path, "configuration", differing_keys(document["config"], config, stage=stage))
    was, now = json.loads(json.dumps([document["data_identity"], dict(data_identity)]))
    _expect_same(path, "data", _differing(_flat(was), _flat(now)))
    model.load_state_dict(_below(tensors, "model."))
    if averaged is not None:
        averaged.restore(_below(tensors, "ema."), num_updates=document["ema_updates"])
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


def differing_keys(saved: Mapping[str, Any], config: RunConfig, *, stage: str) -> list[str]:
    """Keys that change what a stage computes and differ from a saved configuration, with both values."""
    before, now = _flat(saved), _flat(config.model_dump(mode="json"))
    return _differing(*({k: v for k, v in keys.items() if _matters(k, stage)} for keys in (before, now)))


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} was {before.get(key)} and is {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def _expect_same(path: Path, what: str, differing: list[str]) -> None:
    if differing:
        shown = "; ".join(differing[:_MOST_SHOWN])
        more = f" and {len(differing) - _MOST_SHOWN} more" if len(differing) > _MOST_SHOWN else ""
        raise CheckpointError(
            f"the training state is of another {what}: {shown}{more}",
            kind="other_config" if what == "configuration" else "other_data",
            path=path,
            hint="go back to it, use another checkpoint.dir, or --restart",
        )


def _matters(key: str, stage: str) -> bool:
    of_other_stage = key.startswith("stages.") and not key.startswith(f"stages.{stage}.")
    return not (of_other_stage or key.startswith(_FREE_KEYS + _FREE_KEYS_OF_STAGE.get(stage, ())))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat
