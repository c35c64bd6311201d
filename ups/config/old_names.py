"""Keys of earlier configurations: what is taken out with a warning, and what is refused when switched on.

A key that means nothing any more is dropped. A key whose feature isn't there yet may stand in a file as long
as it is switched off; switched on it is an error, so that nobody believes to use what isn't used.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterator
from typing import Any

from ups.errors import ConfigError, ConfigWarning

# Patterns of dotted keys, and why the key means nothing.
MEANINGLESS = {
    "training.dt": "the physical step is the difference of the stored times",
    "training.num_gpus": "`torchrun --nproc-per-node N` starts a process a GPU",
    "training.persistent_workers": "readers live as long as the build does",
    "training.cache_dir": "training.latent_cache_dir says where latents are",
    "training.checkpoint_interval": "checkpoint.interval says it, in optimiser steps",
    "training.inverse_loss_warmup_epochs": "inverse losses have their weight from the start",
    "training.inverse_loss_max_weight": "inverse losses have weight 1",
    "training.lambda_inv_enc": "inverse losses have weight 1",
    "training.lambda_inv_dec": "inverse losses have weight 1",
    "training.log_per_task_metrics": "metrics are always logged per task",
    "training.query_sampling.enabled": "query_sampling.num_queries switches it on",
    "training.query_sampling.strategy": "points are drawn uniformly",
    "data.patch_size": "encoder.patch_size says it",
    "data.shard_limit": "data.limit says it",
    "data.download": "data.files and data.root name the sources",
    "data.task_sampling": "every task gives as many batches as it has data",
    "benchmark": "cuDNN chooses its algorithms itself",
    "deterministic": "runs on a CPU always repeat to the bit",
}

# Patterns of dotted keys whose feature isn't there yet, its name, and the values that leave it off.
NOT_YET: dict[str, tuple[str, tuple[Any, ...]]] = {
    "training.use_fsdp2": ("sharded training (FSDP2)", (None, False)),
    "training.cpu_offload_optimizer": ("optimiser states on the CPU", (None, False)),
    "training.query_sampling.curriculum.enabled": ("a curriculum of queries", (None, False)),
    "training.query_sampling.curriculum": ("a curriculum of queries", (None, False)),
    "training.physics_priors.enabled": ("physics priors", (None, False)),
    "training.physics_priors": ("physics priors", (None, False)),
    "training.distill_*": ("distillation", ()),
    "training.tau_distribution": ("distillation", ()),
    "ttc.enabled": ("test-time conditioning", (None, False)),
    "ttc": ("test-time conditioning", (None, False)),
    "diffusion": ("the diffusion corrector", ()),
}
# Settings of features that have no switch of their own: their stage is the switch, and it isn't there yet.
_SET_BY_STAGE = ("training.distill_*", "training.tau_distribution", "diffusion")


def take_out_old_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without keys that mean nothing; warn about each.

    Args:
        values: Configuration as nested dictionaries; unchanged.

    Raises:
        ConfigError: Kind "not_yet", for a feature that is switched on but isn't there yet.
    """
    kept = values
    for key, value in list(_walk(values)):
        reason = _find(MEANINGLESS, key)
        if reason is not None:
            warnings.warn(f"{key} has no effect: {reason}", ConfigWarning, stacklevel=2)
            kept = _without(kept, key)
        elif (later := _find(NOT_YET, key)) is not None:
            kept = _take_out_later(kept, key, value, *later)
    return kept


def _take_out_later(
    values: dict[str, Any], key: str, value: Any, feature: str, off: tuple[Any, ...]
) -> dict[str, Any]:
    if any(fnmatch.fnmatch(key, pattern) for pattern in _SET_BY_STAGE):
        return _without(values, key)
    if isinstance(value, dict):
        if value.get("enabled") not in off:
            return values  # its own key `enabled` is refused
        return _without(values, key)
    if value not in off:
        raise ConfigError(f"{key} = {value}: {feature} isn't there yet", kind="not_yet", hint="switch it off")
    return _without(values, key)


def _find(table: dict[str, Any], key: str) -> Any:
    return next((value for pattern, value in table.items() if fnmatch.fnmatch(key, pattern)), None)


def _walk(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values, inner keys before the outer ones that hold them."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _walk(value, f"{key}.")
        yield key, value


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    name, _, rest = key.partition(".")
    if name not in values:
        return values
    if not rest:
        return {other: value for other, value in values.items() if other != name}
    return {**values, name: _without(values[name], rest)}
