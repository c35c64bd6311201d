"""Reading a configuration: YAML with `include:`, then dotted overrides; and writing it back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from ups.config.old_names import take_out_old_names
from ups.config.problems import first_problem
from ups.config.run import RunConfig
from ups.errors import ConfigError


def load_config(path: str | os.PathLike[str] | None = None, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration; later sources win: included files, the file, dotted overrides.

    `include:` names one file or a list of them, relative to the file that it stands in. Values of overrides
    are YAML: `training.lr=1e-4`, `data.task=[burgers1d,advection1d]`.

    Args:
        path: YAML file, or None.
        overrides: `key=value` with dotted keys.

    Raises:
        ConfigError: Names the key, what was found, what is expected, and the nearest known key.
    """
    path = None if path is None else Path(path)
    try:
        merged = OmegaConf.merge({} if path is None else _read(path), _from_dotted(overrides))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], path=path, hint="check the dotted keys") from error
    assert isinstance(values, dict)
    named = {str(key): value for key, value in values.items()}
    if isinstance(data := named.setdefault("data", {}), dict) and data.get("root") is None:
        data["root"] = os.environ.get("PDEBENCH_ROOT") or "data"
    try:
        declared = tuple(map(str, named.get("tasks") or ()))
        return RunConfig.model_validate(take_out_old_names(named), context={"tasks": declared})
    except ValidationError as error:
        outside = [override.partition("=")[0] for override in overrides]
        raise first_problem(error, model=RunConfig, path=path, outside=outside) from error


def dump_config(config: RunConfig) -> str:
    """Write a configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read(path: Path, including: tuple[Path, ...] = ()) -> Any:
    """A file's values over those of the files that it includes."""
    real = path.resolve()
    if real in including:
        chain = " -> ".join(file.name for file in (*including, real))
        raise ConfigError("files include each other in a circle", path=path, found=chain)
    own = _read_yaml(path, included_by=including[-1] if including else None)
    includes = own.pop("include", None) or []
    names = [includes] if isinstance(includes, str) else list(includes)
    parts = [_read(path.parent / str(name), (*including, real)) for name in names]
    return OmegaConf.merge(*parts, own)


def _read_yaml(path: Path, *, included_by: Path | None) -> Any:
    hint = "check --config" if included_by is None else f"check `include` in {included_by.name}"
    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        reason = error.strerror or "a single value instead of keys"
        raise ConfigError(f"can't be read ({reason})", path=path, hint=hint) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"is not YAML ({reason})", path=path, hint="check the indentation") from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError("configuration", path=path, expected="keys and values", found="a list")
    return loaded


def _from_dotted(overrides: Sequence[str]) -> Any:
    for override in overrides:
        if "=" not in override:
            hint = "flags start with --"
            raise ConfigError("override", expected="key=value", found=repr(override), hint=hint)
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except OmegaConfBaseException:
        raise
    except Exception as error:  # the YAML parser's own tree of errors
        found, hint = repr(" ".join(overrides)), "check brackets and quotes"
        raise ConfigError("overrides", expected="YAML values", found=found, hint=hint) from error
