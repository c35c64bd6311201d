"""What pydantic found wrong with a build's configuration, as one sentence about its keys."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ups_store.errors import ConfigError

# What pydantic says in terms of Python, by its type of error; {} are its own numbers.
_EXPECTED = {
    "model_type": "keys and values",
    "dict_type": "keys and values",
    "tuple_type": "a list",
    "path_type": "a path",
    "invalid_key": "a name",
    "missing": "one more value",
    "too_short": "{min_length} or more values",
    "too_long": "at most {max_length} values",
}


def first_problem(
    error: ValidationError, *, model: type[BaseModel], path: Path | None, outside: Collection[str]
) -> ConfigError:
    """One sentence for one thing that pydantic found.

    Args:
        error: What was raised.
        model: The configuration's type.
        path: File that was read.
        outside: Dotted keys that the file didn't decide.
    """
    problems = error.errors()
    # A misspelled key explains why another is missing.
    first = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    parts = [str(part) for part in first["loc"]]
    key, context = ".".join(parts), first.get("ctx", {})
    where = None if ".".join(parts[:2]) in outside else path
    inner = context.get("error")
    if isinstance(inner, ConfigError):
        inner.path = str(where) if where else None
        inner.problem = inner.problem or key  # a validator below doesn't know where it is
        return inner
    if first["type"] == "extra_forbidden":
        near = _near(key, _known_keys(model), _keys_beside(model, first["loc"]))
        return ConfigError("unknown key", kind="unknown_key", path=where, found=repr(key), hint=near)
    if first["type"] == "missing" and isinstance(first["input"], dict):
        hint = f"say {key}=... or give its flag" if key in _known_keys(model) else None
        return ConfigError("missing key", kind="missing_key", path=path, expected=key, hint=hint)
    return ConfigError(key, path=where, expected=expected_by(first), found=repr(first["input"]))


def expected_by(problem: ErrorDetails) -> str:
    """What pydantic expected, in the terms of a YAML file."""
    template = _EXPECTED.get(problem["type"])
    if template is None:
        return problem["msg"].removeprefix("Input should be ")
    return template.format(**problem.get("ctx", {}))


def _near(key: str, known: Sequence[str], beside: Sequence[str]) -> str:
    if key in known:  # {"data.root": ...} instead of {"data": {"root": ...}}
        return "in YAML, indent what follows a dot below what precedes it"
    known = [*beside, *known] if key.startswith("tasks.") else known
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known keys: {', '.join(beside or known)}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            keys += _known_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a key's annotation names, optional ones too."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _keys_beside(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that a task's declaration may have where it has an unknown one."""
    for part in location[:-1]:
        if part in model.model_fields:  # other parts are names and numbers of a collection's items
            model = _model_within(model.model_fields[str(part)].annotation) or model
    parent = ".".join(map(str, location[:-1]))
    return [f"{parent}.{name}" for name in model.model_fields] if parent.startswith("tasks.") else []


def _model_within(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation such as `dict[str, Model] | None` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_within(inner) for inner in get_args(annotation))
    return next((model for model in found if model is not None), None)
