"""What an A/B comparison compares: a configuration, and it with switches of another, one by one and all.

A switch changes how a step is computed, not what is learnt. Switches that mean something together only, such
as `training.amp` and its dtype, are one. Whatever else differs, such as batches or losses, is in the last
variant, the other configuration itself; data and validation have to be the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.config import RunConfig, load_config
from ups.config.stage_keys import flat_keys
from ups.errors import ConfigError
from ups.log import quiet

BASELINE, TOGETHER, OPTIMIZED = "baseline", "together", "optimized"
_MOST_SHOWN = 8  # refused keys in one message

# Keys that an A/B comparison switches, and the first of those that go together with each; "*" is any stage.
SWITCHED_TOGETHER = {
    "training.amp": "training.amp",
    "training.amp_dtype": "training.amp",
    "training.matmul_precision": "training.matmul_precision",
    "training.compile": "training.compile",
    "training.compile_mode": "training.compile",
    "training.compile_regions": "training.compile",
    "stages.*.compile": "training.compile",
    "stages.*.compile_mode": "training.compile",
    "stages.*.amp": "training.amp",
    "stages.*.amp_dtype": "training.amp",
    "operator.attention": "operator.attention",
    "training.cpu_offload_optimizer": "training.cpu_offload_optimizer",
    "stages.*.optimizer.cpu_offload": "training.cpu_offload_optimizer",
    "training.activation_checkpointing": "training.activation_checkpointing",
    "training.pin_memory": "training.pin_memory",
    "training.prefetch_factor": "training.prefetch_factor",
    "training.preload": "training.preload",
    "training.inverse_loss_frequency": "training.inverse_loss_frequency",
    "training.query_sampling.num_queries": "training.query_sampling",
    "training.query_sampling.curriculum.enabled": "training.query_sampling",
    "training.query_sampling.curriculum.start_queries": "training.query_sampling",
    "training.query_sampling.curriculum.share": "training.query_sampling",
    "stages.*.optimizer.implementation": "optimizer.implementation",
}
# What no step depends on: the baseline's holds for all.
_IRRELEVANT = (
    *("checkpoint.", "logging.", "evaluation.", "ttc.", "baselines.", "reading.", "seed"),
    *("training.log_", "training.patience", "training.num_workers", "training.use_parallel_encoding"),
    *("training.rank_timeout_s", "training.stall_timeout_s", "training.latent_cache_dir", "cache."),
    *("training.compile_cache", "training.async_checkpoint"),
)
# What all are trained and validated on.
_SAME = ("data.", "training.stride", "training.max_val_frames", "operator.val_trajectories")
# What the loss is of: it isn't compared where one of these differs.
_OF_LOSS = (
    *("training.losses", "training.rollout_loss", "training.reconstruction_loss", "training.lambda_"),
    *("training.physics_priors", "training.use_inverse_losses", "training.inverse_loss"),
    *("training.horizon", "training.pushforward", "operator.state", "encoder.", "latent."),
)
# Of a stage: how long it is trained, which the comparison says itself.
_LENGTH = ("epochs", "steps_per_epoch", "steps", "budget", "patience")
# Switches that a stage takes from `training` where it says nothing itself.
_OF_TRAINING = ("amp", "amp_dtype", "compile", "compile_mode", "optimizer.cpu_offload")


@dataclass(frozen=True)
class Variant:
    """One configuration of a comparison.

    Attributes:
        name: "baseline", "together", "optimized", or what is switched.
        switches: Keys with values that differ from the baseline's.
        config: The run's configuration.
    """

    name: str
    switches: Mapping[str, Any]
    config: RunConfig

    @property
    def has_same_loss(self) -> bool:
        """Whether its loss is a number of the same kind as the baseline's."""
        return not any(key.startswith(_OF_LOSS) and _unit(key) is None for key in self.switches)


def make_variants(
    baseline: Path | None,
    optimized: Path | None,
    *,
    overrides: Sequence[str],
    only_optimized: Sequence[str],
    stage: str,
) -> list[Variant]:
    """The baseline, it with every switch of the other configuration by itself, and it with all of them.

    Args:
        baseline: YAML file or name of a shipped configuration.
        optimized: The other one.
        overrides: `key=value` of both.
        only_optimized: `key=value` of the other one alone.
        stage: Whose steps are compared.

    Raises:
        ConfigError: Kind "not_comparable" names what differs of data and validation, kind "no_difference" if
            nothing does; and those of `load_config`.
    """
    first = load_config(baseline, overrides=overrides)
    second = load_config(optimized, overrides=[*overrides, *only_optimized])
    units, others = differences(first, second, stage=stage)
    together = {key: value for unit in units.values() for key, value in unit.items()}
    variants = {BASELINE: dict[str, Any]()}
    if len(units) > 1 or others:
        variants |= {name_of(unit): unit for unit in units.values()}
    if not others:
        variants[TOGETHER if len(units) > 1 else name_of(together)] = together
    made = [
        Variant(name, switches, _load(baseline, [*overrides, *as_overrides(switches)]))
        for name, switches in variants.items()
    ]
    if others:
        folders = {"cache.dir": str(first.cache.dir), "checkpoint.dir": str(first.checkpoint.dir)}
        latents = first.training.latent_cache_dir
        own = {**folders, "training.latent_cache_dir": latents and str(latents), "seed": first.seed}
        config = _load(optimized, [*overrides, *only_optimized, *as_overrides(own)])
        made.append(Variant(OPTIMIZED, together | others, config))
    return made


def differences(
    first: RunConfig, second: RunConfig, *, stage: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What the second configuration has otherwise: keys and values of switches by unit, and of the rest.

    Raises:
        ConfigError: As `make_variants`.
    """
    before, now = (dict(_relevant(config, stage)) for config in (first, second))
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    refused = [key for key in differing if key.startswith(_SAME)]
    if refused:
        shown = "; ".join(f"{key} is {before.get(key)} and {now.get(key)}" for key in refused[:_MOST_SHOWN])
        more = f"; and {len(refused) - _MOST_SHOWN} more" if len(refused) > _MOST_SHOWN else ""
        raise ConfigError(
            f"the configurations differ in data or validation: {shown}{more}",
            kind="not_comparable",
            hint="make these equal, on the command line for both",
        )
    units: dict[str, dict[str, Any]] = {}
    others = {key: now.get(key) for key in differing if _unit(key) is None}
    for key in differing:
        if (unit := _unit(key)) is not None:
            units.setdefault(unit, {})[key] = now[key]
    if not differing:
        raise ConfigError(
            f"the configurations don't differ in what stage {stage} does",
            kind="no_difference",
            hint="give another --optimized, or --set such as training.compile=true",
        )
    return units, others


def name_of(switches: Mapping[str, Any]) -> str:
    """Switches as people would type them, such as "training.compile=true"."""
    return " ".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in switches.items())


def as_overrides(switches: Mapping[str, Any]) -> list[str]:
    """`key=value`, which a command takes; JSON is YAML, and its "off" isn't false."""
    return [f"{key}={json.dumps(value)}" for key, value in switches.items()]


def _load(source: Path | None, overrides: Sequence[str]) -> RunConfig:
    with quiet():  # what is to be said was said before
        return load_config(source, overrides=overrides)


def _relevant(config: RunConfig, stage: str) -> Iterator[tuple[str, Any]]:
    """Keys that a step of the stage may depend on."""
    own = f"stages.{stage}."
    for key, value in flat_keys(config.model_dump(mode="json")).items():
        if not key.startswith(("stages.", *_IRRELEVANT)):
            yield key, value
    # As it is in effect, be it said of the stage, of `training`, or nowhere.
    for key, value in flat_keys(config.stage(stage).model_dump(mode="json"), own).items():
        name = key.removeprefix(own)
        if not (name.startswith(_LENGTH) or (name in _OF_TRAINING and not _says(config, stage, name))):
            yield key, value


def _says(config: RunConfig, stage: str, name: str) -> bool:
    """Whether the configuration says a switch of the stage itself; else it is that of `training`."""
    said = config.stages.get(stage)
    return said is not None and flat_keys(said.model_dump(mode="json")).get(name) is not None


def _unit(key: str) -> str | None:
    """The switch that a key belongs to; None of other keys."""
    parts = key.split(".")
    return SWITCHED_TOGETHER.get(".".join(["stages", "*", *parts[2:]]) if parts[0] == "stages" else key)
