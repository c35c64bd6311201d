"""Names of earlier versions that still parse: keys of configurations, and flags of commands.

One thing has one name in the command line, in YAML and in Python; docs/guides/migrate.md lists these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Dotted key of an earlier version, and today's. The sections of a training are `ups`'s, but the build reads
# the same files.
KEYS = {
    "data.task": "data.tasks",
    "training.time_stride": "training.stride",
    "training.rollout_horizon": "training.horizon",
}

# Flag of an earlier version, and today's; a command that has a flag of the earlier name keeps it.
FLAGS = {
    "--task": "--tasks",
    "--splits": "--split",
    "--latent-len": "--latent-tokens",
    "--steps": "--horizon",
}


def with_present_names(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Give the keys of one source their present names, in references `${...}` too.

    Args:
        values: Nested mappings of one file or of one command line's overrides; unchanged.

    Raises:
        ValueError: If a source has a key under both names; says which.
    """
    renamed: dict[Any, Any] = _with_present_references(values)
    for old, new in KEYS.items():
        (section, old_name), new_name = old.split("."), new.split(".")[1]
        inner = renamed.get(section)
        if isinstance(inner, dict) and old_name in inner:
            if new_name in inner:
                raise ValueError(f"{old} is the earlier name of {new}: give one of them")
            renamed[section] = {new_name if key == old_name else key: inner[key] for key in inner}
    return renamed


def _with_present_references(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_present_references(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_present_references(inner) for inner in value]
    if isinstance(value, str) and "${" in value:
        for old, new in KEYS.items():
            value = value.replace(f"${{{old}}}", f"${{{new}}}")
    return value
