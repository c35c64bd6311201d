"""One configuration for a whole run: which of its keys concern the build, and what they are called here.

Training, operator and the like are sections of whoever trains; a build passes over them. Where there is a
section `latent`, stores hold latents: then `training.latent_cache_dir` and `training.latent_cache_dtype` say
where and in what, instead of `cache`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

OF_OTHERS = frozenset(
    ("encoder", "decoder", "operator", "training", "stages", "checkpoint", "logging", "evaluation", "seed")
)
# Sections and keys of `data` that earlier configurations have and nobody reads (docs/migration.md).
OLD_SECTIONS = frozenset(("diffusion", "ttc", "benchmark", "deterministic"))
OLD_DATA_KEYS = frozenset(("patch_size", "shard_limit", "download", "task_sampling"))
FIELDS_ENCODER = "none"  # `latent.encoder` of a build of fields
_LATENT_DTYPE = "float16"
_CHECKPOINT = "autoencoder.safetensors"


def take_build_keys(values: dict[str, Any]) -> dict[str, Any]:
    """What a run's configuration says to a build.

    Args:
        values: Configuration as nested dictionaries; unchanged.
    Returns:
        Sections of `BuildConfig`, and unknown ones, for it to refuse.
    """
    kept = {key: value for key, value in values.items() if key not in OF_OTHERS | OLD_SECTIONS}
    if isinstance(data := kept.get("data"), dict):
        kept["data"] = {key: value for key, value in data.items() if key not in OLD_DATA_KEYS}
    training, checkpoint = _section(values, "training"), _section(values, "checkpoint")
    kept["reading"] = _reading(training) | _section(values, "reading")
    if not kept["reading"]:
        del kept["reading"]
    latent = values.get("latent")
    if not isinstance(latent, dict):
        return kept
    if latent.get("encoder") == FIELDS_ENCODER:
        del kept["latent"]
        return kept
    folder = Path(str(checkpoint.get("dir") or "checkpoints"))
    said = {name: value for name, value in latent.items() if value is not None}
    kept["latent"] = {"checkpoint": str(folder / _CHECKPOINT)} | _pinned(training) | said
    kept["cache"] = _section(values, "cache") | _latent_cache(training)
    return kept


def _reading(training: dict[str, Any]) -> dict[str, Any]:
    """How sources are read, by the names of `training`."""
    if training.get("use_parallel_encoding") is False:
        return {"num_workers": 0}
    return {"num_workers": training["num_workers"]} if training.get("num_workers") is not None else {}


def _pinned(training: dict[str, Any]) -> dict[str, Any]:
    return {"pin_memory": training["pin_memory"]} if training.get("pin_memory") is not None else {}


def _latent_cache(training: dict[str, Any]) -> dict[str, Any]:
    dtype = training.get("latent_cache_dtype") or _LATENT_DTYPE
    folder = training.get("latent_cache_dir")
    return {"dtype": dtype} | ({"dir": folder} if folder else {})


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return dict(section) if isinstance(section, dict) else {}
