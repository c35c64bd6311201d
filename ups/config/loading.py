"""Reading a configuration: YAML with `include:`, then dotted overrides; and writing it back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from ups.config.old_names import take_out_old_names
from ups.config.problems import all_problems, as_own
from ups.config.run import RunConfig
from ups.data.config import SharedConfigError, parse_overrides, read_yaml
from ups.errors import ConfigError


def load_config(path: str | os.PathLike[str] | None = None, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration; later sources win: included files, the file, dotted overrides.

    `include:` names one file or a list of them, relative to the file that it stands in. Values of overrides
    are YAML: `training.lr=1e-4`, `data.task=[burgers1d,advection1d]`.

    Args:
        path: YAML file, or None.
        overrides: `key=value` with dotted keys.

    Raises:
        ConfigError: Names each wrong key, what was found, what is expected, and the nearest known key.
    """
    path = None if path is None else Path(path)
    try:
        merged = OmegaConf.merge({} if path is None else read_yaml(path), parse_overrides(overrides))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except SharedConfigError as error:
        raise as_own(error) from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], path=path, hint="check the dotted keys") from error
    except TypeError as error:  # OmegaConf's, of a list over keys
        hint = "see docs/training.md for the known keys"
        raise ConfigError("a list and keys don't merge", path=path, hint=hint) from error
    assert isinstance(values, dict)
    named = {str(key): value for key, value in values.items()}
    if isinstance(data := named.setdefault("data", {}), dict) and data.get("root") is None:
        data["root"] = os.environ.get("PDEBENCH_ROOT") or "data"
    try:
        declared = tuple(map(str, named.get("tasks") or ()))
        return RunConfig.model_validate(take_out_old_names(named), context={"tasks": declared})
    except ValidationError as error:
        outside = [override.partition("=")[0] for override in overrides]
        raise all_problems(error, model=RunConfig, path=path, outside=outside) from error


def dump_config(config: RunConfig) -> str:
    """Write a configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
