"""One configuration for a whole run: which of its keys concern the build, and what they are called here.

Training, operator and the like are sections of whoever trains; a build passes over them. Where there is a
section `latent`, stores hold latents: then `training.latent_cache_dir` and `training.latent_cache_dtype` say
where and in what, instead of `cache`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OF_OTHERS = frozenset(
    ("encoder", "decoder", "operator", "training", "stages", "checkpoint", "logging", "evaluation", "seed")
)
# All keys of the sections of others that the build takes something from; tests/ups holds them to theirs.
KEYS_OF_OTHERS: dict[str, tuple[str, ...]] = {
    "training": (
        *("latent_cache_dir", "latent_cache_dtype", "num_workers", "use_parallel_encoding", "pin_memory"),
        *("batch_size", "lr", "accum_steps", "grad_clip", "ema_decay", "amp", "amp_dtype", "compile"),
        *("compile_mode", "patience", "log_path", "log_every", "device", "rank_timeout_s", "field_source"),
        *("augment", "query_sampling", "max_val_frames", "cache_mode", "prefetch_factor", "preload"),
        *("time_stride", "rollout_horizon", "lambda_spectral", "lambda_relative", "use_inverse_losses"),
        *("allow_unknown_encoder", "inverse_loss_frequency"),
    ),
    "checkpoint": ("dir", "interval", "keep_training_state"),
}
# Sections and keys of earlier configurations that nobody reads (docs/migration.md).
OLD_SECTIONS = frozenset(("diffusion", "ttc", "benchmark", "deterministic"))
OLD_KEYS: dict[str, frozenset[str]] = {
    "data": frozenset(("patch_size", "shard_limit", "download", "task_sampling")),
    "training": frozenset(
        (
            *("dt", "num_gpus", "persistent_workers", "cache_dir", "checkpoint_interval"),
            *("inverse_loss_warmup_epochs", "inverse_loss_max_weight", "lambda_inv_enc", "lambda_inv_dec"),
            "log_per_task_metrics",
        )
    ),
}
# Keys of features of training that aren't there yet; a training says so where they are switched on.
_LATER_KEYS = frozenset(("use_fsdp2", "cpu_offload_optimizer", "physics_priors", "tau_distribution"))
_LATER_PREFIX = "distill_"
FIELDS_ENCODER = "none"  # `latent.encoder` of a build of fields
_LATENT_DTYPE = "float16"
_CHECKPOINT = "autoencoder.safetensors"
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def long_dtype(value: object) -> object:
    """The name that NumPy has for a dtype, of a short one such as "bf16"; any other value as it is."""
    return _SHORT_DTYPES.get(value, value) if isinstance(value, str) else value


def keys_without_effect(values: dict[str, Any]) -> Iterator[str]:
    """One sentence for each key of a run's configuration that nobody reads.

    Args:
        values: Configuration as nested dictionaries; wrong keys of the build's own sections are errors.
    """
    for section, old in OLD_KEYS.items():
        for name in _section(values, section):
            if name in old:
                yield f"{section}.{name} has no effect; docs/migration.md says what there is instead"
    for section, known in KEYS_OF_OTHERS.items():
        passed = {*known, *OLD_KEYS.get(section, ()), *_LATER_KEYS}
        for name in map(str, _section(values, section)):
            if name not in passed and not name.startswith(_LATER_PREFIX):
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {section}.{near[0]}?" if near else "docs/training.md has the known keys"
                yield f"{section}.{name} is no key and has no effect; {hint}"


def take_build_keys(values: dict[str, Any]) -> dict[str, Any]:
    """What a run's configuration says to a build.

    Args:
        values: Configuration as nested dictionaries; unchanged.
    Returns:
        Sections of `BuildConfig`, and unknown ones, for it to refuse.
    """
    kept = {key: value for key, value in values.items() if key not in OF_OTHERS | OLD_SECTIONS}
    if isinstance(data := kept.get("data"), dict):
        kept["data"] = {key: value for key, value in data.items() if key not in OLD_KEYS["data"]}
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
