"""The same run with several training seeds: each in folders of its own, beside each other.

`ups train --seeds 0,1,2` trains into `<checkpoint.dir>/seed-0` and so on; `ups evaluate` makes one row of
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.config.loading import load_config
from ups.config.run import RunConfig
from ups.config.stage_keys import flat_keys, stages_of
from ups.errors import ConfigError
from ups.log import quiet
from ups.trained.specs import OPERATOR_FILE

_PREFIX = "seed-"
# What `seed_overrides` changes, and a run's own folders.
_OF_A_SEED = (
    *("seed", "checkpoint.dir", "training.latent_cache_dir", "training.log_path", "logging.wandb.run_name"),
    *("pipeline.dir", "pipeline.report_dir"),
)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from "0,1,2", in that order."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words) or len({*map(int, words)}) < len(words):
        raise ConfigError("--seeds", expected="different whole numbers, such as 0,1,2", found=repr(text))
    return tuple(map(int, words))


def seed_folder(folder: Path, seed: int) -> Path:
    """Where a seed's checkpoints lie in the folder of all."""
    return folder / f"{_PREFIX}{seed}"


def trained_seeds(folder: Path) -> tuple[int, ...]:
    """The seeds of which an operator lies in the folder of all, in order."""
    names = (path.parent.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*/{OPERATOR_FILE}"))
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def seed_overrides(config: RunConfig, seed: int) -> list[str]:
    """What a seed changes of a run's configuration, as `key=value`: the seed, and where its own files go.

    Latents are the seed's own, as its autoencoder is, unless `latent.checkpoint` gives all the same one.
    Stores of fields serve all seeds.
    """
    values: dict[str, str | int] = {
        "seed": seed,
        "checkpoint.dir": str(seed_folder(config.checkpoint.dir, seed)),
    }
    if config.latent.checkpoint is None:
        latents = config.training.latent_cache_dir or config.cache.dir
        values["training.latent_cache_dir"] = str(seed_folder(latents, seed))
    if (log := config.training.log_path) is not None:
        values["training.log_path"] = str(log.with_name(f"{log.stem}-{_PREFIX}{seed}{log.suffix}"))
    if (name := config.logging.wandb.run_name) is not None:
        values["logging.wandb.run_name"] = f"{name}-{_PREFIX}{seed}"
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def without_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a configuration by dotted key, but the seed and where its own files go.

    Args:
        values: Of `RunConfig.model_dump`.
    """
    return {key: value for key, value in flat_keys(values).items() if key not in _OF_A_SEED}


def with_seeds(
    config: RunConfig, seeds: Sequence[int], *, config_path: Path | None, overrides: Sequence[str]
) -> list[RunConfig]:
    """A run's configuration with each seed, in its folders; as it is where no seeds are given.

    Args:
        config: What the file and the overrides say.
    """
    with quiet():
        return [
            load_config(config_path, overrides=[*overrides, *seed_overrides(config, seed)]) for seed in seeds
        ] or [config]


def family_of(config: RunConfig) -> str:
    """What decides a training but for its seed: equal for runs that differ in nothing else, as JSON text."""
    values = flat_keys(config.model_dump(mode="json"))
    return json.dumps({key: values[key] for key in sorted(values) if key != "seed" and stages_of(key)})
