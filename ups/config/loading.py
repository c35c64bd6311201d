"""Reading a configuration: YAML with `include:`, then dotted overrides; and writing it back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from ups.config.old_names import take_out_old_names
from ups.config.problems import all_problems, as_own
from ups.config.run import RunConfig
from ups.data.config import SharedConfigError, expect_like, parse_overrides, read_yaml
from ups.errors import ConfigError


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
) -> RunConfig:
    """Read a configuration; later sources win: included files, the file, dotted overrides.

    `include:` names one file or a list of them, relative to the file that it stands in. Values of overrides
    are YAML: `training.lr=1e-4`, `data.task=[burgers1d,advection1d]`.

    Args:
        source: YAML file, or the keys that one would hold, such as those in a checkpoint, or None.
        overrides: `key=value` with dotted keys.
        name: What errors call the source; by default its path.

    Raises:
        ConfigError: Names each wrong key, what was found, what is expected, and the nearest known key.
    """
    path = None if source is None or isinstance(source, Mapping) else Path(source)
    keys = dict(source) if isinstance(source, Mapping) else {}
    where = name or path
    try:
        file = OmegaConf.create(keys) if path is None else read_yaml(path)
        given = parse_overrides(overrides)
        expect_like(OmegaConf.to_container(file), OmegaConf.to_container(given))
        values = OmegaConf.to_container(OmegaConf.merge(file, given), resolve=True, throw_on_missing=True)
    except SharedConfigError as error:
        raise as_own(error) from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], path=where, hint="check the dotted keys") from error
    except TypeError as error:  # OmegaConf's, which names no key
        hint = "say the same kind here and in the files that it includes"
        raise ConfigError("a list and keys don't merge", path=where, hint=hint) from error
    assert isinstance(values, dict)
    named = {str(key): value for key, value in values.items()}
    if isinstance(data := named.setdefault("data", {}), dict) and data.get("root") is None:
        data["root"] = os.environ.get("PDEBENCH_ROOT") or "data"
    try:
        declared = tuple(map(str, named.get("tasks") or ()))
        return RunConfig.model_validate(take_out_old_names(named), context={"tasks": declared})
    except ValidationError as error:
        outside = [override.partition("=")[0] for override in overrides]
        raise all_problems(error, model=RunConfig, path=where, outside=outside) from error


def dump_config(config: RunConfig) -> str:
    """Write a configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
