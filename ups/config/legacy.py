"""Keys of earlier configurations: what means nothing any more, and what other words mean today.

A training and a build read the same files and both pass over the former. Nothing is imported but for types: a
build shall not wait for the models of a run.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

# Patterns of dotted keys, and why the key means nothing.
MEANINGLESS = {
    "training.dt": "the physical step is the difference of the stored times",
    "training.persistent_workers": "readers live as long as the build does",
    "training.cache_dir": "training.latent_cache_dir says where latents are",
    "training.checkpoint_interval": "checkpoint.interval says it, in optimiser steps",
    "training.log_per_task_metrics": "metrics are always logged per task",
    "training.query_sampling.enabled": "query_sampling.num_queries switches it on",
    "training.query_sampling.strategy": "points are drawn uniformly",
    "data.patch_size": "encoder.patch_size says it",
    "data.shard_limit": "data.limit says it",
    "data.download": "data.files and data.root name the sources",
    "data.task_sampling": "every task gives as many batches as it has data",
    "ttc.steps": "a rollout is as long as --horizon says",
    "ttc.dt": "the physical step is the difference of the stored times",
    "ttc.beam_width": "one state is kept a step",
    "ttc.horizon": "candidates are compared after one step",
    "ttc.max_evaluations": "ttc.candidates bounds them",
    "ttc.early_stop_margin": "all candidates are compared",
    "ttc.gamma": "candidates are compared after one step",
    "ttc.sampler": "ttc.noise_std says it",
    "ttc.reward": "candidates are scored by the laws of their task",
    "ttc.decoder": "the operator's file holds its decoder",
    "stages.consistency_distill.tau_schedule": "training.distill_num_taus says it, for all epochs",
    "stages.consistency_distill.target_loss": "gates decide on a student, and no single loss",
    "stages.consistency_distill.distill_*": "training.distill_num_taus and distill_micro_batch say it",
    "benchmark": "cuDNN chooses its algorithms itself",
    "deterministic": "runs on a CPU always repeat to the bit",
}

# Earlier switches, and the key and value that each means where it is true.
SWITCHES = {
    "operator.pdet.use_activation_checkpoint": ("training.activation_checkpointing", "full"),
    "operator.pdet.use_flex": ("operator.attention", "flex"),
    "training.use_flex": ("operator.attention", "flex"),
    "training.use_fsdp2": ("training.parallel", "fsdp2"),
}


def without_meaningless(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a configuration without the keys that mean nothing, and the reason of each by its dotted key.

    Args:
        values: Configuration as nested dictionaries; unchanged.
    """
    reasons = {}
    for key in list(_walk(values)):
        if reason := next((why for old, why in MEANINGLESS.items() if fnmatch.fnmatch(key, old)), None):
            reasons[key], values = reason, without(values, key)
    return values, reasons


def with_present_switches(values: Any) -> Any:
    """Say by today's key what an earlier switch says, unless that key is given, too."""
    for old, (new, value) in SWITCHES.items():
        *places, last = old.split(".")
        switch = inner(values, *places).get(last, False)
        if switch is None:
            values = without(values, old)
        if switch is not True:
            continue
        name, _, key = new.partition(".")
        if isinstance(values.get(name, {}), dict) and key not in inner(values, name):
            values = {**values, name: {**inner(values, name), key: value}}
    return values


def contradictions(values: dict[str, Any]) -> Iterator[str]:
    """Say which switches of a whole configuration contradict the keys that they mean, a sentence each."""
    for old, (new, value) in SWITCHES.items():
        is_on, found = (inner(values, *key.split(".")[:-1])[key.rpartition(".")[2]] for key in (old, new))
        # Of parameters that are shared out in two ways either is what the switch means.
        if is_on and found != value and not (new == "training.parallel" and found != "ddp"):
            yield f"{old} means {new} = {value}, not {found}"


def inner(values: Any, *names: Any) -> dict[Any, Any]:
    """An inner mapping; an empty one where there is none."""
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Values without a dotted key."""
    name, _, rest = key.partition(".")
    if name not in values:
        return values
    if not rest:
        return {other: value for other, value in values.items() if other != name}
    return {**values, name: without(values[name], rest)}


def _walk(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys, inner keys before the outer ones that hold them."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _walk(value, f"{key}.")
        yield key
