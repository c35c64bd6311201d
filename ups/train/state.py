"""State of a training run, for an exact resume: tensors, configuration, position, RNG (`StateFiles`).

Tensors are named as in `StateTensors`, and `rng.<device>`, with a row for every rank. What the state was
made with, and whether it is of this run, `ups.train.saved_state` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.config import RunConfig
from ups.distributed.ranks import ALONE, Ranks
from ups.errors import CheckpointError
from ups.train.saved_state import NAMED_BY, POSITION, SavedState, check_same, hinting_at_restart
from ups.train.state_files import StateFiles, read_tensors
from ups.train.state_tensors import StateTensors


def save_state(
    files: StateFiles,
    tensors: StateTensors,
    *,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    data_identity: Mapping[str, Any],
    position: Mapping[str, Any],
    is_over: bool,
    ema_updates: int,
    ranks: Ranks = ALONE,
) -> None:
    """Write everything that continuing needs, atomically; a collective.

    Args:
        files: What writes it, perhaps later.
        tensors: Of the training.
        scaler: Scaler of fp16 gradients.
        data_identity: What the run is trained on; JSON values.
        position: Where the run is; JSON values by the names in `POSITION`.
        is_over: Whether nothing is left to train.
        ema_updates: Updates that made the averages.

    Raises:
        OutputError: The old state is still there.
    """
    assert position.keys() == POSITION
    rng = {"rng.cpu": ranks.gather(torch.get_rng_state())}
    if torch.cuda.is_available():
        rng["rng.cuda"] = ranks.gather(torch.cuda.get_rng_state())
    document = {
        "config": config.model_dump(mode="json"),
        "data_identity": dict(data_identity),
        "position": dict(position),
        "is_over": is_over,
        "scaler": scaler.state_dict(),
        "ema_updates": ema_updates,
        "named_by": NAMED_BY,
    }
    files.save(tensors.now(), rng=rng, document=document)


def load_state(
    path: Path,
    tensors: StateTensors,
    *,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    data_identity: Mapping[str, Any],
    stage: str,
    ranks: Ranks = ALONE,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Bring everything to where `save_state` left it, and return the position and the stage's own tensors.

    A rank that wasn't there when the state was saved keeps its own state of random numbers.

    Raises:
        CheckpointError: Kinds "too_old", "other_config" and "other_data" with the keys that are missing or
            differ, or as `load_checkpoint`.
        OtherTensorsError: As `StateTensors.fill`.
    """
    with hinting_at_restart():
        saved, document = read_tensors(path, form_of=tensors.form_of, ranks=ranks)
    state = SavedState(path, document)
    state.check_config(config, stage=stage)
    state.check_data(data_identity)
    with hinting_at_restart():
        own = tensors.fill(saved, ema_updates=document["ema_updates"], path=path)
    scaler.load_state_dict(document["scaler"])
    if ranks.rank < len(saved["rng.cpu"]):
        torch.set_rng_state(saved["rng.cpu"][ranks.rank].clone())  # PyTorch wants a storage of its own
        if torch.cuda.is_available() and "rng.cuda" in saved:
            torch.cuda.set_rng_state(saved["rng.cuda"][ranks.rank].clone())
    return dict(document["position"]), own


def check_batch(path: Path, *, saved: int, now: int, ranks: Ranks) -> None:
    """Fail unless a run goes on with batches of as many rows, over all ranks.

    Raises:
        CheckpointError: Kind "other_config", with both numbers.
    """
    if saved != now:
        check_same(
            path,
            "configuration",
            [f"a batch over all ranks had {saved} rows and has {now} on {ranks.world_size} ranks"],
            hint=f"training.global_batch_size={saved} keeps it, on any number of ranks that divides it",
        )


def check_shared(path: Path, *, step: int, ranks: Ranks) -> None:
    """Fail unless all ranks found the same state; a collective.

    Raises:
        CheckpointError: Kind "not_shared".
    """
    if len(set(ranks.gather(torch.tensor(step)).tolist())) > 1:
        hint = "put checkpoint.dir where every machine sees it"
        raise CheckpointError("not all ranks see it", kind="not_shared", path=path, hint=hint)
