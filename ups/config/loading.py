"""Reading a configuration: YAML with `include:`, then dotted overrides; and writing it back.

What pydantic finds wrong is said about the configuration's keys. A key of earlier configurations that means
nothing any more is dropped with a warning. A key whose feature isn't there yet may stand in a file as long as
it is switched off; switched on it is an error, so that you don't believe to use what isn't used.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ups.config.run import RunConfig, StageConfig, TrainingConfig
from ups.config.shared import (
    SharedConfigError,
    check_like,
    expected_by,
    parse_overrides,
    read_yaml,
    with_present_names,
)
from ups.errors import ConfigError, ConfigWarning
from ups.output import Note

# Keys of `training` that each stage may have for itself, and where it has them.
_OF_STAGES: dict[str, tuple[str, ...]] = {
    key: (key,) for key in TrainingConfig.model_fields if key in StageConfig.model_fields
}
_OF_STAGES["lr"] = ("optimizer", "lr")

_UNKNOWN, _MISSING = "unknown_key", "missing_key"  # kinds of errors

# Patterns of dotted keys, and why the key means nothing.
MEANINGLESS = {
    "training.dt": "the physical step is the difference of the stored times",
    "training.num_gpus": "`torchrun --nproc-per-node N` starts a process a GPU",
    "training.persistent_workers": "readers live as long as the build does",
    "training.cache_dir": "training.latent_cache_dir says where latents are",
    "training.checkpoint_interval": "checkpoint.interval says it, in optimiser steps",
    "training.inverse_loss_warmup_epochs": "inverse losses have their weight from the start",
    "training.inverse_loss_max_weight": "inverse losses have weight 1",
    "training.lambda_inv_enc": "inverse losses have weight 1",
    "training.lambda_inv_dec": "inverse losses have weight 1",
    "training.log_per_task_metrics": "metrics are always logged per task",
    "training.query_sampling.enabled": "query_sampling.num_queries switches it on",
    "training.query_sampling.strategy": "points are drawn uniformly",
    "data.patch_size": "encoder.patch_size says it",
    "data.shard_limit": "data.limit says it",
    "data.download": "data.files and data.root name the sources",
    "data.task_sampling": "every task gives as many batches as it has data",
    "benchmark": "cuDNN chooses its algorithms itself",
    "deterministic": "runs on a CPU always repeat to the bit",
}

# Patterns of dotted keys whose feature isn't there yet, its name, and the values that leave it off.
NOT_YET: dict[str, tuple[str, tuple[Any, ...]]] = {
    "training.use_fsdp2": ("sharded training (FSDP2)", (None, False)),
    "training.cpu_offload_optimizer": ("optimiser states on the CPU", (None, False)),
    "training.query_sampling.curriculum.enabled": ("a curriculum of queries", (None, False)),
    "training.query_sampling.curriculum": ("a curriculum of queries", (None, False)),
    "training.physics_priors.enabled": ("physics priors", (None, False)),
    "training.physics_priors": ("physics priors", (None, False)),
    "training.distill_*": ("distillation", ()),
    "training.tau_distribution": ("distillation", ()),
    "ttc.enabled": ("test-time conditioning", (None, False)),
    "ttc": ("test-time conditioning", (None, False)),
    "diffusion": ("the diffusion corrector", ()),
}
# Settings of features that have no switch of their own: their stage is the switch, and it isn't there yet.
_SET_BY_STAGE = ("training.distill_*", "training.tau_distribution", "diffusion")


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
        file = OmegaConf.create(_present(source)) if path is None else read_yaml(path)
        given = parse_overrides(overrides)
        check_like(OmegaConf.to_container(file), OmegaConf.to_container(given))
        file = _without_overridden(file, given)
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


def _present(source: Any) -> dict[Any, Any]:
    """The keys of a mapping under their present names."""
    try:
        return with_present_names(source or {})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _without_overridden(file: Any, given: Any) -> Any:
    """A file without the stages' values that an override of `training` is to win over; warns of each."""
    values, overrides = OmegaConf.to_container(file), OmegaConf.to_container(given)
    assert isinstance(values, dict)
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
            warnings.warn(text, ConfigWarning, stacklevel=4)
    return OmegaConf.create(values)


def _section(values: Any, *names: Any) -> dict[Any, Any]:
    """An inner mapping; an empty one where there is none."""
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def dump_config(config: RunConfig) -> str:
    """Write a configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


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
    if any(fnmatch.fnmatch(key, pattern) for pattern in _SET_BY_STAGE):
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
