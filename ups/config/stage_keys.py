"""Which keys of a configuration change what a stage computes: by them a training is kept, continued or begun.

Without torch, so that what a run would do can be said before anything is imported that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_args, get_origin

from ups.config.run import RunConfig
from ups.config.stages import (
    BASELINE_LR,
    BASELINES,
    STAGE_NAMES,
    OptimizerConfig,
    SchedulerConfig,
    StageConfig,
)
from ups.config.training import TrainingConfig
from ups.section import Section, fact

# Keys of `training` that each stage may have for itself, and where it has them.
OF_STAGES: dict[str, tuple[str, ...]] = {
    key: (key,) for key in TrainingConfig.model_fields if key in StageConfig.model_fields
}
OF_STAGES["lr"] = ("optimizer", "lr")
OF_STAGES["cpu_offload_optimizer"] = ("optimizer", "cpu_offload")

# Keys of `training` that another one switches on.
SWITCHED_BY: dict[str, str] = {
    key: switch for key, field in TrainingConfig.model_fields.items() if (switch := fact(field, "needs"))
}
# How long a build may take for a batch, and where stores are shared: no store depends on it.
NOT_OF_STORES = (
    *("cache.encode_timeout_s", "cache.commit_timeout_s"),
    *("cache.remote", "cache.remote_timeout_s"),
)
_DEFAULTS = StageConfig().model_dump(mode="json")  # of a stage that isn't named


@cache
def stages_of(key: str) -> frozenset[str]:
    """Stages that compute something else with another value of a dotted key, as its field says; see `key`."""
    affects, within, model = frozenset(STAGE_NAMES), dict[str, Any](), RunConfig
    words = iter(key.split("."))
    for word in words:
        affects = frozenset(within.get(word, affects))
        field = getattr(model, "model_fields", {}).get(word)
        if field is None:  # of another version
            break
        said, within = fact(field, "affects"), fact(field, "affects_within") or {}
        affects = affects if said is None else frozenset(said)
        model = field.annotation
        if get_origin(model) is dict:
            model, name = get_args(model)[1], next(words, "")
            affects = frozenset({name}) if word == "stages" else affects
    return affects


def stage_keys(config: RunConfig | Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Values by dotted key of what changes what a stage computes, as the stage uses them.

    What a stage may have for itself is the stage's key, whether it says it or takes it from `training`; what
    another setting switches off is left out, and of a stage that trains nothing all about training.

    Args:
        config: Of a run, or the values that one was saved as.
    """
    values = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    flat = flat_keys(_DEFAULTS, f"stages.{stage}.") | flat_keys(values)
    is_untrained = stage == "autoencoder" and flat.get("encoder.residual") is False
    left_out = {f"training.{key}" for key in OF_STAGES}
    for key, place in OF_STAGES.items():
        own = ".".join(("stages", stage, *place))
        sources = [own, f"training.{key}"]
        if stage in BASELINES:
            sources.insert(1, ".".join(("stages.operator", *place)))
        if stage in BASELINES and key == "lr":
            flat[own] = flat[own] or BASELINE_LR[stage]
        flat[own] = next((flat[name] for name in sources if flat.get(name) is not None), None)
    for key, switch in SWITCHED_BY.items():
        where = f"stages.{stage}" if key in OF_STAGES else "training"
        if not flat.get(f"{where}.{switch}"):
            left_out.add(f"{where}.{key}")
    for section, model in (("optimizer", OptimizerConfig), ("scheduler", SchedulerConfig)):
        kind = flat.get(f"stages.{stage}.{section}.name")
        left_out |= {f"stages.{stage}.{section}.{name}" for name in not_read(model, kind)}
    of_training = ("stages.", "training.") if is_untrained else ()
    return {
        key: value
        for key, value in flat.items()
        if stage in stages_of(key) and key not in left_out and not key.startswith(of_training)
    }


def not_read(section: type[Section], kind: str | None) -> list[str]:
    """Keys of an optimiser or schedule that a kind of it doesn't read."""
    readers = {name: fact(field, "read_by") for name, field in section.model_fields.items()}
    return [name for name, kinds in readers.items() if kinds is not None and kind not in kinds]


def nested_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of values by dotted key, such as `flat_keys` gives."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return nested


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's values by dotted key, such as those of `RunConfig.model_dump`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flat_keys(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat
