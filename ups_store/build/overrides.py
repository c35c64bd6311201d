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
