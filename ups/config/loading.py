"""Reading a run's configuration and writing it back; what is wrong with one, said about its keys.

What pydantic finds wrong is said about the configuration's keys. A key of earlier configurations that means
nothing any more is dropped with a warning. A key whose feature isn't there yet may stand in a file as long as
it is switched off; switched on it is an error, so that you don't believe to use what isn't used.
"""

from __future__ import annotations

import fnmatch
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.config.build_keys import LISTS_KEYS
from ups.config.old_keys import MEANINGLESS, NOT_YET, SET_BY_STAGE
from ups.config.run import RunConfig, StageConfig, TrainingConfig
from ups.errors import ConfigError, ConfigWarning, needs
from ups.output import Note
from ups_store.build import config_error, read_config
from ups_store.errors import ConfigError as StoreConfigError
from ups_store.old_names import with_present_names as with_present_names
from ups_store.printable import printable

with needs("train"):
    import yaml
    from pydantic import ValidationError

# Keys of `training` that each stage may have for itself, and where it has them.
_OF_STAGES: dict[str, tuple[str, ...]] = {
    key: (key,) for key in TrainingConfig.model_fields if key in StageConfig.model_fields
}
_OF_STAGES["lr"] = ("optimizer", "lr")


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
    note: Note | None = None,
) -> RunConfig:
    """Read a configuration; later sources win: included files, the file, dotted overrides.

    `include:` names one file or a list of them, relative to the file that it stands in. Values of overrides
    are YAML: `training.lr=1e-4`, `data.tasks=[burgers1d,advection1d]`. An override of a key of `training`
    that stages can have, too, wins over what the file says of each stage; an override of the stage's own key
    wins over both.

    Args:
        source: YAML file or the name of a shipped one, or the keys that one would hold, such as those in a
            checkpoint, or None.
        overrides: `key=value` with dotted keys.
        name: What errors call the source; by default its path.
        note: Takes warnings as "warning: ..."; by default they are a `ConfigWarning` each.

    Raises:
        ConfigError: Names each wrong key, what was found, what is expected, and the nearest known key.
    """
    if note is None:
        return _load(source, overrides, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        config = _load(source, overrides, name)
    for warning in caught:
        note(f"warning: {warning.message}")
    return config


def _load(
    source: str | os.PathLike[str] | Mapping[str, Any] | None, overrides: Sequence[str], name: str | None
) -> RunConfig:
    path = None if source is None or isinstance(source, Mapping) else Path(source)
    where = name or path
    try:
        given = source if isinstance(source, Mapping) else path
        values = read_config(given, overrides=overrides, adjust=_without_overridden)
    except StoreConfigError as error:
        raise as_own(error) from error
    try:
        declared = tuple(map(str, values.get("tasks") or ()))
        return RunConfig.model_validate(take_out_old_names(values), context={"tasks": declared})
    except ValidationError as error:
        outside = [override.partition("=")[0] for override in overrides]
        raise as_own(
            config_error(error, model=RunConfig, path=where, outside=outside, see=LISTS_KEYS)
        ) from error


def _without_overridden(values: dict[Any, Any], overrides: dict[Any, Any]) -> dict[Any, Any]:
    """A file's values without those of stages that an override of `training` wins over; warns of each."""
    said = _section(overrides, "training")
    for stage in _section(values, "stages"):
        for key, place in _OF_STAGES.items():
            section, name = _section(values, "stages", stage, *place[:-1]), place[-1]
            if key not in said or section.get(name) is None:
                continue
            if name in _section(overrides, "stages", stage, *place[:-1]):
                continue  # the command line decides this one, too
            old = f"stages.{stage}.{'.'.join(place)} = {section.pop(name)}"
            text = f"training.{key} = {said[key]} takes the place of {old}"
            warnings.warn(printable(text), ConfigWarning, stacklevel=5)
    return values


def _section(values: Any, *names: Any) -> dict[Any, Any]:
    """An inner mapping; an empty one where there is none."""
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def dump_config(config: RunConfig) -> str:
    """Write a configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def as_own(error: StoreConfigError) -> ConfigError:
    """An error of a configuration that the build reads as one of the training stack."""
    facts = {name: getattr(error, name) for name in ("kind", "path", "expected", "found", "hint")}
    return ConfigError(error.problem, **facts)


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
    if any(fnmatch.fnmatch(key, pattern) for pattern in SET_BY_STAGE):
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
