"""What pydantic found wrong with a configuration, said about its keys; of a build, or of a whole run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from ups_store.errors import ConfigError, near_word, needs

with needs("hdf5"):
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

_UNKNOWN, _MISSING = "unknown_key", "missing_key"  # kinds of errors
# How pydantic names alternatives of a union within a key.
_ALTERNATIVES = ("constrained-", "literal[", "tuple[")
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


def config_error(error: ValidationError, **options: Any) -> ConfigError:
    """Everything that pydantic found in one error, a line each where it is several; as `config_errors`."""
    return ConfigError.joined(config_errors(error, **options))


def config_errors(
    error: ValidationError,
    *,
    model: type[BaseModel],
    path: Path | str | None,
    outside: Collection[str],
    see: str | None = None,
) -> list[ConfigError]:
    """Say everything that pydantic found: a sentence for each key.

    Args:
        error: What was raised.
        model: The configuration's type.
        path: File that was read, or another name for it.
        outside: Dotted keys that the file didn't decide.
        see: A page or a command that lists all keys; by default the error lists them.
    """
    known, problems = known_keys(model), dict[str, ConfigError]()
    for key, ways in _by_key(error.errors()).items():
        one = ways[0]
        is_outside = any(key == name or name.startswith(f"{key}.") for name in outside)
        is_outside |= ".".join(key.split(".")[:2]) in outside
        hint = _hint(key, known, _keys_beside(model, one["loc"]), see)
        expected = _either(map(_expected_by, ways))
        problems[key] = _problem(one, key, expected, known, hint, path, None if is_outside else path)
    # A misspelled key explains why another one is missing, a wrong part why the whole is wrong.
    meant = {problem.hint for problem in problems.values() if problem.kind == _UNKNOWN}
    return [
        problem
        for key, problem in problems.items()
        if not (problem.kind == _MISSING and f"did you mean {key}?" in meant)
        and not any(other.startswith(f"{key}.") for other in problems)
    ]


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted keys of a configuration, such as `stages.<name>.epochs` where names are the user's own."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        if (section := _section_of(field.annotation)) is not None:
            keys += known_keys(section, f"{prefix}{name}.")
            continue
        keys.append(f"{prefix}{name}")
        if (value := _model_within(field.annotation)) is not None:
            keys += known_keys(value, f"{prefix}{name}.<name>.")
    return keys


def _by_key(problems: Sequence[ErrorDetails]) -> dict[str, list[ErrorDetails]]:
    """What is wrong with each key; with one that takes several kinds of values once for each of them."""
    found: dict[str, list[ErrorDetails]] = {}
    for problem in problems:
        found.setdefault(_key_of(problem), []).append(problem)
    return found


def _key_of(problem: ErrorDetails) -> str:
    """Dotted key; pydantic adds alternatives of a union, as in `num_workers.int` or `mixer.tuple[...].1`."""
    parts = [str(part) for part in problem["loc"]]
    if parts and parts[-1] == "int":
        parts.pop()
    return ".".join(part for part in parts if not part.startswith(_ALTERNATIVES))


def _either(expected: Iterable[str]) -> str:
    """One of several things, each said once."""
    words = list(dict.fromkeys(expected))
    return (", or " if any(" or " in word for word in words) else " or ").join(words)


def _problem(
    problem: ErrorDetails,
    key: str,
    expected: str,
    known: Sequence[str],
    hint: str,
    path: Path | str | None,
    where: Path | str | None,
) -> ConfigError:
    if problem["type"] == "extra_forbidden":
        return ConfigError("unknown key", kind=_UNKNOWN, path=where, found=repr(key), hint=hint)
    if problem["type"] == "missing" and isinstance(problem["input"], dict):
        say = f"say {key}=..., or name a --config that has it" if key in known else None
        return ConfigError("missing key", kind=_MISSING, path=path, expected=key, hint=say)
    if problem["type"] == "value_error":
        inner = problem["ctx"]["error"]
        facts = {name: getattr(inner, name, None) for name in ("kind", "expected", "found", "hint")}
        said = getattr(inner, "problem", str(inner)) or key  # a validator below doesn't know where it is
        return ConfigError(said, path=where, **facts)
    return ConfigError(key, path=where, expected=expected, found=repr(problem["input"]))


def _expected_by(problem: ErrorDetails) -> str:
    """What pydantic expected, in the terms of a YAML file."""
    template = _EXPECTED.get(problem["type"])
    if template is None:
        return problem["msg"].removeprefix("Input should be ")
    return template.format(**problem.get("ctx", {}))


def _hint(key: str, known: Sequence[str], beside: Sequence[str], see: str | None) -> str:
    """What to do about an unknown key."""
    if key in known:  # {"data.root": ...} instead of {"data": {"root": ...}}
        return "in YAML, indent what follows a dot below what precedes it"
    section, _, name = key.rpartition(".")
    if beside:
        near = near_word(name, (each.rpartition(".")[2] for each in beside))
        near = near and f"{section}.{near}"
    else:
        near = _near(key, known)
    if near:
        return f"did you mean {near}?"
    return f"see {see} for the known keys" if see else f"known keys: {', '.join(beside or known)}"


def _near(key: str, known: Sequence[str]) -> str | None:
    """The known key that an unknown one was probably meant to be: its section first, then what is within."""
    place: list[str] = []
    *_, last = parts = key.split(".")
    for part in parts:
        names = _names_below(place, known)
        near = "<name>" if "<name>" in names else near_word(part, names)
        if near is None:
            return _elsewhere(last, known) if len(place) == len(parts) - 1 else None
        place.append(near)
    return ".".join(place)


def _names_below(place: Sequence[str], known: Sequence[str]) -> set[str]:
    depth, split = len(place), [name.split(".") for name in known]
    return {parts[depth] for parts in split if parts[:depth] == place and len(parts) > depth}


def _elsewhere(name: str, known: Sequence[str]) -> str | None:
    """The only key of such a name in any section, or the one that `training` has."""
    near = near_word(name, {key.rpartition(".")[2] for key in known})
    same = [key for key in known if key.rpartition(".")[2] == near]
    in_training = [key for key in same if key.startswith("training.")]
    return next((found[0] for found in (in_training, same) if len(found) == 1), None)


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
