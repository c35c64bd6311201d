"""`SavedState`: what a saved training state was made with, and whether it is of this run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.checkpoint import read_document
from ups.config import RunConfig
from ups.errors import CheckpointError, ConfigError

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

    def expect_config(self, config: RunConfig, *, stage: str) -> None:
        """Fail unless a stage would compute the same.

        Raises:
            CheckpointError: Kind "other_config", with the keys that differ.
        """
        differing = differing_keys(self.document["config"], config, stage=stage)
        _expect_same(self.path, "configuration", differing)

    def expect_data(self, data_identity: Mapping[str, Any]) -> None:
        """Fail unless these are the data that the state was trained on.

        Raises:
            CheckpointError: Kind "other_data", with what differs.
        """
        was, now = json.loads(json.dumps([self.document["data_identity"], dict(data_identity)]))
        _expect_same(self.path, "data", _differing(_flat(was), _flat(now)))


def state_path(config: RunConfig, stage: str) -> Path:
    """Where the state of a stage is saved."""
    return config.checkpoint.dir / f"{stage}.training.safetensors"


@contextmanager
def hinting_at_restart() -> Iterator[None]:
    """Inside, a state that can't be read says how to go on without it."""
    try:
        yield
    except CheckpointError as error:
        error.hint = "begin anew with --restart; what was exported before is kept"
        raise


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
        error = CheckpointError(
            f"the training state is of another {what}: {shown}{more}",
            kind="other_config" if what == "configuration" else "other_data",
            path=path,
            hint="go back to it, use another checkpoint.dir, or --restart",
        )
        error.exit_code = ConfigError.exit_code  # as for a store that is of something else
        raise error


def _matters(key: str, stage: str) -> bool:
    of_other_stage = key.startswith("stages.") and not key.startswith(f"stages.{stage}.")
    return not (of_other_stage or key.startswith(_FREE_KEYS + _FREE_KEYS_OF_STAGE.get(stage, ())))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat
