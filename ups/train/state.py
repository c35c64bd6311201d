"""State of a training run in one file, for an exact resume: tensors, configuration, position, RNG.

Tensors are whole and named as in `StateTensors`, and `rng.<device>`, with a row for every rank. `SavedState`
says what the state was made with, and whether it is of this run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.config import RunConfig
from ups.config.loading import with_present_names
from ups.config.run import BASELINES
from ups.distributed.ranks import ALONE, Ranks
from ups.distributed.sharding import whole
from ups.errors import CheckpointError, ConfigError
from ups.train.state_tensors import StateTensors
from ups.trained.checkpoint import load_checkpoint, read_document, save_checkpoint

TRAINING = "training"  # kind of checkpoint
_MOST_SHOWN = 8  # differing keys in one message
# What a state holds, and what its position says; one that lacks any of it is of an earlier version.
_PARTS = frozenset({"config", "data_identity", "position", "scaler", "ema_updates", "named_by"})
_NAMED_BY = "parameter"  # the state of the optimiser; by number before
POSITION = frozenset(
    {
        "step",
        "global_batch_size",
        "wandb_id",
        "learning_rate",
        "stage",
        "best",
        "best_step",
        "start_score",
        "best_epoch_score",
        "bad_epochs",
        "work",
    }
)


def save_state(
    path: Path,
    tensors: StateTensors,
    *,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    data_identity: Mapping[str, Any],
    position: Mapping[str, Any],
    ema_updates: int,
    ranks: Ranks = ALONE,
) -> None:
    """Write everything that continuing needs, atomically; a collective, of which the first rank writes.

    Args:
        path: The file.
        tensors: Of the training.
        scaler: Scaler of fp16 gradients.
        config: Configuration of the run.
        data_identity: What the run is trained on; JSON values.
        position: Where the run is; JSON values by the names in `POSITION`.
        ema_updates: Updates that made the averages.
        ranks: Who trains together.

    Raises:
        OutputError: The old state is still there.
    """
    assert position.keys() == POSITION
    rng = {"rng.cpu": ranks.gather(torch.get_rng_state())}
    if torch.cuda.is_available():
        rng["rng.cuda"] = ranks.gather(torch.cuda.get_rng_state())
    saved = whole(tensors.now(), is_kept=ranks.is_first)
    if not ranks.is_first:
        return
    document = {
        "config": config.model_dump(mode="json"),
        "data_identity": dict(data_identity),
        "position": dict(position),
        "scaler": scaler.state_dict(),
        "ema_updates": ema_updates,
        "named_by": _NAMED_BY,
    }
    save_checkpoint(path, saved | rng, kind=TRAINING, document=document)


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
        saved, document = load_checkpoint(path, kind=TRAINING)
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
        _check_same(
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


# Keys that don't change what a step computes, so they may differ between a run and its continuation.
_FREE_KEYS = (
    "checkpoint.",
    "logging.",
    "evaluation.",
    "ttc.",
    "reading.",
    "cache.dir",
    "cache.codec",
    "cache.partitions",
    "data.root",
    "data.follow_external",
    "training.log_",
    "training.patience",
    "training.batch_size",  # the batch over all ranks is compared, see `check_batch`
    "training.global_batch_size",
    "training.device",
    "training.rank_timeout_s",
    "training.activation_checkpointing",
    "operator.pdet.use_activation_checkpoint",
    "training.num_workers",
    "training.pin_memory",
    "training.prefetch_factor",
    "training.preload",
    "training.use_parallel_encoding",
    "training.latent_cache_dir",
    "training.latent_cache_dtype",  # its latents are other data, which `check_data` compares
    "latent.pin_memory",
)

# Of the sections of other models, what the baselines' stages read.
_SHARED_BY_BASELINES = (
    *("operator.curriculum", "operator.val_trajectories"),
    *("baselines.horizon", "baselines.curriculum", "baselines.noise"),
)
_OTHER_MODELS = ("operator.", "latent.", "encoder.", "decoder.", "baselines.")

# Settings of the operator and of the encoder's use, which an autoencoder's training doesn't look at.
_FREE_KEYS_OF_STAGE = {
    "autoencoder": (
        "operator.",
        "latent.checkpoint",
        "latent.device",
        "latent.encoder",
        "latent.compute_dtype",
        "latent.micro_batch",
        "latent.compile",
        "training.stride",
        "training.horizon",
        "training.lambda_",
        "training.use_inverse_losses",
        "training.inverse_loss_",
        "training.physics_priors.",
        "laws.",
        "training.allow_unknown_encoder",
        "training.cache_mode",
    ),
}


@dataclass(frozen=True)
class SavedState:
    """What a state was saved of, to be compared before anything is opened, built or replaced.

    Attributes:
        path: The file.
        document: Its JSON document.
    """

    path: Path
    document: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> SavedState:
        """Read the document without the tensors.

        Raises:
            CheckpointError: As `read_document`.
        """
        with hinting_at_restart():
            return cls(path, read_document(path, kind=TRAINING))

    def check_config(self, config: RunConfig, *, stage: str) -> None:
        """Fail unless a stage can continue from the state and would compute the same.

        Raises:
            CheckpointError: Kind "too_old", with what the state lacks; "other_config", with the keys that
                differ.
        """
        self._check_complete()
        differing = differing_keys(self.document["config"], config, stage=stage)
        _check_same(self.path, "configuration", differing)

    def check_data(self, data_identity: Mapping[str, Any]) -> None:
        """Fail unless these are the data that the state was trained on.

        Raises:
            CheckpointError: Kind "other_data", with what differs.
        """
        was, now = json.loads(json.dumps([self.document["data_identity"], dict(data_identity)]))
        _check_same(self.path, "data", _differing(flat_keys(was), flat_keys(now)))

    @property
    def is_first_epoch_over(self) -> bool:
        """Whether the weights before the first step were measured already."""
        return self.document.get("position", {}).get("start_score") is not None

    def _check_complete(self) -> None:
        position = self.document.get("position", {})
        missing = sorted((_PARTS - self.document.keys()) | (POSITION - position.keys()))
        if missing:
            with hinting_at_restart():
                raise CheckpointError(
                    "the training state was written by an earlier version",
                    kind="too_old",
                    path=self.path,
                    found="no " + ", ".join(missing),
                )


def state_path(config: RunConfig, stage: str) -> Path:
    """Where the state of a stage is saved."""
    return config.checkpoint.dir / f"{stage}.training.safetensors"


@contextmanager
def hinting_at_restart() -> Iterator[None]:
    """Inside, a state that can't be read says how to go on without it."""
    try:
        yield
    except CheckpointError as error:
        error.hint = "begin again with --restart; what was exported before is kept"
        raise


def differing_keys(saved: Mapping[str, Any], config: RunConfig, *, stage: str) -> list[str]:
    """Keys that change what a stage computes and differ from a saved configuration, with both values."""
    before, now = flat_keys(with_present_names(saved)), flat_keys(config.model_dump(mode="json"))
    return _differing(*({k: v for k, v in keys.items() if _matters(k, stage)} for keys in (before, now)))


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} was {before.get(key)} and is {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def _check_same(
    path: Path,
    what: str,
    differing: list[str],
    *,
    hint: str = "go back to it, use another checkpoint.dir, or --restart",
) -> None:
    if differing:
        shown = "; ".join(differing[:_MOST_SHOWN])
        more = f" and {len(differing) - _MOST_SHOWN} more" if len(differing) > _MOST_SHOWN else ""
        error = CheckpointError(
            f"the training state is of another {what}: {shown}{more}",
            kind="other_config" if what == "configuration" else "other_data",
            path=path,
            hint=hint,
        )
        error.exit_code = ConfigError.exit_code  # as for a store that is of something else
        raise error


def _matters(key: str, stage: str) -> bool:
    of_other_stage = key.startswith("stages.") and not key.startswith(f"stages.{stage}.")
    if stage in BASELINES and key.startswith(_OTHER_MODELS):
        return key.startswith((*_SHARED_BY_BASELINES, f"baselines.{stage}."))
    if key.startswith("baselines."):
        return False
    is_batch = key.endswith(("batch_size", "global_batch_size")) and key.startswith("stages.")
    return not (of_other_stage or is_batch or key.startswith(_FREE_KEYS + _FREE_KEYS_OF_STAGE.get(stage, ())))


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's values by dotted key, such as those of `RunConfig.model_dump`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flat_keys(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat
