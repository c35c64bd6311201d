"""What pydantic found wrong, said about the configuration's keys."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ups.data.config import EXPECTED
from ups.errors import ConfigError


def first_problem(
    error: ValidationError, *, model: type[BaseModel], path: Path | None, outside: Collection[str]
) -> ConfigError:
    """Turn the first thing that pydantic found into one sentence.

    Args:
        error: What was raised.
        model: The configuration's type.
        path: File that was read.
        outside: Dotted keys that the file didn't decide.
    """
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"]]
    key, context = ".".join(parts), first.get("ctx", {})
    known = known_keys(model)
    where = None if any(key == name or name.startswith(f"{key}.") for name in outside) else path
    if first["type"] == "extra_forbidden":
        hint = _near(key, known)
        return ConfigError("unknown key", kind="unknown_key", path=where, found=repr(key), hint=hint)
    if first["type"] == "missing" and key in known:
        return ConfigError("missing key", kind="missing_key", path=path, expected=key, hint=f"say {key}=...")
    if first["type"] == "value_error":
        return as_own(context["error"], key=key, path=where)
    template = EXPECTED.get(first["type"])
    expected = template.format(**context) if template else first["msg"].removeprefix("Input should be ")
    # pydantic adds the alternative of a union to the place of the error: `num_workers.int`.
    is_alternative = parts[-1] == "int" or parts[-1].startswith(("constrained-", "literal["))
    named = ".".join(parts[:-1]) if is_alternative else key
    return ConfigError(named, path=where, expected=expected, found=repr(first["input"]))


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted keys of a configuration, `stages.<name>.` for those of every stage."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += known_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
            for value_type in getattr(inner, "__args__", ()):
                if isinstance(value_type, type) and issubclass(value_type, BaseModel):
                    keys += known_keys(value_type, f"{prefix}{name}.<name>.")
    return keys


def _near(key: str, known: list[str]) -> str:
    if key in known:  # {"data.root": ...} instead of {"data": {"root": ...}}
        return "in YAML, indent what follows a dot below what precedes it"
    parts = key.split(".")
    if parts[0] in ("stages", "tasks") and len(parts) > 1:
        parts[1] = "<name>"
    asked = ".".join(parts)
    sections = {name.partition(".")[0] for name in known}
    close = difflib.get_close_matches(asked, [*known, *sections], n=1)
    same_name = _same_last_part(asked, known)
    near = same_name or close if "." not in key else close or same_name
    return f"did you mean {near[0]}?" if near else "see docs/training.md for the known keys"


def _same_last_part(key: str, known: list[str]) -> list[str]:
    in_training_last = sorted(known, key=lambda name: name.startswith("training."))
    by_name = {name.rpartition(".")[2]: name for name in in_training_last}
    return [by_name[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1)]


def as_own(error: Exception, *, key: str = "", path: Path | None = None) -> ConfigError:
    """An error of the sections that the build shares, or of a validator, as one of the training stack.

    Args:
        error: What was raised.
        key: What it is about, where it doesn't say so itself.
        path: File that it is about, where it doesn't say so itself.
    """
    facts = {name: getattr(error, name, None) for name in ("kind", "expected", "found", "hint")}
    where = getattr(error, "path", None) or path
    return ConfigError(getattr(error, "problem", str(error)) or key, path=where, **facts)
