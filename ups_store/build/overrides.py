"""Overrides: `key=value` with dotted keys, values in YAML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ups_store.build.yaml_file import MAX_DEPTH, expect_shallow
from ups_store.errors import ConfigError


def parse_overrides(overrides: Sequence[str]) -> Any:
    """Values of overrides, as an OmegaConf dictionary; later ones win.

    Raises:
        ConfigError: If one has no `=`, isn't YAML, or nests too deep.
        OmegaConfBaseException: If dotted keys contradict each other.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(
                "override", expected="key=value", found=repr(override), hint="flags start with --"
            )
        key, _, value = override.partition("=")
        if key.count(".") + key.count("[") > MAX_DEPTH:
            expected = f"a key of at most {MAX_DEPTH} parts"
            raise ConfigError("override", kind="too_deep", expected=expected, found="more")
        expect_shallow(value, subject=f"override {key}")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except OmegaConfBaseException:
        raise
    except Exception as error:  # the YAML parser's own tree of errors
        raise ConfigError(
            "overrides",
            expected="YAML values",
            found=repr(" ".join(overrides)),
            hint="check brackets and quotes",
        ) from error


def expect_like(file: object, given: object, key: str = "") -> None:
    """Refuse an override that says a list where the file has keys, or the other way round.

    Raises:
        ConfigError: With the key.
    """
    if isinstance(file, dict) and isinstance(given, dict):
        for name, value in given.items():
            if name in file:
                expect_like(file[name], value, f"{key}.{name}" if key else str(name))
    elif isinstance(file, dict) and isinstance(given, list):
        hint = f"say {key}.<name>=..."
        raise ConfigError(key, expected="keys and values", found="a list", hint=hint)
    elif isinstance(file, list) and isinstance(given, dict):
        hint = f"say {key}=[...], which replaces the list as a whole"
        raise ConfigError(key, expected="a list", found="keys and values", hint=hint)
