"""What pydantic found wrong, said about the configuration's keys."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ups.data.config import expected_by
from ups.errors import ConfigError

_UNKNOWN, _MISSING = "unknown_key", "missing_key"  # kinds of errors


def all_problems(
    error: ValidationError, *, model: type[BaseModel], path: Path | str | None, outside: Collection[str]
) -> ConfigError:
    """Say everything that pydantic found: a sentence for each key, a line each where there are several.

    Args:
        error: What was raised.
        model: The configuration's type.
        path: File that was read, or another name for it.
        outside: Dotted keys that the file didn't decide.
    """
    known, problems = known_keys(model), dict[str, ConfigError]()
    for one in error.errors():
        key = _key_of(one)
        where = None if any(key == name or name.startswith(f"{key}.") for name in outside) else path
        problems.setdefault(key, _problem(one, key, known=known, path=path, where=where))
    # A misspelled key explains why another one is missing.
    meant = {_near(key, known) for key, problem in problems.items() if problem.kind == _UNKNOWN}
    left = [problem for key, problem in problems.items() if problem.kind != _MISSING or key not in meant]
    if len(left) == 1:
        return left[0]
    kinds = {problem.kind for problem in left}
    listed = "".join(f"\n  {problem}" for problem in left)
    kind = kinds.pop() if len(kinds) == 1 else None
    return ConfigError(f"{len(left)} mistakes in the configuration:{listed}", kind=kind)


def _key_of(problem: ErrorDetails) -> str:
    """Dotted key; pydantic adds the alternative of a union to it, as in `num_workers.int`."""
    parts = [str(part) for part in problem["loc"]]
    if parts and (parts[-1] == "int" or parts[-1].startswith(("constrained-", "literal["))):
        parts.pop()
    return ".".join(parts)


def _problem(
    problem: ErrorDetails, key: str, *, known: list[str], path: Path | str | None, where: Path | str | None
) -> ConfigError:
    if problem["type"] == "extra_forbidden":
        hint = _hint(key, known)
        return ConfigError("unknown key", kind=_UNKNOWN, path=where, found=repr(key), hint=hint)
    if problem["type"] == "missing" and key in known:
        return ConfigError("missing key", kind=_MISSING, path=path, expected=key, hint=f"say {key}=...")
    if problem["type"] == "value_error":
        return as_own(problem["ctx"]["error"], key=key, path=where)
    return ConfigError(key, path=where, expected=expected_by(problem), found=repr(problem["input"]))


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


def _hint(key: str, known: list[str]) -> str:
    if key in known:  # {"data.root": ...} instead of {"data": {"root": ...}}
        return "in YAML, indent what follows a dot below what precedes it"
    near = _near(key, known)
    return f"did you mean {near}?" if near else "see docs/training.md for the known keys"


def _near(key: str, known: list[str]) -> str | None:
    """The known key that an unknown one was probably meant to be."""
    if key in known:
        return None
    parts = key.split(".")
    if parts[0] in ("stages", "tasks") and len(parts) > 1:
        parts[1] = "<name>"
    asked = ".".join(parts)
    sections = {name.partition(".")[0] for name in known}
    close = difflib.get_close_matches(asked, [*known, *sections], n=1)
    same_name = _same_last_part(asked, known)
    near = same_name or close if "." not in key else close or same_name
    return near[0] if near else None


def _same_last_part(key: str, known: list[str]) -> list[str]:
    in_training_last = sorted(known, key=lambda name: name.startswith("training."))
    by_name = {name.rpartition(".")[2]: name for name in in_training_last}
    return [by_name[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1)]


def as_own(error: Exception, *, key: str = "", path: Path | str | None = None) -> ConfigError:
    """An error of the sections that the build shares, or of a validator, as one of the training stack.

    Args:
        error: What was raised.
        key: What it is about, where it doesn't say so itself.
        path: File that it is about, where it doesn't say so itself.
    """
    facts = {name: getattr(error, name, None) for name in ("kind", "expected", "found", "hint")}
    where = getattr(error, "path", None) or path
    return ConfigError(getattr(error, "problem", str(error)) or key, path=where, **facts)
